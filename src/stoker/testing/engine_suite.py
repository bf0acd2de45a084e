"""Requirements of every engine, as a pytest class: subclass `EngineSuite`, give it `make_engine`, and run it.

    class TestMine(EngineSuite):
        def make_engine(self, home): return MyEngine(...)

Differences between engines that do not matter (required parts of an attempt, durations, where a directory is) are
methods that a subclass may replace.

The bodies are plain shell commands. An engine that only simulates (`FakeEngine`) uses `suite_script`, which simulates
these commands.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stoker.engine.base import Attempt, Drills, Engine, Handle, Observation, Presence, TaskPlan, Watches
from stoker.errors import StokerError
from stoker.settings import Home
from stoker.task import formats, layout
from stoker.testing.fake_machine import Behaviour

T = TypeVar("T")

HANG = ["/bin/sh", "-c", "while :; do sleep 0.05; done"]
STUBBORN = ["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"]
WAIT = 60.0
"""A limit for broken engines, not a measure of good ones."""


def exits(code: int) -> list[str]:
    return ["/bin/sh", "-c", f"echo bye; exit {code}"]


def suite_script(info: formats.TaskInfo, order: formats.Order) -> Behaviour:
    """The suite's bodies for an engine that simulates."""
    if order.argv == HANG:
        return Behaviour(hang=True)
    if order.argv == STUBBORN:
        return Behaviour(hang=True, stubborn=True)
    return Behaviour(exit_code=int(order.argv[-1].rsplit(" ", 1)[1]), steps=1, lines=("bye",))


