"""Random events against the real controller on the fake engine: states, tables and engine agree after each one.

The profile of tests/conftest.py chooses the seeds: the same ones each time in CI, others in `make soak`. A
failure is printed as the steps that lead to it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stoker.control.policy.task_phases import TABLE, TaskEvent, TaskPhase
from stoker.control.state import LiveRun, LiveTask
from stoker.errors import Conflict, EngineUnavailable, Refused
from stoker.spec.run_transitions import TABLE as RUNS
from stoker.spec.run_transitions import RunEvent
from stoker.spec.states import TERMINAL, RunState
from stoker.testing.fake_machine import Simulated, ended
from support.control.driven import DIE, DONE, FAIL, LONG, NODE, STUBBORN, Driven, driven, stage

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
BODIES = (
    LONG,
    LONG,
    LONG,
    replace(DONE, steps=2),
    replace(FAIL, steps=1),
    FAIL,
    replace(DIE, steps=1),
    STUBBORN,
)
NODES = (replace(NODE, name="one", cpu=3), replace(NODE, name="two", cpu=3))
TIMES = (0.5, 2.0, 7.0, 12.0, 25.0, 90.0)
WAITING = (None, None, ("no such image", "image", 20.0), ("pulling its image", "", 600.0))
LIVE_AT_MOST = 3
OFTEN = {
    "submit": 6, "wait": 10, "get_on": 5, "bodies": 3, "checkpoint": 3, "stop": 2, "suspend": 1, "resume": 3, "scale": 3,
    "resize": 1, "kill_launcher": 3, "terminate_launcher": 2, "end_and_die": 3, "fall_silent": 2, "speak": 3, "hide": 1,
    "hold_back": 2, "answer": 2, "nodes": 3, "reboot": 1, "restart": 5,
}  # fmt: skip
EVENTS = [event for event, weight in OFTEN.items() for _ in range(weight)]
NUMBER = st.integers(0, 11)
SOAK = bool(os.environ.get("STOKER_SEEDS"))
STEPS = 150 if SOAK else 50
PHASES = list(Phase) if SOAK else [Phase.generate]
"""Without shrinking, which takes minutes."""


class Model:
    """The tables alone, driven by the events of the controller."""

    def __init__(self) -> None:
        self.phases: dict[int, TaskPhase] = {}
        self.tasks: list[LiveTask] = []
        """Kept alive, so that no two objects have the same id."""
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
    """Every logged error is a fault, although the loop survives it."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self.wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        self.wrong.append(self.format(record))


