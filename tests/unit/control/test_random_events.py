"""Random events against the real controller on the fake engine: after each, its states, the tables and the engine agree.

The profile of tests/conftest.py chooses the seeds: the same ones each time in CI, others in `make soak`. What fails is
printed as the steps that lead there.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from driven import DIE, DONE, FAIL, LONG, NODE, STUBBORN, Driven, driven
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stoker.control.policy.task_phases import TABLE, TaskEvent, TaskPhase
from stoker.control.state import LiveRun, LiveTask
from stoker.errors import StokerError
from stoker.spec.run_transitions import TABLE as RUNS
from stoker.spec.run_transitions import RunEvent
from stoker.spec.states import TERMINAL, RunState
from stoker.testing.fake_engine import Behaviour
from stoker.testing.fake_machine import Simulated

P = TaskPhase
ROWS = {(one.before, one.event): one.after for one in TABLE.transitions}
RUN_ROWS = {(one.before, one.event): one.after for one in RUNS.transitions}
SHAPES: tuple[dict[str, Any], ...] = (
    {"resources": {"cpu": 2}},
    {"workers": 2, "resources": {"cpu": 1}},
    {"workers": "1..3", "resources": {"cpu": 1}},
    {
        "framework": "tensorflow",
        "workers": 1,
        "resources": {"cpu": 1},
        "roles": {"ps": {"count": 1, "resources": {"cpu": 1}}},
    },
)
BODIES = (LONG, replace(DONE, steps=2), replace(FAIL, steps=1), FAIL, replace(DIE, steps=1), STUBBORN)
NODES = (replace(NODE, name="one", cpu=3), replace(NODE, name="two", cpu=3))
RUNS_AT_MOST = 3
LOOK = 2.0


class Model:
    """The tables alone, fed with the events that the controller says happened."""

    def __init__(self) -> None:
        self.phases: dict[int, TaskPhase] = {}
        self.tasks: list[LiveTask] = []
        """Kept, so that no two have one identity."""
        self.missing: list[str] = []
        self.resumed: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()
        happened, after = LiveTask.happened, LiveRun.after

        def told(task: LiveTask, event: TaskEvent, **facts: Any) -> None:
            if id(task) not in self.phases:
                self.tasks.append(task)
            before = self.phases.get(id(task), P.PENDING)
            if (before, event) not in ROWS:
                self.missing.append(f"{task.name}: {event} in {before}")
            self.phases[id(task)] = ROWS.get((before, event), before)
            happened(task, event, **facts)

        def followed(live: LiveRun, event: RunEvent) -> RunState:
            if (live.state, event) not in RUN_ROWS:
                self.missing.append(f"{live.id}: {event} in {live.state}")
            return after(live, event)

        self._patch.setattr(LiveTask, "happened", told)
        self._patch.setattr(LiveRun, "after", followed)

    def undo(self) -> None:
        self._patch.undo()


class _Errors(logging.Handler):
    """What the loop survives is a fault all the same."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self.wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        self.wrong.append(self.format(record))


