"""Elastic runs grow into free places and give them back, at checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stoker.control.policy.task_phases import TaskPhase
from stoker.engine.base import Presence
from stoker.errors import Conflict, EngineError, Refused
from stoker.spec.states import RunState
from support.control.driven import Driven, driven, scanned, stage

ELASTIC: dict[str, Any] = {"workers": "1..3", "resources": {"cpu": 1}, "retries": 0}


@pytest.fixture
def server() -> Iterator[Driven]:
    with driven(grow_after=30.0, grow_patience=60.0) as made:
        yield made


def workers(server: Driven, run: str) -> list[str]:
    """The members of the world."""
    return [name for name, place in server.attempt(run).placement.items() if not place.joining]


def alone(server: Driven) -> tuple[str, str]:
    """A run with one worker, and the run that has the other places."""
    other = server.submit(resources={"cpu": 3})
    run = server.submit(**ELASTIC)
    assert workers(server, run) == ["worker-0"]
    return run, other


def once(server: Driven, run: str) -> None:
    """No body was started twice in one generation."""
    for task in ("worker-0", "worker-1", "worker-2"):
        generations = [generation for _, generation in server.starts(run, 1, task)]
        assert len(generations) == len(set(generations))


def test_it_starts_with_all_free_places(server: Driven) -> None:
    run = server.submit(**ELASTIC)
    assert workers(server, run) == ["worker-0", "worker-1", "worker-2"]
    assert server.attempt(run).generation == 1


def test_joining_tasks_wait_for_a_checkpoint_for_a_bounded_time(server: Driven) -> None:
    run, other = alone(server)
    server.stop(other)
    server.advance(25)
    assert len(server.live(run).tasks) == 1, "it has only just started"
    server.advance(10)
    assert [task.joining for task in server.live(run).tasks.values()] == [False, True, True]
    assert [task.phase for task in server.live(run).tasks.values()][1:] == [TaskPhase.READY] * 2
    assert "worker-1, worker-2 may join: there is room" in server.said(run)
    server.advance(45)
    assert server.attempt(run).generation == 1
    server.advance(20)
    assert len(workers(server, run)) == 3 and server.attempt(run).generation == 2
    assert server.order(run).env["STOKER_WORLD_SIZE"] == "3"
    row = server.row(run)
    assert (row.attempt, row.failures, row.faults) == (1, 0, 0)
    once(server, run)


def test_tasks_join_right_after_a_checkpoint(server: Driven) -> None:
    run, other = alone(server)
    server.stop(other)
    server.until(lambda: server.live(run).waits_since is not None)
    began = server.clock.now
    stage(server.directory(run), 1, "last.pt", step=3)
    server.kick(run)
    for scans in range(1, 4):
        scanned(server.directory(run), scans)
        server.kick(run)
    server.until(lambda: server.attempt(run).generation == 2)
    assert server.clock.now - began < 5 and len(workers(server, run)) == 3
    assert server.order(run, "worker-2").resume_from == "last.pt"


def test_a_place_that_is_needed_back_is_given_back_once(server: Driven) -> None:
    run = server.submit(**ELASTIC)
    server.advance(40)
    released: list[Any] = []
    scheduler = server.loop.context.scheduler
    release = scheduler.release_part

    def counted(id: str, indexes: Any, **more: Any) -> None:
        released.append((id, tuple(indexes)))
        release(id, indexes, **more)

    scheduler.release_part = counted  # type: ignore[method-assign]
    other = server.submit(resources={"cpu": 2})
    server.until(lambda: server.state(other) is RunState.RUNNING)
    server.advance(60)
    assert workers(server, run) == ["worker-0", "worker-1"]
    assert released == [(run, (2,))]
    left = server.live(run).left["worker-2"]
    assert left.phase is TaskPhase.FREED and f"worker-2 is given back to {other}" in server.said(run)
    once(server, run)


def test_who_is_let_go_keeps_its_place_until_it_has_ended(server: Driven) -> None:
    run = server.submit(**ELASTIC)
    server.advance(40)

    def stuck(method: str, argument: Any) -> None:
        if method == "stop":
            raise EngineError("it waits inside the kernel")

    server.engine.before = stuck
    other = server.submit(resources={"cpu": 2})
    server.advance(100)
    assert server.state(other) is RunState.QUEUED
    assert server.live(run).left["worker-2"].phase is TaskPhase.RELEASED
    server.engine.before = lambda *_: None
    server.advance(30)
    assert server.state(other) is RunState.RUNNING
    alive = [
        one.task
        for one in server.do(server.engine.observe())
        if one.run == run and one.presence is Presence.ALIVE
    ]  # type: ignore[arg-type]
    assert sorted(alive) == ["worker-0", "worker-1"]


def test_a_user_scales_it(server: Driven) -> None:
    run = server.submit(**ELASTIC)
    assert server.controller.scale(run, 1) == {"from": 3, "to": 1, "text": "wants 1 workers, has 3"}
    server.advance(20)
    assert workers(server, run) == ["worker-0"]
    server.controller.scale(run, 2)
    server.advance(70)
    assert len(workers(server, run)) == 2 and server.row(run).record["workers_wanted"] == 2
    once(server, run)
    server.restart()
    server.advance(200)
    assert len(workers(server, run)) == 2, "the number is recorded"


def test_scaling_says_what_is_wrong(server: Driven) -> None:
    fixed, run = server.submit(resources={"cpu": 1}), server.submit(**ELASTIC)
    with pytest.raises(Refused, match="neither more nor fewer"):
        server.controller.scale(fixed, 2)
    with pytest.raises(Refused, match="outside"):
        server.controller.scale(run, 9)
    server.stop(run)
    with pytest.raises(Conflict, match="not waiting or running"):
        server.controller.scale(run, 2)


def test_a_queued_run_is_scaled_before_it_starts(server: Driven) -> None:
    first = server.submit(resources={"cpu": 4})
    run = server.submit(**ELASTIC)
    assert server.controller.scale(run, 2)["text"] == "wants 2 workers"
    server.stop(first)
    server.advance(3)
    assert len(workers(server, run)) == 2


def test_a_task_that_cannot_start_does_not_join(server: Driven) -> None:
    run, other = alone(server)
    server.stop(other)
    server.engine.waiting = ("no such image", "image", 20.0)
    server.until(lambda: len(server.live(run).tasks) == 3)
    server.advance(30)
    assert list(server.live(run).tasks) == ["worker-0"]
    assert "worker-1 cannot join: no such image" in server.said(run)
    assert server.state(run) is RunState.RUNNING and server.starts(run, 1, "worker-0") == [(1, 1)]


def test_a_task_lost_before_it_joins_is_released(server: Driven) -> None:
    run, other = alone(server)
    server.stop(other)
    server.until(lambda: server.live(run).waits_since is not None)
    server.kill_launcher(run, "worker-2")
    assert list(server.live(run).tasks) == ["worker-0", "worker-1"] and "worker-2 cannot join" in server.said(
        run
    )
    server.until(lambda: server.attempt(run).generation == 2)
    assert len(workers(server, run)) == 3, "there was room for another one meanwhile"
    assert server.attempt(run).placement["worker-2"].incarnation == 3 and server.row(run).failures == 0
    once(server, run)


def test_a_joining_task_is_needed_back_before_it_has_joined(server: Driven) -> None:
    run, other = alone(server)
    server.stop(other)
    server.until(lambda: server.live(run).waits_since is not None)
    third = server.submit(resources={"cpu": 3})
    server.until(lambda: server.state(third) is RunState.RUNNING)
    assert list(server.live(run).tasks) == ["worker-0"] and server.attempt(run).generation == 1
    assert server.starts(run, 1, "worker-0") == [(1, 1)], "the world went on"


@pytest.mark.parametrize("when", ["growing", "shrinking"])
def test_the_next_server_continues(server: Driven, when: str) -> None:
    if when == "growing":
        run, other = alone(server)
        server.stop(other)
        server.until(lambda: server.live(run).waits_since is not None)
        server.restart()
        assert [task.joining for task in server.live(run).tasks.values()] == [False, True, True]
        server.advance(70)
        assert len(workers(server, run)) == 3
    else:
        run = server.submit(**ELASTIC)
        server.advance(40)
        server.submit(resources={"cpu": 2}, settle=False)
        server.turn(12)
        server.restart()
        server.advance(100)
        assert len(workers(server, run)) == 2
    once(server, run)


def test_workers_that_are_replaced_alone_join_and_leave_with_a_new_generation(server: Driven) -> None:
    """As with dask: a released worker makes a new generation, although a lost one is replaced alone."""
    run = server.submit(framework="dask", workers="1..2", resources={"cpu": 1}, roles={})
    assert {"worker-0", "worker-1"} <= set(workers(server, run))
    server.controller.scale(run, 1)
    server.advance(60)
    assert [name for name in workers(server, run) if name.startswith("worker")] == ["worker-0"]
    assert server.attempt(run).generation == 2 and server.state(run) is RunState.RUNNING
    server.controller.scale(run, 2)
    server.advance(150)
    assert len([name for name in workers(server, run) if name.startswith("worker")]) == 2
    assert server.attempt(run).generation == 3


def test_a_run_that_ends_while_it_grows_does_not_disturb_others(server: Driven) -> None:
    other = server.submit(resources={"cpu": 2})
    run = server.submit(**{**ELASTIC, "workers": "1..2"}, name="short")
    bystander = server.submit(resources={"cpu": 1})
    assert [server.state(one) for one in (run, bystander)] == [RunState.RUNNING] * 2
    server.stop(other)
    live, bystanding, apply = server.live(run), server.live(bystander), server.store.apply

    def ends(changes: Any) -> None:
        apply(changes)
        if any(getattr(getattr(change, "row", None), "kind", "") == "growing" for change in changes):
            live.leave()

    server.store.apply = ends  # type: ignore[method-assign]
    server.advance(40)
    assert server.events(run, "growing")
    assert server.live(bystander) is bystanding, "the session went on"
    server.store.apply = apply  # type: ignore[method-assign]
    server.restart()