class EngineSuite:
    """Each test has its own home and engines from `make_engine`. Everything it started is ended after it."""

    wait = WAIT

    def make_engine(self, home: Home) -> Engine:
        """An engine on this home. A second call for the same home is what a restarted server does."""
        raise NotImplementedError

    async def tick(self, engine: Engine) -> None:
        """Lets some time pass. A simulated engine takes a step instead of waiting."""
        await asyncio.sleep(0.02)

    async def close(self, engine: Engine) -> None:
        """Stop the server; its tasks keep running."""
        closing: Callable[[], Awaitable[None]] | None = getattr(engine, "close", None)
        if closing is not None:
            await closing()

    def attempt(self, run: str, number: int, tasks: tuple[TaskPlan, ...]) -> Attempt:
        """An attempt that this engine accepts: one that runs containers needs an image."""
        return Attempt(run, number, tasks)

    async def order(
        self, engine: Engine, handle: Handle, order: formats.Order, task: str = "worker-0"
    ) -> None:
        """Writes an order as soon as the task directory exists."""
        (await engine.reach(handle, task)).write_order(order)

    async def directories(self, engine: Engine, handle: Handle, task: str) -> set[str]:
        """The directories of a new task directory, which only its owner may read."""
        root = Path((await engine.reach(handle, task)).root)
        assert root.stat().st_mode & 0o077 == 0
        return {path.name for path in root.iterdir() if path.is_dir()}

    def proof(self, engine: Engine, handle: Handle, status: formats.Status) -> str:
        """The proof that the launcher with this status has died, as a regular expression."""
        return f"launcher {status.launcher_pid} is gone"

    # -- fixtures and helpers --------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _home(self, tmp_path: Path) -> Iterator[None]:
        self.home = Home(tmp_path / "home ü")
        self.home.root.mkdir()
        self._engines: list[Engine] = []
        yield
        asyncio.run(self._clean())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        async def work() -> T:
            try:
                return await asyncio.wait_for(coroutine, self.wait * 2)
            finally:
                for engine in self._engines:
                    await self.close(engine)
                self._engines.clear()

        return asyncio.run(work())

    async def engine(self) -> Engine:
        made = self.make_engine(self.home)
        self._engines.append(made)
        return made

    async def restarted(self) -> Engine:
        """The server was killed, and another one uses the same home."""
        for engine in self._engines:
            await self.close(engine)
        self._engines.clear()
        return await self.engine()

    async def _clean(self) -> None:
        engine = self.make_engine(self.home)
        for seen in await engine.observe():
            await engine.stop(seen.handle, grace=timedelta(0))
            await engine.remove(seen.handle)
        await self.close(engine)

    async def until(self, engine: Engine, probe: Callable[[], Awaitable[T | None]], what: str) -> T:
        """Waits for a condition while the engine's time passes."""
        end = time.monotonic() + self.wait
        while time.monotonic() < end:
            found = await probe()
            if found is not None:
                return found
            await self.tick(engine)
        raise AssertionError(f"waited {self.wait:.0f} s for {what}")

    async def phase(self, engine: Engine, handle: Handle, task: str, *phases: str) -> formats.Status:
        directory = await engine.reach(handle, task)

        async def look() -> formats.Status | None:
            status = directory.status()
            return status if status is not None and status.phase in phases else None

        found = await self.until(engine, look, f"{task} to be {' or '.join(phases)}")
        if found.phase == "ended":
            # Of several files, the one with this phase may arrive first.
            await asyncio.to_thread(directory.catch_up, 15.0)
        return found

    async def seen(self, engine: Engine, run: str) -> dict[str, Observation]:
        return {found.task: found for found in await engine.observe() if found.run == run}

    async def gone(self, engine: Engine, run: str, task: str) -> Observation:
        async def look() -> Observation | None:
            found = (await self.seen(engine, run)).get(task)
            return found if found is not None and found.presence is Presence.GONE else None

        return await self.until(engine, look, f"{task} of {run} to be gone")

    async def start(
        self, engine: Engine, argv: list[str], run: str = "digits-7f3k", task: str = "worker-0"
    ) -> Handle:
        """A task with its body running."""
        handle = await engine.submit(self.attempt(run, 1, (TaskPlan(task),)))
        await self.order(engine, handle, _order(1, argv), task)
        return handle

    # -- requirements ----------------------------------------------------------------------------------------

    def test_a_submitted_task_waits_for_orders(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            plans = (TaskPlan("worker-0", cpu=1.0), TaskPlan("worker-1", index=1))
            handle = await engine.submit(self.attempt("digits-7f3k", 2, plans))
            for plan in plans:
                status = await self.phase(engine, handle, plan.name, "ready")
                assert status.pid is None
                info = (await engine.reach(handle, plan.name)).info()
                assert info is not None
                assert (info.run, info.attempt, info.task, info.index) == (
                    "digits-7f3k",
                    2,
                    plan.name,
                    plan.index,
                )
            seen = await self.seen(engine, "digits-7f3k")
            assert {task: (found.attempt, found.presence) for task, found in seen.items()} == {
                "worker-0": (2, Presence.ALIVE),
                "worker-1": (2, Presence.ALIVE),
            }

        self.run(scenario())

    def test_a_task_that_ran_before_and_left_nothing_is_lost_not_new(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            plan = TaskPlan("worker-0", started=True)
            await engine.submit(self.attempt("digits-7f3k", 1, (plan,)))
            assert (await self.gone(engine, "digits-7f3k", "worker-0")).proof
            engine = await self.restarted()
            await engine.submit(self.attempt("digits-7f3k", 1, (plan,)))
            assert (await self.gone(engine, "digits-7f3k", "worker-0")).proof

        self.run(scenario())

    def test_the_directories_are_there_before_the_first_order(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await engine.submit(self.attempt("digits-7f3k", 1, (TaskPlan("worker-0"),)))
            assert await self.directories(engine, handle, "worker-0") >= set(layout.DIRECTORIES)

        self.run(scenario())

    @pytest.mark.parametrize("code", [0, 7])
    def test_an_order_runs_a_body_to_its_end(self, code: int) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, exits(code))
            status = await self.phase(engine, handle, "worker-0", "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["code"], status.ending["seq"]) == ("exit", code, 1)
            directory = await engine.reach(handle, "worker-0")
            kinds = [
                entry["k"]
                for entry in directory.journal()[0]
                if entry["k"] in ("starting", "started", "ended")
            ]
            assert kinds == ["starting", "started", "ended"]
            log = b"".join(directory.read(f"{layout.LOG}/{name}") for name in directory.list(layout.LOG))
            assert b"bye" in log
            assert (await self.seen(engine, "digits-7f3k"))["worker-0"].presence is Presence.ALIVE, "it holds"

        self.run(scenario())

    def test_submitting_again_starts_nothing_twice(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, HANG)
            before = await self.phase(engine, handle, "worker-0", "running")
            assert await engine.submit(self.attempt("digits-7f3k", 1, (TaskPlan("worker-0"),))) == handle
            engine = await self.restarted()
            assert await engine.submit(self.attempt("digits-7f3k", 1, (TaskPlan("worker-0"),))) == handle
            after = (await engine.reach(handle, "worker-0")).status()
            assert after is not None
            assert (after.launcher_pid, after.pid, after.phase) == (
                before.launcher_pid,
                before.pid,
                "running",
            )

        self.run(scenario())

    def test_a_dead_launcher_is_not_started_again_at_the_same_incarnation(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, HANG)
            await self.phase(engine, handle, "worker-0", "running")
            await _drill(engine).hurt(handle, "worker-0", "launcher")
            await self.gone(engine, "digits-7f3k", "worker-0")
            await engine.submit(self.attempt("digits-7f3k", 1, (TaskPlan("worker-0"),)))
            assert (await self.seen(engine, "digits-7f3k"))["worker-0"].presence is Presence.GONE
            engine = await self.restarted()
            await engine.submit(self.attempt("digits-7f3k", 1, (TaskPlan("worker-0"),)))
            assert (await self.seen(engine, "digits-7f3k"))["worker-0"].presence is Presence.GONE

        self.run(scenario())

    def test_a_higher_incarnation_replaces_a_dead_task_and_only_a_dead_one(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, HANG)
            await self.phase(engine, handle, "worker-0", "running")
            again = self.attempt("digits-7f3k", 1, (TaskPlan("worker-0", incarnation=2),))
            with pytest.raises(StokerError):
                await engine.submit(again)
            await _drill(engine).hurt(handle, "worker-0", "launcher")
            await self.gone(engine, "digits-7f3k", "worker-0")
            await engine.submit(again)
            await self.phase(engine, handle, "worker-0", "ready")
            found = (await self.seen(engine, "digits-7f3k"))["worker-0"]
            assert (found.incarnation, found.presence) == (2, Presence.ALIVE)

        self.run(scenario())

    def test_runs_continue_without_a_server(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            hanging = await self.start(engine, HANG, "hangs-1")
            await self.phase(engine, hanging, "worker-0", "running")
            ending = await self.start(engine, exits(3), "ends-1")
            engine = await self.restarted()
            seen = {(found.run, found.task): found.presence for found in await engine.observe()}
            assert seen == {("hangs-1", "worker-0"): Presence.ALIVE, ("ends-1", "worker-0"): Presence.ALIVE}
            status = await self.phase(engine, ending, "worker-0", "ended")
            assert status.ending is not None and status.ending["code"] == 3
            await self.order(engine, hanging, formats.Order(seq=2, generation=1, verb="stop", grace=5.0))
            assert (await self.phase(engine, hanging, "worker-0", "ended")).seq == 2

        self.run(scenario())

    def test_unknown_attempts_are_observed_and_can_be_stopped(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            await self.start(engine, HANG, "orphan-1")
            engine = await self.restarted()
            found = (await self.seen(engine, "orphan-1"))["worker-0"]
            assert found.presence is Presence.ALIVE
            await engine.stop(found.handle, grace=timedelta(seconds=5))
            assert (await self.gone(engine, "orphan-1", "worker-0")).proof
            await engine.remove(found.handle)
            assert not await self.seen(engine, "orphan-1")

        self.run(scenario())

    def test_an_order_to_stop_sends_sigterm_first(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, HANG)
            await self.phase(engine, handle, "worker-0", "running")
            await self.order(engine, handle, formats.Order(seq=2, generation=1, verb="stop", grace=30.0))
            status = await self.phase(engine, handle, "worker-0", "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["signal"]) == ("stopped", signal.SIGTERM)

        self.run(scenario())

    def test_a_body_that_ignores_the_order_is_killed(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, STUBBORN)
            await self.phase(engine, handle, "worker-0", "running")
            await self.let_the_trap_be_set()
            await self.order(engine, handle, formats.Order(seq=2, generation=1, verb="stop", grace=0.3))
            status = await self.phase(engine, handle, "worker-0", "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["signal"]) == ("stopped", signal.SIGKILL)

        self.run(scenario())

    async def let_the_trap_be_set(self) -> None:
        """`running` means that the shell was started; it needs a moment to ignore SIGTERM."""
        await asyncio.sleep(0.3)

    def test_stop_ends_everything_whatever_its_state(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            running = await self.start(engine, HANG, "running-1")
            stubborn = await self.start(engine, STUBBORN, "stubborn-1")
            waiting = await engine.submit(
                self.attempt("waiting-1", 1, (TaskPlan("worker-0"), TaskPlan("worker-1")))
            )
            for handle in (running, stubborn):
                await self.phase(engine, handle, "worker-0", "running")
            for handle in (running, stubborn, waiting):
                await engine.stop(handle, grace=timedelta(0))
            seen = await engine.observe()
            assert len(seen) == 4
            assert {found.presence for found in seen} == {Presence.GONE}
            assert all(found.proof for found in seen)

        self.run(scenario())

    def test_one_of_several_tasks_is_ended_and_replaced_without_effect_on_the_others(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            plans = (TaskPlan("worker-0"), TaskPlan("worker-1", index=1))
            handle = await engine.submit(self.attempt("digits-7f3k", 1, plans))
            for plan in plans:
                await self.order(engine, handle, _order(1, HANG), plan.name)
            before = [await self.phase(engine, handle, plan.name, "running") for plan in plans]
            await engine.stop(handle, grace=timedelta(0), tasks=["worker-1"])
            assert (await self.gone(engine, "digits-7f3k", "worker-1")).proof
            again = (plans[0], replace(plans[1], incarnation=2))
            await engine.submit(self.attempt("digits-7f3k", 1, again))
            await self.order(engine, handle, replace(_order(1, HANG), generation=2), "worker-1")
            await self.phase(engine, handle, "worker-1", "running")
            seen = await self.seen(engine, "digits-7f3k")
            assert {task: (found.incarnation, found.presence) for task, found in seen.items()} == {
                "worker-0": (1, Presence.ALIVE),
                "worker-1": (2, Presence.ALIVE),
            }
            after = await self.phase(engine, handle, "worker-0", "running")
            assert (after.launcher_pid, after.pid) == (before[0].launcher_pid, before[0].pid)

        self.run(scenario())

    def test_stopping_and_removing_what_is_absent_is_success(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await engine.submit(self.attempt("digits-7f3k", 1, (TaskPlan("worker-0"),)))
            for _ in range(2):
                await engine.stop(handle, grace=timedelta(0))
            root = Path((await engine.reach(handle, "worker-0")).root)
            assert root.is_dir(), "stop leaves the directory"
            for _ in range(2):
                await engine.remove(handle)
            assert not root.exists()
            assert not await engine.observe()
            await engine.stop(handle, grace=timedelta(0))

        self.run(scenario())

    def test_a_living_attempt_is_not_removed(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, HANG)
            await self.phase(engine, handle, "worker-0", "running")
            with pytest.raises(StokerError):
                await engine.remove(handle)
            assert (await engine.reach(handle, "worker-0")).exists()

        self.run(scenario())

    def test_a_killed_launcher_is_proven_gone(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, HANG)
            status = await self.phase(engine, handle, "worker-0", "running")
            await _drill(engine).hurt(handle, "worker-0", "launcher")
            found = await self.gone(engine, "digits-7f3k", "worker-0")
            assert re.fullmatch(self.proof(engine, handle, status), found.proof), found.proof

        self.run(scenario())

    def test_a_killed_process_is_reported_by_its_launcher(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, HANG)
            await self.phase(engine, handle, "worker-0", "running")
            await _drill(engine).hurt(handle, "worker-0", "process")
            status = await self.phase(engine, handle, "worker-0", "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["signal"]) == ("signal", signal.SIGKILL)

        self.run(scenario())

    def test_a_released_launcher_ends(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            handle = await self.start(engine, exits(0))
            await self.phase(engine, handle, "worker-0", "ended")
            await self.order(engine, handle, formats.Order(seq=2, generation=1, verb="release"))
            await self.gone(engine, "digits-7f3k", "worker-0")

        self.run(scenario())

    def test_changes_are_announced(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            if not isinstance(engine, Watches):
                pytest.skip("this engine does not watch")
            handle = await engine.submit(self.attempt("digits-7f3k", 1, (TaskPlan("worker-0"),)))
            await self.phase(engine, handle, "worker-0", "ready")
            await self._hinted(engine, engine, handle, self._order_hang)
            await self.phase(engine, handle, "worker-0", "running")
            second = await self.restarted()
            assert isinstance(second, Watches)
            await second.observe()
            await self._hinted(second, second, handle, self._kill)

        self.run(scenario())

    async def _hinted(
        self,
        engine: Engine,
        watches: Watches,
        handle: Handle,
        act: Callable[[Engine, Handle], Awaitable[None]],
    ) -> None:
        hints = watches.changes()
        first = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(
            0.2
        )  # the watch is set up once the iterator runs; hints of the past may come first
        await act(engine, handle)
        assert await asyncio.wait_for(first, self.wait) == ("digits-7f3k", 1, "worker-0")
        await hints.aclose()  # type: ignore[attr-defined]

    async def _order_hang(self, engine: Engine, handle: Handle) -> None:
        await self.order(engine, handle, _order(1, HANG))

    async def _kill(self, engine: Engine, handle: Handle) -> None:
        await _drill(engine).hurt(handle, "worker-0", "launcher")

    def test_capacity_is_sane(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            nodes = await engine.capacity()
            assert nodes and len({node.name for node in nodes}) == len(nodes)
            for node in nodes:
                assert 0 < node.cpu < 100_000
                assert 1 << 20 < node.memory < 1 << 60
                assert len({gpu.id for gpu in node.gpus}) == len(node.gpus)
                assert all(gpu.reason for gpu in node.gpus if not gpu.healthy)

        self.run(scenario())

    def test_names_cannot_lead_outside(self) -> None:
        async def scenario() -> None:
            engine = await self.engine()
            for name in ("../outside", "a/b", "", ".", "..", "a.1", "x\0y"):
                for attempt in (
                    self.attempt(name, 1, (TaskPlan("worker-0"),)),
                    self.attempt("digits", 1, (TaskPlan(name),)),
                ):
                    with pytest.raises(StokerError):
                        await engine.submit(attempt)
            assert not await engine.observe()

        self.run(scenario())


def _order(seq: int, argv: list[str]) -> formats.Order:
    return formats.Order(
        seq=seq, generation=1, verb="run", argv=argv, env={"PATH": "/usr/bin:/bin"}, grace=5.0
    )


def _drill(engine: Engine) -> Drills:
    if not isinstance(engine, Drills):
        pytest.skip("this engine cannot inject faults")
    return engine
