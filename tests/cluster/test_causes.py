"""Why a task does not start, and why it ended, on a real cluster.

With STOKER_RECORD_PODS set to a directory, the pods' states are written there, for the tests without a
cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from engine_parts import (
    Stage,
    attempt_of,
    engine_of,
    job_of,
    phase,
    play,
    seen,
    started,
)

from stoker.engine.base import Observation, Presence
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.courier_client.connections import NoAddress
from stoker.errors import EngineError
from stoker.settings import Home
from stoker.task.directory import TaskDir
from support.waiting import is_there, wait_async

pytestmark = pytest.mark.timeout(600)


def waits(*words: str) -> Callable[[Observation], bool]:
    return lambda found: all(word in found.waiting for word in words)


def gone(found: Observation) -> bool:
    return found.presence is Presence.GONE


# -- a task does not start -----------------------------------------------------------------------------------


def test_an_image_that_is_not_there(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            wanted = f"{stage.cluster.registry}/nobody/nothing:1"
            await engine.submit(attempt_of(job_of(wanted)))
            found = await seen(engine, waits("cannot be pulled"), "the image to be missed")
            assert wanted in found.waiting and "the image does not exist" in found.waiting
            assert (found.hopeless, found.patience, found.presence) == ("image", 600.0, Presence.ALIVE)
            again = await seen(
                engine, lambda one: "ImagePullBackOff" in str(one.evidence), "the kubelet to back off"
            )
            assert "the image does not exist" in again.waiting, (
                "the reason stays when only the back-off is shown"
            )
            await stage.keep(engine, "image-missing")

    play(story)


def test_a_registry_that_is_not_there(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await engine.submit(attempt_of(job_of("127.0.0.1:9/a/b:1")))
            found = await seen(engine, waits("does not answer the node"), "the registry to be missed")
            assert found.hopeless == "image" and "127.0.0.1:9/a/b:1" in found.waiting
            await stage.keep(engine, "registry-away")

    play(story)


@pytest.mark.parametrize(
    ("resources", "words", "name"),
    [
        (
            {"cpu": 500},
            ("too little CPU free", "It requests 500 CPU, and the largest node has"),
            "unschedulable-cpu",
        ),
        (
            {"gpu": 64},
            ("too little nvidia.com/gpu free", "It requests 64 nvidia.com/gpu"),
            "unschedulable-gpu",
        ),
        (
            {"memory": "4Ti"},
            ("too little memory free", "It requests 4 TiB of memory"),
            "unschedulable-memory",
        ),
    ],
)
def test_a_task_that_no_node_can_take(
    stage: Stage, resources: dict[str, Any], words: tuple[str, ...], name: str
) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await engine.submit(attempt_of(stage.job(resources=resources)))
            found = await seen(engine, waits("no node can take it now"), "the scheduler to give up")
            assert all(word in found.waiting for word in words), found.waiting
            assert (found.hopeless, found.node) == ("engine-error", "")
            await stage.keep(engine, name)

    play(story)


def test_a_pool_without_nodes(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine(pools={"moon": {"selector": {"place": "moon"}}}) as engine:
            await engine.submit(attempt_of(stage.job(pool="moon")))
            found = await seen(engine, waits("not belong to the pool"), "the scheduler to give up")
            assert found.hopeless == "engine-error"
            await stage.keep(engine, "unschedulable-pool")

    play(story)


def test_a_claim_that_is_not_there(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await engine.submit(attempt_of(stage.job(inputs={"big": "pvc://nothing/at/all"})))
            found = await seen(engine, waits('"nothing" not found'), "the claim to be missed")
            assert found.hopeless == "engine-error"
            await stage.keep(engine, "claim-missing")

    play(story)


def test_an_image_without_python(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await engine.submit(attempt_of(stage.job("nopython")))
            found = await seen(engine, waits("has no Python"), "init to fail")
            assert "`launcher: none`" in found.waiting and "`python:`" in found.waiting
            assert (found.hopeless, found.patience) == ("image", 0.0), "waiting does not help"
            await stage.keep(engine, "no-python")

    play(story)


def test_an_image_without_python_where_stoker_has_its_own(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine(stoker_image=stage.image("stoker")) as engine:
            await engine.submit(attempt_of(stage.job("nopython")))
            found = await seen(engine, gone, "the launcher to fail")
            assert found.cause == "image" and "has no Python" in found.proof
            await stage.keep(engine, "no-python-main")

    play(story)


def test_a_python_that_is_not_there(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await engine.submit(attempt_of(stage.job(python="/opt/none/python3")))
            found = await seen(engine, lambda one: one.hopeless == "image", "init to fail")
            assert "has no /opt/none/python3" in found.waiting
            await stage.keep(engine, "wrong-python")

    play(story)


def test_a_secret_that_is_not_there(stage: Stage) -> None:
    extra = {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "no", "key": "x"}}}]}]}}  # fmt: skip

    async def story() -> None:
        async with stage.engine(allow=["secrets"], pod=extra) as engine:
            await engine.submit(attempt_of(stage.job()))
            found = await seen(
                engine, waits("container main cannot be started", '"no" not found'), "main to fail"
            )
            assert found.hopeless == "engine-error"
            await stage.keep(engine, "config-error")

    play(story)


def test_a_full_quota(stage: Stage) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "0"}},
    }
    stage.kubectl("apply", "-f", "-", input=json.dumps(quota))

    async def story() -> None:
        async with stage.engine() as engine:
            await engine.submit(attempt_of(stage.job()))
            found = await seen(engine, waits("quota few is used up"), "the quota to be said")
            assert (found.presence, found.hopeless) == (Presence.ALIVE, "engine-error")
            assert "raised" in found.evidence["hint"]
            quota["spec"] = {"hard": {"pods": "1"}}
            stage.kubectl("apply", "-f", "-", input=json.dumps(quota))
            await seen(engine, lambda one: bool(one.node), "room to be found")

            async def reached() -> TaskDir | None:
                # The Secret records the task's pod only after the pod exists.
                directory = await engine.reach(found.handle, "worker-0")
                return None if isinstance(directory, NoAddress) else directory

            await phase(await wait_async(reached, what="the task to be known", good=is_there), "ready")

    play(story)


def test_a_namespace_that_takes_only_restricted_pods(stage: Stage) -> None:
    stage.cluster.kubectl(
        "label", "namespace", stage.namespace, "pod-security.kubernetes.io/enforce=restricted"
    )

    async def story() -> None:
        async with stage.engine(security="baseline") as engine:
            with pytest.raises(EngineError, match="pod security level does not admit it") as caught:
                await engine.submit(attempt_of(stage.job()))
            assert "allowPrivilegeEscalation" in caught.value.message and "security" in (
                caught.value.hint or ""
            )
            assert [gone(found) for found in await engine.observe()] == [True]
        async with stage.engine() as engine:  # the pods of a run with a launcher are restricted by default
            handle = await engine.submit(attempt_of(stage.job(), number=2))
            await phase(await engine.reach(handle, "worker-0"), "ready")

    play(story)


# -- a task ended --------------------------------------------------------------------------------------------


def test_a_pod_that_was_deleted_by_hand(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await started(engine, attempt_of(stage.job()), ["sleep", "1000"])
            stage.kubectl("delete", "pod", "digits-7f3k-1-worker-0", "--grace-period=1")
            found = await seen(engine, gone, "the pod to be gone")
            assert found.cause == "lost" and "digits-7f3k-1-worker-0" in found.proof

    play(story)


def test_a_secret_that_was_deleted_by_hand(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await started(engine, attempt_of(stage.job()), ["sleep", "1000"])
            stage.kubectl("delete", "secret", "stoker-digits-7f3k-1")
            found = await seen(engine, gone, "all of it to be gone")
            assert found.cause == "lost"
            assert "Secret stoker-digits-7f3k-1 was deleted from outside Stoker" in found.proof
            handle = found.handle
            await engine.stop(handle, grace=timedelta(0))
            await engine.remove(handle)
            assert not await engine.observe()

    play(story)


def test_a_pod_that_uses_more_disk_than_it_may(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            job = stage.job(resources={"disk": "20Mi"})
            fill = ["/bin/sh", "-c", "head -c 60000000 /dev/zero > $STOKER_OUTPUT_DIR/big; sleep 1000"]
            await started(engine, attempt_of(job), fill)
            found = await seen(engine, gone, "the pod to be evicted")
            assert found.cause == "disk" and "used more disk than it may" in found.proof
            await stage.keep(engine, "evicted-disk")

    play(story)


def test_a_drained_node(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            _, directory = await started(engine, attempt_of(stage.job(grace="1s")), ["sleep", "1000"])
            await phase(directory, "running")
            name = "digits-7f3k-1-worker-0"
            eviction = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": stage.namespace},
                "deleteOptions": {"gracePeriodSeconds": 2},
            }
            path = f"/api/v1/namespaces/{stage.namespace}/pods/{name}/eviction"
            stage.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))
            found = await seen(engine, gone, "the pod to be evicted")
            assert found.cause == "evicted" and "being drained" in found.proof, found
            await stage.keep(engine, "drained")

    play(story)


def test_a_pod_that_had_to_make_way(stage: Stage) -> None:
    for name, value in (("low", 1000), ("high", 1000000)):
        body = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"{stage.namespace}-{name}"},
            "value": value,
        }
        stage.cluster.kubectl("apply", "-f", "-", input=json.dumps(body))
    classes = {"low": f"{stage.namespace}-low", "high": f"{stage.namespace}-high"}

    async def story() -> None:
        async with stage.engine(priority_classes=classes) as engine:
            gpus = max(len(node.gpus) for node in await engine.capacity())
            job = stage.job(resources={"gpu": gpus}, priority="low", grace="1s")
            await started(engine, attempt_of(job), ["sleep", "1000"])
            better = stage.job(resources={"gpu": gpus}, priority="high")
            await engine.submit(attempt_of(better, run="better-1"))
            found = await seen(engine, gone, "the pod to make way")
            assert found.cause == "preempted" and "higher priority" in found.proof, found
            await stage.keep(engine, "preempted")

    try:
        play(story)
    finally:
        stage.cluster.kubectl("delete", "priorityclass", *classes.values())


def test_a_tainted_node(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            handle, _ = await started(engine, attempt_of(stage.job(grace="1s")), ["sleep", "1000"])
            node = next(found.node for found in await engine.observe() if found.handle == handle)
            taint = f"stoker-test-{stage.namespace}"
            stage.cluster.kubectl("taint", "node", node, f"{taint}=x:NoExecute")
            try:
                found = await seen(engine, gone, "the pod to be evicted")
            finally:
                stage.cluster.kubectl("taint", "node", node, f"{taint}-")
            assert found.cause == "evicted" and "tainted" in found.proof, found
            await stage.keep(engine, "tainted")

    play(story)


def test_names_are_by_labels(stage: Stage) -> None:
    """Two servers in one namespace do not see each other's tasks."""

    async def story() -> None:
        async with stage.engine() as engine:
            await engine.submit(attempt_of(stage.job()))
            other = engine_of(Home(stage.home.root.parent / "other"), engine.config)
            try:
                assert not await other.observe()
                with pytest.raises(EngineError, match="belongs to another server"):
                    await other.submit(attempt_of(stage.job()))
                await other.stop({"run": "digits-7f3k", "attempt": 1}, grace=timedelta(0))
                await other.remove({"run": "digits-7f3k", "attempt": 1})
            finally:
                await other.close()
            assert [names.secret_name(one.run, one.attempt) for one in await engine.observe()] == [
                "stoker-digits-7f3k-1"
            ]

    play(story)
