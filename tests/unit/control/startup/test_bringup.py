"""Tasks are submitted, awaited and get their orders; a restarted server continues where the previous one
ended."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from stoker.control.policy.task_phases import TaskPhase
from stoker.errors import EngineError, EngineUnavailable
from stoker.spec.states import Cause, RunState
from support.control.driven import FAIL, NODE, Driven, driven, stage

GANG: dict[str, Any] = {"workers": 2, "resources": {"cpu": 1}}


class Fault:
    """An error that an engine method raises a number of times, before or after it took effect."""

    def __init__(
        self, server: Driven, method: str, error: Exception, *, after: bool = False, times: int = 1
    ) -> None:
        self.method, self.error, self.times = method, error, times
        setattr(server.engine, "after" if after else "before", self)

    def __call__(self, method: str, argument: Any) -> None:
        if method == self.method and self.times:
            self.times -= 1
            raise self.error


def test_no_order_is_given_before_the_task_is_up(server: Driven) -> None:
    server.engine.waiting = ("pulling its image", "", 600.0)
    run = server.submit()
    server.look()
    task = server.task(run)
    assert (task.phase, server.state(run)) == (TaskPhase.PENDING, RunState.STARTING)
    assert task.wait is not None and task.wait.text == "pulling its image"
    server.advance(300)
    assert task.phase is TaskPhase.PENDING
    server.engine.waiting = None
    server.advance(2)
    assert (task.phase, task.wait, server.state(run)) == (TaskPhase.RUNNING, None, RunState.RUNNING)


def test_a_hopeless_start_ends_after_its_timeout(server: Driven) -> None:
    server.engine.waiting = ("no such image", "image", 100.0)
    run = server.submit(retries=0)
    server.advance(95)
    assert server.state(run) is RunState.STARTING
    server.advance(15)
    row = server.row(run)
    assert (row.state, row.cause) == ("failed", Cause.IMAGE) and "no such image" in row.reason
    assert server.starts(run, 1, "worker-0") == []


def test_an_engine_error_costs_no_retry(server: Driven) -> None:
    Fault(server, "submit", EngineError("no cgroup"))
    run = server.submit(retries=0)
    assert server.store.attempt(run, 1).cause == Cause.ENGINE_ERROR
    assert "could not be started: no cgroup" in server.said(run)
    server.advance(10)
    row = server.row(run)
    assert (row.state, row.attempt, row.failures) == ("running", 2, 0)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["submit", "reach"])
def test_a_request_whose_answer_is_lost_is_repeated(server: Driven, method: str, after: bool) -> None:
    Fault(server, method, EngineUnavailable("no answer"), after=after)
    run = server.submit(**GANG)
    server.advance(10)
    assert server.state(run) is RunState.RUNNING and server.row(run).attempt == 1
    assert [server.starts(run, 1, task) for task in ("worker-0", "worker-1")] == [[(1, 1)], [(1, 1)]]


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_server_killed_at_any_moment_starts_every_body_once(turns: int) -> None:
    with driven() as server:
        run = server.submit(settle=False, **GANG)
        server.turn(turns)
        server.restart()
        server.advance(10)
        assert server.state(run) is RunState.RUNNING and server.row(run).attempt == 1
        assert [server.starts(run, 1, task) for task in ("worker-0", "worker-1")] == [[(1, 1)], [(1, 1)]]
        assert {task.phase for task in server.live(run).tasks.values()} == {TaskPhase.RUNNING}


def test_a_run_that_ended_without_a_server_is_recorded(server: Driven) -> None:
    server.otherwise = FAIL
    server.engine.waiting = ("pulling its image", "", 600.0)
    run = server.submit(retries=0)
    server.engine.waiting = None
    server.turn(1)
    server.restart()
    assert server.state(run) is RunState.FAILED and server.row(run).exit_code == 3


def test_a_run_that_was_lost_without_a_server(server: Driven) -> None:
    run = server.submit(retries=0)
    server.halt()
    server.engine.kill_launcher(run, 1, "worker-0")
    server.open()
    assert server.store.attempt(run, 1).cause == Cause.LOST
    server.advance(5)
    assert server.row(run).attempt == 2 and server.state(run) is RunState.RUNNING


def test_a_task_whose_files_are_lost_is_ended_and_not_started_again(server: Driven) -> None:
    run = server.submit(**GANG)
    server.halt()
    (server.directory(run, "worker-1", attempt=1) / "order.json").unlink()
    server.open()
    server.advance(10)
    assert server.task(run, "worker-1").incarnation == 2, "it is a lost task"
    assert server.attempt(run).generation == 2


def test_a_directory_that_is_gone_is_a_lost_task(server: Driven) -> None:
    run = server.submit()
    server.halt()
    shutil.rmtree(server.directory(run, attempt=1))
    server.open()
    server.advance(20)
    assert server.store.attempt(run, 1).cause == Cause.LOST and server.row(run).attempt == 2


def test_every_generation_starts_from_the_newest_checkpoint(server: Driven) -> None:
    run = server.submit(retries=0)
    stage(server.directory(run), 1, "last.pt", step=7)
    server.kick(run)
    server.kill_launcher(run)
    server.advance(5)
    [checkpoint] = server.store.checkpoints(run)
    assert server.attempt(run).resumed_from == checkpoint.id and server.order(run).resume_from == "last.pt"
    assert "attempt 2 goes on from checkpoint last.pt (step 7)" in server.said(run)
    assert server.row(run).failures == 0


def test_a_task_that_cannot_join_does_not_end_the_world(server: Driven) -> None:
    first = server.submit(resources={"cpu": 3})
    run = server.submit(workers="1..2", resources={"cpu": 1}, retries=0)
    assert list(server.live(run).tasks) == ["worker-0"]
    Fault(server, "submit", EngineError("no cgroup"))
    server.stop(first)
    server.until(lambda: server.events(run, "shrinking"))
    assert "worker-1 cannot join: no cgroup" in server.said(run)
    assert list(server.live(run).tasks) == ["worker-0"] and server.starts(run, 1, "worker-0") == [(1, 1)]


def test_a_gang_with_a_task_that_does_not_come_up_frees_its_places(server: Driven) -> None:
    reach = server.engine.reach

    async def one_only(handle: Any, task: str) -> Any:
        directory = await reach(handle, task)
        if task == "worker-1":
            directory._arrived = lambda: False
        return directory

    server.engine.reach = one_only  # type: ignore[method-assign]
    run = server.submit(start_within="60s", **GANG)
    task = server.task(run)
    assert task.phase is TaskPhase.READY and server.task(run, "worker-1").phase is TaskPhase.PENDING
    server.until(lambda: server.store.attempt(run, 1).state == "ended")
    attempt = server.store.attempt(run, 1)
    assert attempt.cause == Cause.ENGINE_ERROR and "worker-1 missing" in attempt.evidence["message"]
    assert server.starts(run, 1, "worker-0") == []


def test_of_two_nodes_each_task_has_its_place() -> None:
    nodes = [NODE, type(NODE)("other", cpu=1, memory=8 << 30)]
    with driven(*nodes) as server:
        run = server.submit(workers=2, resources={"cpu": 1}, name="digits")
        placed = [place.node for place in server.attempt(run).placement.values()]
        assert set(placed) <= {"local", "other"} and server.state(run) is RunState.RUNNING
        assert server.engine.on_nodes == {(run, 1, f"worker-{i}"): node for i, node in enumerate(placed)}
