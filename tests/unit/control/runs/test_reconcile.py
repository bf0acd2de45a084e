"""Successive steps of a run on the fake engine, with a driven clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.control.policy.task_phases import TaskPhase
from stoker.errors import EngineUnavailable, StoreError
from stoker.spec.states import Cause, RunState
from stoker.testing.fake_engine import Behaviour
from support.control.driven import DIE, FAIL, LONG, NODE, STUBBORN, Driven, driven

GANG: dict[str, Any] = {"workers": 2, "resources": {"cpu": 1}}
SERVED: dict[str, Any] = {
    "framework": "tensorflow",
    "workers": 1,
    "resources": {"cpu": 1},
    "roles": {"ps": {"count": 1, "resources": {"cpu": 1}}},
}


def test_a_run_from_the_queue_to_its_end(server: Driven) -> None:
    server.otherwise = Behaviour(steps=3)
    run = server.submit()
    assert (server.state(run), server.task(run).phase) == (RunState.RUNNING, TaskPhase.RUNNING)
    server.steps(3)
    row = server.row(run)
    assert (row.state, row.cause, row.exit_code, row.attempt) == ("succeeded", Cause.COMPLETED, 0, 1)
    assert server.states[run] == ["queued", "starting", "running", "succeeded"]
    assert run not in server.loop.context.runs and not server.loop.context.scheduler.holds(run)


def test_a_failure_waits_for_its_backoff_before_it_is_tried_again(server: Driven) -> None:
    server.otherwise = FAIL
    run = server.submit(retries=2)
    assert (server.state(run), server.row(run).attempt, server.row(run).failures) == (RunState.QUEUED, 2, 2)
    due = server.row(run).not_before
    server.advance(0.9)
    assert server.row(run).attempt == 2, "the first time it is tried again at once, then after a second"
    server.advance(0.2)
    assert server.clock.now > due - server.clock._epoch
    row = server.row(run)
    assert (row.state, row.attempt, row.exit_code) == ("failed", 3, 3)
    assert "retries" in row.reason


def test_a_run_that_is_stopped_or_suspended_in_the_queue_starts_nothing(server: Driven) -> None:
    first = server.submit(resources={"cpu": 4})
    stopped, suspended = server.submit(resources={"cpu": 4}), server.submit(resources={"cpu": 4})
    server.stop(stopped)
    server.controller.suspend(suspended, by="ada")
    server.settle()
    assert server.row(stopped).cause == Cause.STOPPED and server.row(stopped).ended_at is not None
    assert server.states[stopped] == ["queued", "stopped"]
    assert server.states[suspended] == ["queued", "suspended"] and server.row(suspended).ended_at is None
    assert server.events(stopped, "ended")[0].text == "stopped while it waited in the queue"
    server.stop(first)
    server.advance(30)
    assert (server.row(stopped).attempt, server.row(suspended).attempt) == (0, 0)
    server.resume(suspended)
    assert server.state(suspended) is RunState.RUNNING


def test_a_run_that_is_lost_every_time_fails_in_the_end(server: Driven) -> None:
    server.otherwise = DIE
    run = server.submit(retries=0)
    server.until(lambda: server.state(run).terminal)
    row = server.row(run)
    assert (row.state, row.cause, row.failures) == ("failed", Cause.LOST, 0)
    assert row.attempt == 4, "three times more through no fault of its own"


def test_a_failed_member_starts_its_world_again(server: Driven) -> None:
    server.bodies = {("worker-1", 1): FAIL}
    run = server.submit(retries=1, **GANG)
    assert server.order(run).verb == "run" and server.order(run).generation == 2
    attempt, row = server.attempt(run), server.row(run)
    assert (row.attempt, attempt.generation, row.failures, row.state) == (1, 2, 1, "running")
    assert [place.incarnation for place in attempt.placement.values()] == [1, 1]
    assert server.starts(run, 1, "worker-0") == [(1, 1), (3, 2)], "between them it was told to stop"
    assert "worker-1: exit code 3" in server.events(run, "reforming")[0].text


def test_a_failed_member_waits_until_the_others_have_stopped(server: Driven) -> None:
    server.bodies = {("worker-0", 1): STUBBORN, ("worker-1", 1): FAIL}
    run = server.submit(retries=1, grace="60s", **GANG)
    assert [task.phase for task in server.live(run).tasks.values()] == [TaskPhase.STOPPING, TaskPhase.ENDED]
    assert server.order(run).grace == 10, "what it waits for will not come"
    assert server.attempt(run).generation == 1 and server.state(run) is RunState.RUNNING
    server.steps()
    assert server.attempt(run).generation == 2


def test_a_gang_that_fails_for_good_ends_when_all_have(server: Driven) -> None:
    server.bodies = {("worker-0", 1): STUBBORN, ("worker-1", 1): FAIL}
    run = server.submit(retries=0, **GANG)
    assert server.state(run) is RunState.RUNNING and server.live(run).reforming is not None
    server.steps()
    row = server.row(run)
    assert (row.state, row.exit_code, row.reason) == ("failed", 3, "worker-1: exit code 3")


def test_a_lost_launcher_is_replaced_alone(server: Driven) -> None:
    run = server.submit(retries=0, **GANG)
    server.kill_launcher(run, "worker-1")
    placement = server.attempt(run).placement
    assert [(place.incarnation, place.generation) for place in placement.values()] == [(1, 2), (2, 2)]
    assert server.row(run).failures == 0 and server.state(run) is RunState.RUNNING
    assert [server.order(run, task).generation for task in placement] == [2, 2]
    assert "worker-1 is replaced" in server.said(run)


def test_when_nobody_survives_the_attempt_is_over(server: Driven) -> None:
    run = server.submit(**GANG)
    for task in ("worker-0", "worker-1"):
        server.engine.kill_launcher(run, 1, task)
    server.look()
    assert server.store.attempt(run, 1).cause == Cause.LOST
    server.until(lambda: server.row(run).attempt == 2)
    assert server.state(run) in (RunState.STARTING, RunState.RUNNING)


def test_a_parameter_server_comes_back_alone(server: Driven) -> None:
    run = server.submit(retries=1, **SERVED)
    assert {task.part.on_loss for task in server.live(run).tasks.values() if task.part.role == "ps"} == {
        "task"
    }
    server.kill_launcher(run, "ps-0")
    assert server.task(run, "ps-0").incarnation == 2 and server.order(run, "ps-0").generation == 2
    assert server.starts(run, 1, "worker-0") == [(1, 1)], "the others never stopped"


def test_a_parameter_server_that_fails_once_too_often_ends_the_run(server: Driven) -> None:
    server.bodies = {("ps-0", 1): replace(FAIL, steps=1)}
    run = server.submit(retries=0, **SERVED)
    assert server.state(run) is RunState.RUNNING
    server.steps()
    assert server.state(run) is RunState.FAILED
    assert server.row(run).reason == "ps-0: exit code 3"


def test_a_terminated_launcher_is_killed_and_then_replaced(server: Driven) -> None:
    run = server.submit(retries=0, **GANG)
    real = server.engine._machine.die
    server.engine._machine.die = lambda *_: None  # type: ignore[method-assign]
    stops = server.engine.calls.get("stop", 0)
    server.engine.terminate_launcher(run, 1, "worker-1")
    server.settle()
    assert server.task(run, "worker-1").phase is TaskPhase.CLOSING
    server.until(lambda: server.engine.calls.get("stop", 0) == stops + 1)
    server.advance(55)
    assert server.engine.calls["stop"] == stops + 1, "asked once a minute"
    server.advance(10)
    assert server.engine.calls["stop"] == stops + 2 and server.attempt(run).generation == 1
    server.engine._machine.die = real  # type: ignore[method-assign]
    server.advance(60)
    assert server.task(run, "worker-1").incarnation == 2 and server.attempt(run).generation == 2


def test_a_port_of_another_program_makes_a_new_world_on_other_ports(server: Driven) -> None:
    taken = Behaviour(exit_code=1, lines=("OSError: [Errno 98] Address already in use",))
    server.bodies = {("worker-0", 1): taken}
    run = server.submit(retries=0, **GANG)
    event = server.events(run, "reforming")[0]
    assert event.data["cause"] == Cause.ENGINE_ERROR
    assert server.attempt(run).generation == 2 and server.row(run).failures == 0
    before = {port for place in server.attempt(run).placement.values() for port in place.ports}
    assert before <= server.loop.context.ports.taken and len(server.loop.context.ports.taken) == len(before)


def test_a_failed_run_is_held_for_debugging_and_then_cleaned_up(server: Driven) -> None:
    server.otherwise = FAIL
    run = server.submit(keep_on_failure="30m", resources={"cpu": 4})
    assert server.state(run) is RunState.FAILED and not server.store.attempt(run, 1).removed
    other = server.submit()
    server.advance(1000)
    assert server.state(other) is RunState.QUEUED, "what is kept holds its place"
    server.otherwise = LONG
    server.advance(1000)
    assert server.store.attempt(run, 1).removed and server.state(other) is RunState.RUNNING


def test_a_step_is_repeated_after_the_engine_did_not_answer(server: Driven) -> None:
    server.engine.unavailable = True
    run = server.submit()
    assert server.state(run) is RunState.STARTING
    server.advance(5)
    assert server.state(run) is RunState.STARTING and server.starts(run, 1, "worker-0") == []
    server.engine.unavailable = False
    server.advance(10)
    assert server.state(run) is RunState.RUNNING and server.starts(run, 1, "worker-0") == [(1, 1)]


def test_an_error_in_one_run_does_not_stop_another(server: Driven) -> None:
    def fault(method: str, argument: Any) -> None:
        if method == "submit" and argument.run.startswith("bad"):
            raise RuntimeError("an unexpected error")

    server.engine.before = fault
    bad, good = server.submit(name="bad"), server.submit(name="good")
    assert (server.state(bad), server.state(good)) == (RunState.STARTING, RunState.RUNNING)
    server.engine.before = lambda *_: None
    server.advance(6)
    assert server.state(bad) is RunState.RUNNING


def test_an_action_that_cannot_be_recorded_is_not_done(
    server: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = server.store.apply

    def refuse(changes: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(server.store, "apply", refuse)
    run = server.submit()
    assert server.state(run) is RunState.QUEUED and server.engine.calls.get("submit", 0) == 0
    assert server.loop.trouble is not None and "the disk is full" in server.loop.trouble
    monkeypatch.setattr(server.store, "apply", apply)
    server.advance(60)
    assert server.state(run) is RunState.RUNNING and server.loop.trouble is None


def test_a_lost_node_shrinks_an_elastic_run() -> None:
    here, there = NODE, replace(NODE, name="other", cpu=1)
    with driven(replace(here, cpu=1), there) as server:
        run = server.submit(workers="1..2", resources={"cpu": 1}, retries=0)
        server.until(lambda: len(server.live(run).tasks) == 2 and server.live(run).launched)
        lost = next(name for name, task in server.live(run).tasks.items() if task.place.node == "other")
        server.engine.nodes = server.engine.nodes[:1]
        server.advance(6)
        server.kill_launcher(run, lost)
        assert list(server.live(run).tasks) == [name for name in ("worker-0", "worker-1") if name != lost]
        assert server.state(run) is RunState.RUNNING and server.row(run).attempt == 1
        assert server.order(run, next(iter(server.live(run).tasks))).env["STOKER_WORLD_SIZE"] == "1"


def test_a_preempted_run_queues_again_and_costs_nothing(server: Driven) -> None:
    run = server.submit(retries=0)
    server.controller.drill(run, "preempt")
    server.advance(10)
    row = server.row(run)
    assert (row.state, row.attempt, row.failures) == ("running", 2, 0)
    assert server.store.attempt(run, 1).cause == Cause.PREEMPTED


def test_an_unreachable_engine_proves_no_loss(server: Driven) -> None:
    run = server.submit()

    def away(method: str, argument: Any) -> None:
        if method == "observe":
            raise EngineUnavailable("no route")

    server.engine.before = away
    server.advance(1000)
    assert server.task(run).phase is TaskPhase.RUNNING and server.row(run).attempt == 1
    server.engine.before = lambda *_: None
    server.stop(run)
    assert server.state(run) is RunState.STOPPED
