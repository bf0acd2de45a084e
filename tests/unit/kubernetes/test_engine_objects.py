"""The engine creates each object in a cluster once, whatever answer is lost, and reports the objects that it
finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from stoker.engine.base import Observation, Presence
from stoker.engine.kubernetes import engine as engine_module
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.errors import Conflict, EngineError, EngineUnavailable, NotFound
from support.kubernetes.engine_api import Server, attempt, engine
from support.waiting import wait_async

PODS = {"digits-7f3k-1-worker-0", "digits-7f3k-1-worker-1"}


Story = Callable[[Server], Coroutine[Any, Any, None]]


def play(ca: trustme.CA, story: Story) -> None:
    async def limited() -> None:
        server = Server(ca)
        await server.start()
        try:
            async with asyncio.timeout(60):
                await story(server)
        finally:
            await server.stop()

    asyncio.run(limited())


class Open:
    """`async with`: an engine that is closed at the end, as when its server ends."""

    def __init__(self, server: Server, tmp_path: Path, **settings: Any) -> None:
        self.engine = engine(server, tmp_path, **settings)

    async def __aenter__(self) -> KubernetesEngine:
        return self.engine

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()


async def seen(found: KubernetesEngine) -> dict[str, Observation]:
    return {one.task: one for one in await found.observe()}


def incarnations(server: Server) -> dict[str, Any]:
    (secret,) = server.of("secrets").values()
    return json.loads(secret["metadata"]["annotations"].get(names.SUBMITTED, "{}"))


# -- creating --------------------------------------------------------------------------------------------------


def test_an_attempt_is_a_secret_and_its_pods_owned_by_it(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as made:
            handle = await made.submit(attempt())
            assert handle == {"engine": "test", "run": "digits-7f3k", "attempt": 1}
            (secret,) = server.of("secrets").values()
            assert set(server.of("pods")) == PODS
            for pod in server.of("pods").values():
                (owner,) = pod["metadata"]["ownerReferences"]
                assert (owner["kind"], owner["uid"]) == ("Secret", secret["metadata"]["uid"])
            uids = {name: pod["metadata"]["uid"] for name, pod in server.of("pods").items()}
            assert incarnations(server) == {
                f"worker-{n}": [1, uids[f"digits-7f3k-1-worker-{n}"]] for n in range(2)
            }
            first = server.writes[0], server.writes[-1]
            assert first == (("POST", "secrets"), ("PATCH", "secrets"))

    play(ca, story)


def test_submitting_again_creates_nothing(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as first:
            await first.submit(attempt())
            before = len(server.writes)
            await first.submit(attempt())
        async with Open(server, tmp_path) as second:
            await second.submit(attempt())
            assert len(server.writes) == before
            assert set(await seen(second)) == {"worker-0", "worker-1"}

    play(ca, story)


@pytest.mark.parametrize("lost", [False, True], ids=["not-done", "answer-lost"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_the_next_submit_continues_after_any_lost_write(
    ca: trustme.CA, tmp_path: Path, at: int, lost: bool
) -> None:
    """The server is killed at each of its writes: before the write is done, or before its answer arrives."""

    async def story(server: Server) -> None:
        server.fail_at, server.done_before_failing = at, lost
        async with Open(server, tmp_path) as first:
            with pytest.raises(EngineError):
                await first.submit(attempt())
        server.fail_at = None
        async with Open(server, tmp_path) as second:
            await second.submit(attempt())
            assert set(server.of("pods")) == PODS and len(server.of("secrets")) == 1
            assert set(incarnations(server)) == {"worker-0", "worker-1"}
            assert {one.presence for one in await second.observe()} == {Presence.ALIVE}

    play(ca, story)


def test_a_pod_that_existed_is_not_created_again(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as first:
            await first.submit(attempt())
            server.remove("pods", "digits-7f3k-1-worker-0")

            async def gone() -> bool:
                return (await seen(first))["worker-0"].presence is Presence.GONE

            await wait_async(gone)
            await first.submit(attempt())
        async with Open(server, tmp_path) as second:
            await second.submit(attempt())
            found = await seen(second)
            assert set(server.of("pods")) == {"digits-7f3k-1-worker-1"}
            assert (found["worker-0"].presence, found["worker-0"].cause) == (Presence.GONE, "lost")
            assert found["worker-1"].presence is Presence.ALIVE
            again = attempt(incarnation=2)
            with pytest.raises(Conflict, match="worker-1 of digits-7f3k is still running"):
                await second.submit(again)
            one = attempt(tasks=1, incarnation=2)
            await second.submit(one)
            assert set(server.of("pods")) == {"digits-7f3k-1-worker-0-r2", "digits-7f3k-1-worker-1"}
            assert (await seen(second))["worker-0"].incarnation == 2
            (secret,) = server.of("secrets").values()
            assert "task.worker-0.2.json" in secret["data"] and "task.worker-0.1.json" in secret["data"]

    play(ca, story)


def test_a_task_without_a_launcher_is_started_at_most_once(ca: trustme.CA, tmp_path: Path) -> None:
    """Its pod needs no order: a server that cannot know whether it ran does not create it again."""

    async def story(server: Server) -> None:
        plain = attempt(tasks=1, launcher="none")
        server.fail_at, server.done_before_failing = 2, False
        async with Open(server, tmp_path) as first:
            with pytest.raises(EngineError):
                await first.submit(plain)
        server.fail_at = None
        async with Open(server, tmp_path) as second:
            await second.submit(plain)
            assert server.of("pods") == {}
            assert (await seen(second))["worker-0"].presence is Presence.GONE

    play(ca, story)


def test_an_object_of_another_server_is_left_alone(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        server.put("secrets", "stoker-digits-7f3k-1", metadata={"labels": {names.HOME: "other"}})
        async with Open(server, tmp_path) as made:
            with pytest.raises(EngineError, match="belongs to another server"):
                await made.submit(attempt())
            await made.stop({"run": "digits-7f3k", "attempt": 1}, grace=timedelta(0))
            await made.remove({"run": "digits-7f3k", "attempt": 1})
            assert server.of("secrets") and not await made.observe()

    play(ca, story)


def test_a_full_quota_is_retried(ca: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "RETRY", 0.05)

    async def story(server: Server) -> None:
        server.refuse_pods = (
            403,
            'pods "a" is forbidden: exceeded quota: team, requested: pods=1, used: pods=0',
        )
        async with Open(server, tmp_path, start_deadline=90) as made:
            handle = await made.submit(attempt(tasks=1))
            found = (await seen(made))["worker-0"]
            assert (found.presence, found.hopeless, found.patience) == (Presence.ALIVE, "engine-error", 90.0)
            assert "quota team is used up" in found.waiting
            server.refuse_pods = None

            async def taken() -> bool:
                return bool(server.of("pods"))

            await wait_async(taken)
            server.refuse_pods = 403, "exceeded quota: team, requested: pods=1"
            await made.submit(attempt("other-1", tasks=1))
            await made.stop({"run": "other-1", "attempt": 1}, grace=timedelta(0))
            await made.remove({"run": "other-1", "attempt": 1})
            server.refuse_pods = None
            await asyncio.sleep(0.3)
            assert set(server.of("pods")) == {"digits-7f3k-1-worker-0"}, "no retry for a stopped attempt"
            del handle

    play(ca, story)


def test_a_stopped_task_is_not_retried(
    ca: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry uses the latest request."""
    monkeypatch.setattr(engine_module, "RETRY", 0.05)

    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as made:
            handle = await made.submit(attempt(tasks=1))
            server.refuse_pods = 403, "exceeded quota: team, requested: pods=1"
            await made.submit(attempt(tasks=3))
            assert (await seen(made))["worker-1"].presence is Presence.ALIVE
            await made.stop(handle, grace=timedelta(0), tasks=["worker-1"])
            gone = (await seen(made))["worker-1"]
            assert (gone.presence, gone.proof) == (
                Presence.GONE,
                "pod digits-7f3k-1-worker-1 was never created",
            )
            one, two, three = attempt(tasks=3).tasks
            await made.submit(replace(attempt(), tasks=(one, replace(two, incarnation=2), three)))
            server.refuse_pods = None

            async def taken() -> bool:
                return len(server.of("pods")) == 3

            await wait_async(taken)
            made_for = {names.key_of(pod)[2]: names.incarnation_of(pod) for pod in server.of("pods").values()}
            assert made_for == {"worker-0": 1, "worker-1": 2, "worker-2": 1}

    play(ca, story)


