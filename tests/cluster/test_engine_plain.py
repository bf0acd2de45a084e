"""Images without a launcher: the engine records the API server's facts in the format of a launcher."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_parts import (
    AnyCluster,
    Stage,
    attempt_of,
    engine_of,
    image,
    log_of,
    phase,
    play,
    seen,
    settings_of,
)

from stoker.engine.base import Attempt, Handle, Presence, TaskPlan
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.task.directory import RemoteAccess, TaskDir
from stoker.task.formats import Order
from support.waiting import is_there, wait_async

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def stage(cluster: AnyCluster, namespace: str, tmp_path: Path) -> Stage:
    image(cluster, "nopython")  # the first call builds it
    return Stage(cluster, namespace, tmp_path)


def plain(stage: Stage, command: str, **more: Any) -> Attempt:
    """An attempt in an image that contains nothing of Stoker, nor Python."""
    job = stage.job("nopython", launcher="none", run=["/bin/sh", "-c", command], **more)
    return attempt_of(job)


async def begun(engine: KubernetesEngine, attempt: Attempt) -> tuple[Handle, TaskDir]:
    handle = await engine.submit(attempt)
    return handle, await ordered(engine, handle)


async def ordered(engine: KubernetesEngine, handle: Handle) -> TaskDir:
    directory = await engine.reach(handle, "worker-0")

    async def there() -> bool | None:
        return directory.exists() or None

    await wait_async(there, what="the container to be started", good=is_there)
    await asyncio.to_thread(directory.write_order, Order(seq=1, generation=1, verb="run"))
    return directory


def lines_of(directory: TaskDir) -> list[str]:
    return [line.split(" ", 2)[2] for line in log_of(directory).decode().splitlines()]


def test_it_runs_to_its_end_and_holds(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            command = 'echo "run $STOKER_RUN price $PRICE token ${TOKEN#s3}"; printf unfinished; exit 7'
            attempt = plain(stage, command, env={"PRICE": "$5 $(HOME)"}, secrets=["TOKEN"])
            attempt = Attempt(attempt.run, 1, attempt.tasks, job=attempt.job, secrets={"TOKEN": "s3cret"})
            handle, directory = await begun(engine, attempt)
            assert isinstance(directory, RemoteAccess)
            status = await phase(directory, "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["code"], status.ending["seq"]) == ("exit", 7, 1)
            expected = ["run digits-7f3k price $5 $(HOME) token cret", "unfinished"]
            assert status.ending["last_lines"] == expected and lines_of(directory) == expected
            assert [entry["k"] for entry in directory.journal()[0]] == ["starting", "started", "ended"]
            (found,) = await engine.observe()
            assert (found.presence, found.waiting) == (Presence.ALIVE, ""), "it holds"
            await engine.stop(handle, grace=timedelta(0))
            await engine.remove(handle)
            assert not await engine.observe()

    play(story)


def test_no_line_is_lost_or_doubled_while_servers_come_and_go(stage: Stage) -> None:
    async def story() -> None:
        count = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); [ $((i % 500)) = 0 ] && sleep 1; done; exit 3"
        attempt = plain(stage, count)
        config = settings_of(stage.cluster, stage.namespace, default_cpu=0.05)
        for turn in range(3):
            engine = engine_of(stage.home, config)
            try:
                handle = await engine.submit(attempt)
                directory = (
                    await ordered(engine, handle) if turn == 0 else await engine.reach(handle, "worker-0")
                )
                if turn < 2:
                    await wait_async(
                        lambda directory=directory, turn=turn: _more(directory, 400 * (turn + 1)),
                        what="more lines",
                        good=is_there,
                    )
                else:
                    status = await phase(directory, "ended")
                    assert status.ending is not None and status.ending["code"] == 3
                    assert lines_of(directory) == [f"line {number}" for number in range(3000)]
                    kinds = [entry["k"] for entry in directory.journal()[0]]
                    assert kinds == ["starting", "started", "ended"]
                    await engine.stop(handle, grace=timedelta(0))
                    await engine.remove(handle)
            finally:
                await engine.close()

    async def _more(directory: TaskDir, wanted: int) -> bool | None:
        return len(lines_of(directory)) >= wanted or None

    play(story)


def test_it_is_stopped_with_its_grace(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            command = (
                "trap 'echo saving; sleep 1; echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done"
            )
            _, directory = await begun(engine, plain(stage, command))

            async def up() -> bool | None:
                return lines_of(directory) == ["up"] or None

            await wait_async(up, what="its first line", good=is_there)
            stop = Order(seq=2, generation=1, verb="stop", grace=20.0)
            await asyncio.to_thread(directory.write_order, stop)
            status = await phase(directory, "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["code"], status.ending["seq"]) == ("stopped", 0, 2)
            assert lines_of(directory) == ["up", "saving", "saved"]

    play(story)


def test_it_runs_out_of_memory(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            attempt = plain(stage, "echo eating; tail /dev/zero", resources={"memory": "32Mi"})
            _, directory = await begun(engine, attempt)
            status = await phase(directory, "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["limit"]) == ("oom", 32 << 20)
            await stage.keep(engine, "plain-oom")

    play(story)


def test_it_has_a_timeout(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            _, directory = await begun(engine, plain(stage, "sleep 1000", timeout="3s"))
            status = await phase(directory, "ended")
            assert status.ending is not None and status.ending["kind"] == "timeout"
            await stage.keep(engine, "plain-deadline")

    play(story)


def test_its_pod_is_not_made_twice(stage: Stage) -> None:
    """The pod may have run: a second submit reports it as gone."""

    async def story() -> None:
        async with stage.engine() as engine:
            attempt = plain(stage, "sleep 1000")
            _, directory = await begun(engine, attempt)
            stage.kubectl("delete", "pod", "digits-7f3k-1-worker-0", "--grace-period=1")
            found = await seen(engine, lambda one: one.presence is Presence.GONE, "the pod to be gone")
            await engine.submit(attempt)
            assert not stage.kubectl("get", "pods", "-o", "name")
            assert isinstance(directory, RemoteAccess)
            await asyncio.to_thread(directory.settle, 1)
            kinds = [entry["k"] for entry in directory.journal()[0]]
            assert kinds[-1] == "ended" and found.cause == "lost"

    play(story)


def test_a_failed_image_pull_is_reported_first(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            job = plain(stage, "true").job
            assert job is not None
            wrong = job.model_copy(update={"image": f"{stage.cluster.registry}/nobody/nothing:1"})
            handle = await engine.submit(Attempt("digits-7f3k", 1, (TaskPlan("worker-0"),), job=wrong))
            found = await seen(
                engine, lambda one: "cannot be pulled" in one.waiting, "the image to be missed"
            )
            assert found.hopeless == "image"
            assert not (await engine.reach(handle, "worker-0")).exists()

    play(story)
