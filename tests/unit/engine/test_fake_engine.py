"""The fake passes the same suite as the real engines, so that tests on it are meaningful."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from stoker.engine.base import Attempt, Engine, Gpu, Node, Presence, TaskPlan
from stoker.errors import EngineUnavailable
from stoker.settings import Home
from stoker.task.formats import Order, TaskInfo
from stoker.testing.engine_suite import EngineSuite, suite_script
from stoker.testing.fake_engine import Behaviour, FakeEngine


class TestFakeEngine(EngineSuite):
    def make_engine(self, home: Home) -> Engine:
        return FakeEngine(home, suite_script)

    async def tick(self, engine: Engine) -> None:
        assert isinstance(engine, FakeEngine)
        engine.advance()
        await asyncio.sleep(0)

    async def let_the_trap_be_set(self) -> None:
        return


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def one(run: str = "digits-1", incarnation: int = 1) -> Attempt:
    return Attempt(run, 1, (TaskPlan("worker-0", incarnation=incarnation),))


def test_an_unreachable_engine_raises_and_never_answers_with_an_empty_list(home: Home) -> None:
    async def story() -> None:
        engine = FakeEngine(home)
        handle = await engine.submit(one())
        engine.unavailable = True
        with pytest.raises(EngineUnavailable):
            await engine.observe()
        with pytest.raises(EngineUnavailable):
            await engine.capacity()
        with pytest.raises(EngineUnavailable):
            await engine.submit(one("other-1"))
        with pytest.raises(EngineUnavailable):
            await engine.stop(handle, grace=timedelta(0))
        engine.unavailable = False
        assert [found.presence for found in await engine.observe()] == [Presence.ALIVE]

    asyncio.run(story())


def test_bodies_follow_their_script(home: Home) -> None:
    def script(info: TaskInfo, order: Order) -> Behaviour:
        return {
            "ok-1": Behaviour(lines=("hello",), metrics=((1, {"loss": 0.5}),)),
            "slow-1": Behaviour(steps=3, exit_code=4),
            "dies-1": Behaviour(steps=1, launcher_dies=True),
            "oom-1": Behaviour(kind="oom", exit_code=137),
        }[info.run]

    async def story() -> None:
        engine = FakeEngine(home, script)
        phases = {}
        for run in ("ok-1", "slow-1", "dies-1", "oom-1"):
            handle = await engine.submit(one(run))
            directory = await engine.reach(handle, "worker-0")
            directory.write_order(Order(seq=1, generation=1, verb="run", argv=["x"]))
            status = directory.status()
            assert status is not None
            phases[run] = status.phase
        assert phases == {"ok-1": "ended", "slow-1": "running", "dies-1": "running", "oom-1": "ended"}
        engine.advance()
        assert {found.run: found.presence for found in await engine.observe()}["dies-1"] is Presence.GONE
        engine = FakeEngine(home, script)  # a restart in the middle
        slow = await engine.reach({"run": "slow-1", "attempt": 1}, "worker-0")
        status = slow.status()
        assert status is not None and status.phase == "running"
        engine.advance(2)
        status = slow.status()
        assert status is not None and status.ending is not None and status.ending["code"] == 4
        ok = await engine.reach({"run": "ok-1", "attempt": 1}, "worker-0")
        assert ok.lines("metrics/1-1001.jsonl", 0)[0][0]["v"] == {"loss": 0.5}

    asyncio.run(story())


def test_an_order_written_just_before_a_crash_is_acted_on_once(home: Home) -> None:
    async def story() -> None:
        engine = FakeEngine(home, lambda info, order: Behaviour(hang=True))
        handle = await engine.submit(one())
        root = Path((await engine.reach(handle, "worker-0")).root)
        from stoker.task.local_directory import LocalTaskDir

        LocalTaskDir(str(root)).write_order(Order(seq=1, generation=1, verb="run", argv=["x"]))
        for _ in range(3):
            engine = FakeEngine(home, lambda info, order: Behaviour(hang=True))
        assert engine.starts("digits-1", 1, "worker-0") == [(1, 1)]

    asyncio.run(story())


def test_after_a_reboot_all_tasks_are_known_as_ended(home: Home) -> None:
    async def story() -> None:
        engine = FakeEngine(home)
        await engine.submit(one())
        engine.reboot()
        for seen in (await engine.observe(), await FakeEngine(home).observe()):
            assert [(found.presence, found.proof) for found in seen] == [
                (Presence.GONE, "the machine was restarted")
            ]
        await engine.submit(one("after-1"))
        assert {found.run: found.presence for found in await FakeEngine(home).observe()}[
            "after-1"
        ] is Presence.ALIVE

    asyncio.run(story())


def test_faults_can_be_put_before_and_after_a_call(home: Home) -> None:
    class Lost(Exception):
        pass

    def fail(method: str, argument: object) -> None:
        if method == "submit":
            raise Lost

    async def story() -> None:
        engine = FakeEngine(home)
        engine.before = fail
        with pytest.raises(Lost):
            await engine.submit(one("never-1"))
        engine.before, engine.after = engine.after, fail
        with pytest.raises(Lost):
            await engine.submit(one("lost-answer-1"))
        assert [found.run for found in await engine.observe()] == ["lost-answer-1"]

    asyncio.run(story())


def test_gpus_can_become_unhealthy(home: Home) -> None:
    async def story() -> None:
        node = Node(
            "local", 8, 1 << 35, gpus=(Gpu("GPU-a", 0, "H200", 1 << 37), Gpu("GPU-b", 1, "H200", 1 << 37))
        )
        engine = FakeEngine(home, nodes=[node])
        engine.set_gpu("GPU-b", healthy=False, reason="Xid 79")
        assert [(gpu.id, gpu.healthy, gpu.reason) for gpu in (await engine.capacity())[0].gpus] == [
            ("GPU-a", True, ""),
            ("GPU-b", False, "Xid 79"),
        ]

    asyncio.run(story())