def test_a_pod_that_is_refused_for_good_is_reported(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        server.refuse_pods = 403, 'admission webhook "p.example.com" denied the request: no'
        async with Open(server, tmp_path) as made:
            with pytest.raises(EngineError, match=r"webhook p\.example\.com refused it: no"):
                await made.submit(attempt(tasks=1))
            found = (await seen(made))["worker-0"]
            assert (found.presence, found.proof) == (
                Presence.GONE,
                "pod digits-7f3k-1-worker-0 was never created",
            )
            await made.remove(found.handle)
            assert not server.of("secrets")

    play(ca, story)


# -- observing -------------------------------------------------------------------------------------------------


def test_an_api_server_that_does_not_answer_is_never_an_empty_answer(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        server.silent = True
        made = engine(server, tmp_path)
        for ask in (made.observe, made.capacity):
            task = asyncio.ensure_future(ask())
            done, _ = await asyncio.wait([task], timeout=0.5)
            assert not done
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await made.close()
        lost = engine(server, tmp_path, kubeconfig=str(tmp_path / "none"))
        for ask in (lost.observe, lost.capacity):
            with pytest.raises(EngineUnavailable, match="none"):
                await ask()
        await lost.close()

    play(ca, story)


def test_everything_is_read_from_watches(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as made:
            await made.submit(attempt())
            for _ in range(50):
                await made.observe()
                await made.capacity()
            lists = [one for one in server.seen if one.method == "GET" and "watch" not in one.query]
            assert len(lists) == 5, "one list each of our pods, secrets, events; nodes, other people's pods"

    play(ca, story)


def test_changes_are_reported_at_once(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as made:
            await made.submit(attempt())
            hints = made.changes()
            first = asyncio.ensure_future(anext(hints))
            await asyncio.sleep(0)
            server.change("digits-7f3k-1-worker-1", phase="Running", nodeName="n1")
            assert await asyncio.wait_for(first, 10) == ("digits-7f3k", 1, "worker-1")
            await hints.aclose()  # type: ignore[attr-defined]

    play(ca, story)


def test_a_courier_that_started_before_its_secret_was_known_is_called(
    ca: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror of Secrets may be stale at the pod's last change; the next look calls the courier."""

    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as made:
            await made.submit(attempt(tasks=1))
            assert made._parts is not None
            known, links, missed = made._parts.cluster.secret, made._parts.connections, []

            def old(name: str) -> None:
                missed.append(name)
                raise EngineUnavailable("nothing was heard of its secrets")

            monkeypatch.setattr(made._parts.cluster, "secret", old)
            courier = {"name": "courier", "state": {"running": {}}}
            server.change("digits-7f3k-1-worker-0", phase="Running", initContainerStatuses=[courier])

            async def heard() -> bool:
                return bool(missed)

            await wait_async(heard)
            monkeypatch.setattr(made._parts.cluster, "secret", known)
            await made.observe()
            link = links._connections["digits-7f3k", 1, "worker-0"]
            assert link.polling is not None, "its task would never be read"

    play(ca, story)


def test_the_engine_works_without_optional_permissions(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        server.denied = {"nodes", "pods"}
        async with Open(server, tmp_path) as made:
            (whole,) = await made.capacity()
            assert whole.name == "anywhere:" and whole.cpu > 1000
            await made.submit(attempt(tasks=1))
            server.change("digits-7f3k-1-worker-0", phase="Running", nodeName="n1")

            async def placed() -> bool:
                return (await seen(made))["worker-0"].node == "n1"

            await wait_async(placed)
            assert (await seen(made))["worker-0"].node_ready is None, "the engine does not say"

    play(ca, story)


def test_a_node_that_is_not_ready_makes_its_tasks_silent(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        def node(ready: str) -> None:
            conditions = [{"type": "Ready", "status": ready}]
            server.put(
                "nodes", "n1", "", kind="Node", status={"conditions": conditions, "allocatable": {"cpu": "8"}}
            )

        node("True")
        async with Open(server, tmp_path) as made:
            handle = await made.submit(attempt(tasks=1))
            server.change("digits-7f3k-1-worker-0", phase="Running", nodeName="n1")
            for ready, presence in (
                ("Unknown", Presence.SILENT),
                ("True", Presence.ALIVE),
                ("False", Presence.SILENT),
            ):
                node(ready)

                async def as_said(presence: Presence = presence) -> bool:
                    return (await seen(made))["worker-0"].presence is presence

                await wait_async(as_said)
            found = (await seen(made))["worker-0"]
            assert (found.node, found.node_ready) == ("n1", False) and "not ready" in found.proof
            with pytest.raises(NotFound):
                await made.hurt(handle, "worker-9", "process")

    play(ca, story)


def test_an_attempt_whose_secret_was_deleted_is_gone(ca: trustme.CA, tmp_path: Path) -> None:
    """Also for a later server, which still has files of the attempt on disk."""

    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as first:
            handle = await first.submit(attempt(tasks=1))
            await first.reach(handle, "worker-0")
        server.remove("secrets", "stoker-digits-7f3k-1")
        server.remove("pods", "digits-7f3k-1-worker-0")
        async with Open(server, tmp_path) as second:
            found = (await seen(second))["worker-0"]
            assert (found.presence, found.cause) == (Presence.GONE, "lost")
            assert "Secret stoker-digits-7f3k-1 was deleted from outside Stoker" in found.proof
            assert not (await second.reach(found.handle, "worker-0")).exists()
            await second.stop(found.handle, grace=timedelta(0))
            await second.remove(found.handle)
            assert not await second.observe()

    play(ca, story)


# -- ending ----------------------------------------------------------------------------------------------------


def test_pods_are_never_deleted_by_force_and_removal_leaves_nothing(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        async with Open(server, tmp_path) as made:
            handle = await made.submit(attempt())
            with pytest.raises(Conflict, match="still has worker-0, worker-1"):
                await made.remove(handle)
            await made.stop(handle, grace=timedelta(0))
            graces = [
                json.loads(one.body)["gracePeriodSeconds"]
                for one in server.seen
                if one.method == "DELETE" and "/pods/" in one.path
            ]
            assert graces == [1, 1], "with none the API server forgets a pod that may still run"
            found = await seen(made)
            assert {one.presence for one in found.values()} == {Presence.GONE}
            assert found["worker-0"].proof == "pod digits-7f3k-1-worker-0 was ended"
            await made.remove(handle)
            await made.remove(handle)
            await made.stop(handle, grace=timedelta(0))
            assert not server.of("secrets") and not await made.observe()
            assert not (tmp_path / "home" / "mirror" / "test" / "digits-7f3k").exists()
            with pytest.raises(Conflict, match="was removed"):
                await made.submit(attempt())

    play(ca, story)


def test_a_terminating_pod_holds_its_place_until_it_has_ended(ca: trustme.CA, tmp_path: Path) -> None:
    """The queue has already given the place away, so the capacity of the node must count the pod."""

    async def story(server: Server) -> None:
        ready = {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "8", "memory": "8Gi"},
        }
        server.put("nodes", "n1", "", kind="Node", status=ready)
        async with Open(server, tmp_path) as made:
            handle = await made.submit(attempt(tasks=1))
            server.change("digits-7f3k-1-worker-0", phase="Running", nodeName="n1")
            await wait_async(lambda: _on(made, "n1"))
            assert [node.cpu for node in await made.capacity()] == [8.0]
            made._ended.add((str(handle["run"]), int(handle["attempt"])))
            (node,) = await made.capacity()
            assert node.cpu < 8.0
            server.change("digits-7f3k-1-worker-0", phase="Succeeded", nodeName="n1")

            async def free() -> bool:
                return [one.cpu for one in await made.capacity()] == [8.0]

            await wait_async(free)

    play(ca, story)


async def _on(made: KubernetesEngine, node: str) -> bool:
    return (await seen(made))["worker-0"].node == node


def test_two_homes_do_not_see_each_other(ca: trustme.CA, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with Open(server, tmp_path / "a") as one, Open(server, tmp_path / "b") as other:
            await one.submit(attempt("mine-1"))
            await other.submit(attempt("theirs-1"))
            assert {found.run for found in await one.observe()} == {"mine-1"}
            assert {found.run for found in await other.observe()} == {"theirs-1"}
            await one.stop({"run": "theirs-1", "attempt": 1}, grace=timedelta(0))
            assert len(server.of("pods")) == 4

    play(ca, story)


def test_the_constructor_does_nothing(tmp_path: Path) -> None:
    from stoker.engine.kubernetes.config import ClusterConfig
    from stoker.settings import Home, Settings

    made = KubernetesEngine("c", ClusterConfig(kubeconfig="/nonexistent"), Settings(Home(tmp_path / "none")))
    assert not (tmp_path / "none").exists()
    asyncio.run(made.close())