class RandomEvents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.model = Model()
        self.stack.callback(self.model.undo)
        control = {"grow_after": 10.0, "grow_patience": 10.0}
        self.server: Driven = self.stack.enter_context(driven(*NODES, **control))
        self.stack.enter_context(errors_are_wrong(self.server))
        self.runs: list[str] = []
        self.excused: set[tuple[str, int, str]] = set()
        """Tasks that were silent: the controller may have given them up while they lived."""

    # -- what people do --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.runs) < RUNS_AT_MOST)
    @rule(shape=st.sampled_from(SHAPES), retries=st.integers(0, 2), body=st.sampled_from(BODIES))
    def submit(self, shape: dict[str, Any], retries: int, body: Behaviour) -> None:
        self.server.otherwise = body
        self.runs.append(
            self.server.submit(**shape, retries=retries, grace="5s", lost_after="10s", start_within="60s")
        )

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), kill=st.booleans())
    def stop(self, data: st.DataObject, kill: bool) -> None:
        self.server.stop(data.draw(st.sampled_from(self.runs)), kill=kill)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        self.server.controller.suspend(data.draw(st.sampled_from(self.runs)), by="ada")
        self.server.settle()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        over = self.server.state(run).terminal
        with contextlib.suppress(StokerError):  # it may be running
            self.server.resume(run)
            self.model.resumed[run] += over

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), workers=st.integers(1, 3))
    def scale(self, data: st.DataObject, workers: int) -> None:
        with contextlib.suppress(StokerError):  # most are not elastic, or are over
            self.server.controller.scale(data.draw(st.sampled_from(self.runs)), workers)
        self.server.settle()

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), cpu=st.integers(1, 3), can=st.booleans())
    def resize(self, data: st.DataObject, cpu: int, can: bool) -> None:
        self.server.engine.grown = "" if can else "this kernel cannot"
        with contextlib.suppress(StokerError):  # it may be over, or never fit
            self.server.controller.resize(data.draw(st.sampled_from(self.runs)), cpu=float(cpu), memory=None)
        self.server.settle()

    # -- what happens to tasks -------------------------------------------------------------------------------

    @rule(body=st.sampled_from(BODIES))
    def bodies(self, body: Behaviour) -> None:
        """What those do that start from now on."""
        self.server.otherwise = body

    @rule(count=st.integers(1, 2))
    def get_on(self, count: int) -> None:
        self.server.steps(count)

    @rule(seconds=st.sampled_from((0.5, LOOK, 7.0, 25.0, 90.0)))
    def wait(self, seconds: float) -> None:
        self.server.advance(seconds)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), how=st.sampled_from(("kill", "terminate")))
    def launcher(self, data: st.DataObject, how: str) -> None:
        task = data.draw(st.sampled_from(self.alive()))
        {"kill": self.server.engine.kill_launcher, "terminate": self.server.engine.terminate_launcher}[how](
            *task.place.key()
        )
        self.server.settle()

    # -- what happens to the engine --------------------------------------------------------------------------

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), ready=st.sampled_from((None, True, False)))
    def fall_silent(self, data: st.DataObject, ready: bool | None) -> None:
        task = data.draw(st.sampled_from(self.alive()))
        self.server.engine.node_ready = ready
        self.server.engine.silent.add(task.place.key())
        self.excused.add(task.place.key())

    @rule()
    def speak(self) -> None:
        self.server.engine.silent.clear()
        self.server.look()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def hide(self, data: st.DataObject) -> None:
        """For one look. More of them in a row are proof."""
        place = data.draw(st.sampled_from(self.alive())).place
        machine = self.server.engine._machine
        hidden = machine.tasks.pop(place)
        self.server.look()
        if place not in machine.tasks:
            machine.tasks[place] = hidden
        self.server.look()

    @rule(waiting=st.sampled_from((None, ("no such image", "image", 20.0), ("pulling its image", "", 600.0))))
    def hold_back(self, waiting: tuple[str, str, float] | None) -> None:
        self.server.engine.waiting = waiting
        self.server.look()

    @rule(away=st.booleans())
    def reach_engine(self, away: bool) -> None:
        self.server.engine.unavailable = away
        self.server.advance(LOOK)

    @rule(count=st.integers(1, 2))
    def nodes(self, count: int) -> None:
        """The last node is lost with all that is on it, or comes back."""
        engine, there = self.server.engine, {node.name for node in self.server.engine.nodes}
        boot_id = engine._machine.boot_id
        engine.nodes = [replace(node, boot_id=boot_id) for node in NODES[:count]]
        for task in self.alive():
            if engine.on_nodes.get(task.place.key()) in there - {node.name for node in engine.nodes}:
                engine._machine.die(task, "its node is lost")
        self.server.advance(6.0)

    @rule()
    def reboot(self) -> None:
        self.server.engine.reboot()
        self.server.look()

    @rule(turns=st.integers(0, 40), after=st.sampled_from((0.0, 30.0)))
    def restart(self, turns: int, after: float) -> None:
        """The server is killed while it does whatever there is to do."""
        engine = self.server.engine
        self.server.loop.observe_soon()
        self.server.event_loop.call_soon(lambda: [self.server.loop.kick(live) for live in self.live()])
        self.server.turn(turns)
        self.server.restart(after=after)
        for name in ("waiting", "unavailable", "silent", "node_ready", "grown", "on_nodes"):
            setattr(self.server.engine, name, getattr(engine, name))
        self.server.settle()

    # -- what must hold --------------------------------------------------------------------------------------

    @invariant()
    def nothing_went_wrong(self) -> None:
        assert self.server.wrong == []
        assert self.model.missing == []

    @invariant()
    def a_body_starts_once(self) -> None:
        assert [one for one, count in Counter(self.server.started).items() if count > 1] == []

    @invariant()
    def the_tables_agree(self) -> None:
        for live in self.live():
            for task in (*live.tasks.values(), *live.left.values()):
                assert task.phase is self.model.phases.get(id(task), P.PENDING), task.name

    @invariant()
    def terminal_states_are_left_by_resume_only(self) -> None:
        for run, states in self.server.states.items():
            left = sum(before in TERMINAL for before in states[:-1])
            # What `resume` writes is not among what the loop applies: the next state that is follows it.
            assert left <= self.model.resumed[run]

    @invariant()
    def what_is_in_memory_is_recorded(self) -> None:
        for live in self.live():
            assert live.row.state == self.server.row(live.id).state
            if live.attempt is not None:
                attempt = self.server.attempt(live.id)
                assert live.state.holds and attempt.state != "ended"
                assert set(attempt.placement) == set(live.tasks)
            else:
                assert live.state is RunState.QUEUED
        over = [run for run in self.runs if run not in self.server.loop.context.runs]
        if self.server.loop._loaded:
            assert all(not self.server.state(run).holds for run in over)

    @invariant()
    def places_are_held_once(self) -> None:
        held = {one.request.id: one for one in self.server.loop.context.scheduler.snapshot().held}
        for live in self.live():
            if live.attempt is None:
                continue
            keeps = {place.number for place in live.attempt.placement.values()} | {
                task.place.number for task in live.left.values() if task.phase is P.RELEASED
            }
            assert sorted(held[live.id].indexes) == sorted(keeps)
        if self.server.loop._loaded:
            assert set(held) <= {live.id for live in self.live()}

    @invariant()
    def phases_are_what_the_engine_shows(self) -> None:
        engine = self.server.engine
        if engine.unavailable or engine.silent or engine.waiting:
            return
        self.server.look()
        for live in self.live():
            for task in live.tasks.values():
                assert self.agrees(live, task), f"{task.name} of {live.id}: {task.phase}"
            for task in live.left.values():
                there = self.machine(live, task)
                ended = there is None or not there.alive or there.info.incarnation != task.incarnation
                assert ended or task.phase is P.RELEASED or self.was_silent(live, task)

    @invariant()
    def no_two_attempts_of_a_run_train(self) -> None:
        training: dict[str, set[int]] = {}
        for task in self.alive():
            if task.has_body and task.place.key() not in self.excused:
                training.setdefault(task.place.run, set()).add(task.place.attempt)
        assert all(len(attempts) == 1 for attempts in training.values())

    def agrees(self, live: LiveRun, task: LiveTask) -> bool:
        there = self.machine(live, task)
        if there is None or there.info.incarnation != task.incarnation:
            return task.phase in (P.PENDING, P.CANCELLED) or self.was_silent(live, task)
        if task.given_up:
            return task.phase.launcher_over
        current = there.generation == task.generation
        if not there.alive:
            return task.phase in (P.LOST, P.GONE, P.ABSENT, P.PENDING, P.CANCELLED)
        return {
            P.PENDING: not current,
            P.READY: not current,
            P.CANCELLED: not current,
            P.RUNNING: current and there.has_body,
            P.STOPPING: current and there.has_body,
            P.ENDED: current and there.phase == "ended",
            P.CLOSING: there.terminated,
        }.get(task.phase, False)

    def machine(self, live: LiveRun, task: LiveTask) -> Simulated | None:
        assert live.attempt is not None
        keys = {place.key(): found for place, found in self.server.engine._machine.tasks.items()}
        return keys.get((live.id, live.attempt.number, task.name))

    def was_silent(self, live: LiveRun, task: LiveTask) -> bool:
        assert live.attempt is not None
        return (live.id, live.attempt.number, task.name) in self.excused

    def live(self) -> list[LiveRun]:
        return list(self.server.loop.context.runs.values())

    def alive(self) -> list[Simulated]:
        return [task for task in self.server.engine._machine.tasks.values() if task.alive]

    def teardown(self) -> None:
        """In the end everything that is wanted stopped is, and nothing is left of it."""
        with self.stack:
            server = self.server
            server.engine.unavailable, server.engine.waiting = False, None
            server.engine.silent.clear()
            server.engine.nodes = [replace(node, boot_id=server.engine._machine.boot_id) for node in NODES]
            for run in self.runs:
                server.stop(run, kill=True)
            server.advance(200.0)
            assert {server.state(run) for run in self.runs} <= TERMINAL | {RunState.SUSPENDED}
            assert server.loop.context.runs == {} and server.engine._machine.tasks == {}
            assert server.loop.context.scheduler.snapshot().held == ()
            assert server.loop.context.ports.taken == frozenset()
            self.nothing_went_wrong()


@contextlib.contextmanager
def errors_are_wrong(server: Driven) -> Iterator[None]:
    handler = _Errors(server.wrong)
    loggers = [logging.getLogger("stoker.control"), logging.getLogger("stoker.spec")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


SOAK = bool(os.environ.get("STOKER_SEEDS"))


def test_random_events() -> None:
    sizes = settings(max_examples=500 if SOAK else 15, stateful_step_count=60 if SOAK else 25)
    test: Callable[[], Any] = RandomEvents
    run_state_machine_as_test(test, settings=sizes)
