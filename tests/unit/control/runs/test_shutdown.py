"""Tasks are ordered to stop, once per kind of stop; the engine ends those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.control.policy.task_phases import TaskPhase
from stoker.errors import EngineError
from stoker.spec.states import Cause, RunState
from support.control.driven import STUBBORN, Driven


def forced(server: Driven) -> list[Any]:
    """The tasks that the engine is asked to end from now on."""
    found: list[Any] = []

    def stop(method: str, argument: Any) -> None:
        if method == "stop":
            found.append(argument)

    server.engine.before = stop
    return found


def test_a_run_that_is_stopped_ends_as_stopped(server: Driven) -> None:
    run = server.submit(grace="30s")
    server.stop(run)
    row, attempt = server.row(run), server.attempt(run)
    assert (row.state, row.cause, attempt.state, attempt.cause) == (
        "stopped",
        Cause.STOPPED,
        "ended",
        Cause.STOPPED,
    )
    assert "asked to stop; 30 s of grace" in server.said(run)
    assert server.states[run] == ["queued", "starting", "running", "stopping", "stopped"]


def test_a_stop_is_ordered_once_and_a_kill_once_more(server: Driven) -> None:
    server.otherwise = STUBBORN
    run = server.submit(grace="60s")
    server.stop(run)
    first = server.order(run)
    assert (first.verb, first.grace, first.kill) == ("stop", 60, False)
    assert (server.state(run), server.task(run).phase) == (RunState.STOPPING, TaskPhase.STOPPING)
    server.advance(5)
    server.stop(run)
    server.kick(run)
    assert server.order(run).seq == first.seq
    task = server.task(run)
    server.stop(run, kill=True)
    assert (server.state(run), task.stop_sent, task.phase) == (RunState.STOPPED, "kill", TaskPhase.ENDED)
    assert [event.kind for event in server.events(run, "stop", "kill")] == ["stop", "kill"]


def test_a_task_that_does_not_stop_in_time_is_ended_by_the_engine(server: Driven) -> None:
    server.otherwise = STUBBORN
    run = server.submit(grace="20s")
    server.stop(run)
    asked = forced(server)
    server.advance(20 + 14)
    assert asked == [] and server.state(run) is RunState.STOPPING
    server.advance(4)
    assert len(asked) >= 1 and server.state(run) is RunState.STOPPED
    assert server.row(run).cause == Cause.STOPPED, "Stoker ended it"


def test_a_task_that_the_engine_could_not_end_is_ended_later(server: Driven) -> None:
    server.otherwise = STUBBORN
    run = server.submit(grace="0s")
    tries: list[float] = []

    def stuck(method: str, argument: Any) -> None:
        if method == "stop":
            tries.append(server.clock.now)
            raise EngineError("it waits inside the kernel")

    server.stop(run)
    server.engine.before = stuck
    server.advance(100)
    assert len(tries) == 2 and tries[1] - tries[0] >= 60
    assert not server.task(run).forced, "whatever ends it, it was not the engine"
    server.engine.before = lambda *_: None
    server.advance(65)
    assert server.state(run) is RunState.STOPPED


def test_a_kill_has_no_grace(server: Driven) -> None:
    run = server.submit(grace="60s", workers=2, resources={"cpu": 1})
    task = server.task(run)
    server.stop(run, kill=True)
    assert server.state(run) is RunState.STOPPED and task.stop_sent == "kill"
    assert "killed; 0 s of grace" in server.said(run)


def test_a_task_that_is_not_up_is_cancelled(server: Driven) -> None:
    server.engine.waiting = ("pulling its image", "", 600.0)
    run = server.submit()
    task = server.task(run)
    assert task.phase is TaskPhase.PENDING
    server.stop(run)
    assert task.phase is TaskPhase.CANCELLED and server.state(run) is RunState.STOPPED
    assert server.starts(run, 1, "worker-0") == []


def test_a_stop_order_of_an_earlier_server_counts(server: Driven) -> None:
    server.otherwise = STUBBORN
    run = server.submit(grace="60s")
    server.stop(run)
    seq = server.order(run).seq
    server.restart()
    task = server.task(run)
    assert (task.phase, task.stop_sent, server.order(run).seq) == (TaskPhase.STOPPING, "stop", seq)
    server.steps()
    assert server.state(run) is RunState.STOPPED


@pytest.mark.parametrize("wish", ["suspend", "stop"])
def test_the_desired_state_becomes_the_state(server: Driven, wish: str) -> None:
    run = server.submit()
    if wish == "suspend":
        server.controller.suspend(run, by="ada")
        server.settle()
    else:
        server.stop(run)
    assert server.state(run) is (RunState.SUSPENDED if wish == "suspend" else RunState.STOPPED)
    server.resume(run)
    assert server.state(run) is RunState.RUNNING and server.row(run).attempt == 2
    assert server.starts(run, 2, "worker-0") == [(1, 1)]


def test_where_no_order_can_be_written_the_engine_ends_the_task(server: Driven) -> None:
    run = server.submit(grace="60s")
    order = server.directory(run) / "order.json"
    order.unlink()
    (order / "in the way").mkdir(parents=True)
    asked = forced(server)
    server.stop(run)
    assert len(asked) >= 1 and server.state(run) is RunState.STOPPED