class World:
    """A server, the events that happen to it, and invariants. Each event is a method that takes two
    numbers."""

    def __init__(self, server: Driven, model: Model) -> None:
        self.server, self.model = server, model
        self.runs: list[str] = []
        self.excused: set[tuple[str, int, str]] = set()
        """Tasks that were silent; the controller may have replaced them while they were alive."""

    def happen(self, event: str, one: int, two: int) -> None:
        getattr(self, event)(one, two)
        self.server.settle()
        self.check()

    # -- events of users -------------------------------------------------------------------------------------

    def submit(self, one: int, two: int) -> None:
        if len(self.live()) < LIVE_AT_MOST:
            shape, retries = SHAPES[one % len(SHAPES)], two % 3
            rules = {"grace": "5s", "lost_after": "10s", "start_within": "60s"}
            self.runs.append(self.server.submit(**shape, **rules, retries=retries))

    def stop(self, one: int, two: int) -> None:
        if run := self.run(one):
            self.server.stop(run, kill=two % 3 == 0)

    def suspend(self, one: int, two: int) -> None:
        if run := self.run(one):
            self.server.controller.suspend(run, by="ada")

    def resume(self, one: int, two: int) -> None:
        over = [run for run in self.runs if run not in self.server.loop.context.runs]
        if over and len(self.live()) < LIVE_AT_MOST:
            run = over[one % len(over)]
            self.model.resumed[run] += self.server.state(run).terminal
            self.server.resume(run)

    def scale(self, one: int, two: int) -> None:
        elastic = [live.id for live in self.live() if live.job.workers.elastic]
        if elastic:
            with contextlib.suppress(Conflict):  # the run is stopping
                self.server.controller.scale(elastic[one % len(elastic)], two % 3 + 1)

    def resize(self, one: int, two: int) -> None:
        self.server.engine.resize_problem = "this kernel cannot" if two % 2 else ""
        if run := self.run(one):
            with contextlib.suppress(
                Conflict, Refused, EngineUnavailable
            ):  # the run may be over, or too large for any node
                self.server.controller.resize(run, cpu=float(two % 2 + 1), memory=None)

    # -- events of tasks -------------------------------------------------------------------------------------

    def bodies(self, one: int, two: int) -> None:
        """The behaviour of bodies that start from now on."""
        self.server.otherwise = BODIES[one % len(BODIES)]

    def get_on(self, one: int, two: int) -> None:
        self.server.steps(one % 2 + 1)

    def wait(self, one: int, two: int) -> None:
        self.server.advance(TIMES[one % len(TIMES)])

    def checkpoint(self, one: int, two: int) -> None:
        if (task := self.task(one)) is not None and task.has_body:
            number = len(list((task.path / "staged").iterdir())) + 1
            stage(task.path, number, f"step-{number}.pt", step=number, generation=task.generation)
            self.server.engine._machine._changed(task)

    def kill_launcher(self, one: int, two: int) -> None:
        if (task := self.task(one)) is not None:
            self.server.engine.kill_launcher(*task.place.key())

    def terminate_launcher(self, one: int, two: int) -> None:
        if (task := self.task(one)) is not None:
            self.server.engine.terminate_launcher(*task.place.key())

    def end_and_die(self, one: int, two: int) -> None:
        """Bodies end, and a launcher dies before the server has read their end."""
        if (task := self.task(one)) is None:
            return
        machine = self.server.engine._machine
        changed, machine._changed = machine._changed, lambda _: None
        if two % 3 == 0:
            self.server.engine.terminate_launcher(*task.place.key())
        else:
            machine.end_body(task, ended(task, "exit", code=two % 3 - 1))
        self.server.engine.kill_launcher(*task.place.key())
        machine._changed = changed
        if two % 2:
            self.server.look()

    # -- events of the engine --------------------------------------------------------------------------------

    def fall_silent(self, one: int, two: int) -> None:
        if (task := self.task(one)) is not None:
            self.server.engine.node_ready = (None, True, False)[two % 3]
            self.server.engine.silent.add(task.place.key())
            self.excused.add(task.place.key())

    def speak(self, one: int, two: int) -> None:
        self.server.engine.silent.clear()

    def hide(self, one: int, two: int) -> None:
        """A task is missing from one look; several missing looks in a row are proof."""
        if (task := self.task(one)) is not None:
            machine = self.server.engine._machine
            del machine.tasks[task.place]
            self.server.look()
            machine.tasks.setdefault(task.place, task)

    def hold_back(self, one: int, two: int) -> None:
        self.server.engine.waiting = WAITING[one % len(WAITING)]
        self.server.look()

    def answer(self, one: int, two: int) -> None:
        self.server.engine.unavailable = one % 3 == 0
        self.server.advance(2.0)

    def nodes(self, one: int, two: int) -> None:
        """The last node is lost with all of its tasks, or comes back."""
        engine, there = self.server.engine, {node.name for node in self.server.engine.nodes}
        engine.nodes = [replace(node, boot_id=engine._machine.boot_id) for node in NODES[: one % 2 + 1]]
        gone = there - {node.name for node in engine.nodes}
        for task in self.alive():
            if engine.on_nodes.get(task.place.key()) in gone:
                engine._machine.die(task, "its node is lost")
        self.server.advance(6.0)

    def reboot(self, one: int, two: int) -> None:
        self.server.engine.reboot()

    def restart(self, one: int, two: int) -> None:
        """The server is killed at any moment."""
        server, before = self.server, self.server.engine
        server.event_loop.call_soon(lambda: [server.loop.kick(live) for live in self.live()])
        server.loop.observe_soon()
        server.turn(one * 5)
        server.restart(after=30.0 * (two % 2))
        for name in ("waiting", "unavailable", "silent", "node_ready", "resize_problem", "on_nodes"):
            setattr(server.engine, name, getattr(before, name))

    # -- invariants ------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.nothing_went_wrong()
        self.a_body_starts_once()
        self.the_tables_agree()
        self.terminal_states_are_left_by_resume_only()
        self.what_is_in_memory_is_recorded()
        self.places_are_held_once()
        self.phases_are_what_the_engine_shows()
        self.no_two_attempts_of_a_run_train()

    def nothing_went_wrong(self) -> None:
        assert self.server.wrong == []
        assert self.model.missing == []

    def a_body_starts_once(self) -> None:
        assert [one for one, count in Counter(self.server.started).items() if count > 1] == []

    def the_tables_agree(self) -> None:
        for live in self.live():
            for task in (*live.tasks.values(), *live.left.values()):
                assert task.phase is self.model.phases.get(id(task), P.PENDING), task.name

    def terminal_states_are_left_by_resume_only(self) -> None:
        for run, states in self.server.states.items():
            left = [after for before, after in itertools.pairwise(states) if before in TERMINAL]
            assert left == [RunState.QUEUED] * self.model.resumed[run]

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

    def run(self, number: int) -> str | None:
        return self.runs[-1 - number % len(self.runs)] if self.runs else None

    def task(self, number: int) -> Simulated | None:
        alive = self.alive()
        return alive[number % len(alive)] if alive else None

    def end(self) -> None:
        """All runs are stopped: each of them ends, and nothing of it is left."""
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
        self.check()


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


@settings(max_examples=300 if SOAK else 12, phases=PHASES)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), NUMBER, NUMBER), min_size=STEPS, max_size=STEPS))
def test_random_events(events: list[tuple[str, int, int]]) -> None:
    with contextlib.ExitStack() as stack:
        model = Model()
        stack.callback(model.undo)
        server = stack.enter_context(driven(*NODES, grow_after=10.0, grow_patience=10.0))
        stack.enter_context(errors_are_wrong(server))
        world = World(server, model)
        for event in [("submit", 0, 0), *events]:
            world.happen(*event)
        world.end()
