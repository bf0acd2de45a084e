"""What the observations of an engine mean, and what missing ones mean."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest

from stoker.control.policy.task_phases import TaskPhase
from stoker.engine.base import Presence
from stoker.spec.states import Cause, RunState
from stoker.testing.fake_engine import Behaviour
from support.control.driven import NODE, STUBBORN, Driven, driven

GANG: dict[str, Any] = {"workers": 2, "resources": {"cpu": 1}, "lost_after": "60s", "retries": 0}


def silence(server: Driven, run: str, *tasks: str, ready: bool | None) -> None:
    server.engine.node_ready = ready
    server.engine.silent |= {(run, 1, task) for task in tasks}


def test_an_engine_that_does_not_answer_has_no_nodes_until_it_does(server: Driven) -> None:
    server.engine.unavailable = True
    server.advance(6)
    assert server.loop.context.fleet.member("fake").trouble is not None
    run = server.submit()
    server.advance(20)
    assert server.state(run) is RunState.QUEUED
    server.engine.unavailable = False
    server.advance(6)
    assert server.loop.context.fleet.member("fake").trouble is None and server.state(run) is RunState.RUNNING


def test_a_change_is_noticed_at_once(server: Driven) -> None:
    server.otherwise = Behaviour(steps=1)
    run = server.submit()
    before = server.clock.now
    server.steps()
    assert server.state(run) is RunState.SUCCEEDED and server.clock.now == before


def test_a_change_without_a_notice_is_found_soon(server: Driven) -> None:
    server.otherwise = Behaviour(steps=1)
    run = server.submit()
    server.engine._machine._changed = lambda task: None
    server.steps()
    assert server.state(run) is RunState.RUNNING
    server.advance(21)
    assert server.state(run) is RunState.SUCCEEDED


def test_a_silent_task_on_a_lost_node_is_replaced_after_lost_after(server: Driven) -> None:
    run = server.submit(**GANG)
    task = server.task(run, "worker-1")
    silence(server, run, "worker-1", ready=False)
    server.advance(58)
    assert task.gone is None and task.phase is TaskPhase.RUNNING
    server.engine.silent.clear()
    server.advance(4)
    silence(server, run, "worker-1", ready=False)
    server.advance(58)
    assert task.gone is None, "it was heard of in between"
    server.advance(6)
    assert task.incarnation == 2 and task.replaced_silent
    place = server.attempt(run).placement["worker-1"]
    assert (place.incarnation, place.given_up, place.moved) == (2, True, 1)
    assert "no word from node" in server.said(run) and server.row(run).failures == 0


def test_silence_on_a_ready_node_ends_the_task_once(server: Driven) -> None:
    run = server.submit(**GANG)
    asked: list[Any] = []
    server.engine.before = lambda method, argument: asked.append(argument) if method == "stop" else None
    die = server.engine._machine.die
    server.engine._machine.die = lambda *_: None  # type: ignore[method-assign]
    silence(server, run, "worker-1", ready=True)
    server.advance(300)
    assert len(asked) == 1 and server.task(run, "worker-1").gone is None, "its end is awaited"
    server.engine._machine.die = die  # type: ignore[method-assign]
    server.engine.silent.clear()
    server.kill_launcher(run, "worker-1")
    assert server.task(run, "worker-1").incarnation == 2


def test_silence_of_most_tasks_is_a_fault_of_our_own() -> None:
    with driven(replace(NODE, cpu=1), replace(NODE, name="other", cpu=1)) as server:
        run = server.submit(**GANG)
        silence(server, run, "worker-0", "worker-1", ready=False)
        server.advance(600)
        assert server.attempt(run).generation == 1 and server.row(run).attempt == 1


def test_a_task_that_comes_back_while_it_is_given_up_is_kept(server: Driven) -> None:
    run = server.submit(**GANG)
    task = server.task(run, "worker-1")
    assert task.directory is not None
    silence(server, run, "worker-1", ready=False)

    def catch_up(seconds: float) -> None:
        server.engine.silent.clear()
        task.seen = replace(task.seen, presence=Presence.ALIVE) if task.seen is not None else None

    task.directory.catch_up = catch_up  # type: ignore[method-assign]
    server.advance(64)
    assert task.incarnation == 1 and task.gone is None and server.attempt(run).generation == 1


def test_a_task_that_is_missing_from_three_lists_is_gone(server: Driven) -> None:
    run = server.submit(**GANG)
    task = server.task(run, "worker-1")
    place = next(place for place in server.engine._machine.tasks if place.task == "worker-1")
    del server.engine._machine.tasks[place]
    for missing in (1, 2):
        server.look()
        assert (task.missing, task.gone) == (missing, None)
    server.look()
    assert server.said(run).count("its task directory is gone") == 1
    server.advance(10)
    assert task.incarnation == 2


def test_a_task_that_is_listed_again_is_not_gone(server: Driven) -> None:
    run = server.submit(**GANG)
    task = server.task(run, "worker-1")
    tasks = server.engine._machine.tasks
    place = next(place for place in tasks if place.task == "worker-1")
    away = tasks.pop(place)
    server.look()
    server.look()
    tasks[place] = away
    server.look()
    assert (task.missing, task.gone, task.incarnation) == (0, None, 1)


def test_the_reason_to_wait_is_recorded_once(server: Driven) -> None:
    server.engine.waiting = ("pulling its image", "", 600.0)
    run = server.submit(**GANG)
    server.advance(30)
    assert [event.text for event in server.events(run, "waiting")] == [
        "worker-0: pulling its image",
        "worker-1: pulling its image",
    ]
    server.engine.waiting = ("creating its container", "", 600.0)
    server.advance(30)
    assert len(server.events(run, "waiting")) == 4
    server.engine.waiting = None
    server.advance(5)
    assert server.state(run) is RunState.RUNNING


def test_a_task_that_no_run_wants_is_ended(server: Driven) -> None:
    """Also a lost task that comes back."""
    run = server.submit(workers="1..2", resources={"cpu": 1}, lost_after="60s", retries=0)
    server.controller.scale(run, 1)
    server.until(lambda: list(server.live(run).tasks) == ["worker-0"])
    server.look()
    left = server.live(run).left["worker-1"]
    assert left.phase is TaskPhase.FREED and left.gone is not None
    place, task = next(
        (place, task) for place, task in server.engine._machine.tasks.items() if place.task == "worker-1"
    )
    task.proof = ""
    server.look()
    server.look()
    assert server.engine._machine.tasks[place].proof, "ended again"


def test_the_scheduler_follows_an_engine_that_chooses_another_node() -> None:
    with driven(NODE, replace(NODE, name="other")) as server:
        submit = server.engine.submit

        async def elsewhere(attempt: Any) -> Any:
            handle = await submit(attempt)
            server.engine.on_nodes[attempt.run, attempt.number, "worker-0"] = "other"
            return handle

        server.engine.submit = elsewhere  # type: ignore[method-assign]
        run = server.submit(resources={"cpu": 3})
        server.look()
        assert (
            server.attempt(run).placement["worker-0"].node == "other"
            and server.task(run).place.node == "other"
        )
        second = server.submit(resources={"cpu": 4})
        server.look()
        assert server.state(second) is RunState.RUNNING, "its planned place is free"


def test_tasks_unknown_to_the_database_are_left_alone(server: Driven) -> None:
    run = server.submit()
    copy = server.settings.home.root / "copy.db"
    server.halt()
    shutil.copy(server.settings.home.database, copy)
    for path in server.settings.home.root.glob("stoker.db*"):
        path.unlink()
    server.open()
    server.advance(20)
    assert [one["id"] for one in server.controller.unknown()] == [run]
    assert server.engine._machine.tasks[next(iter(server.engine._machine.tasks))].alive
    server.controller.forget([run])
    server.advance(5)
    assert not any(task.alive for task in server.engine._machine.tasks.values())


@pytest.mark.parametrize("known", [True, False])
def test_leftovers_of_an_ended_attempt_are_removed(server: Driven, known: bool) -> None:
    server.otherwise = STUBBORN
    run = server.submit(retries=0)

    def busy(method: str, argument: Any) -> None:
        if method == "remove":
            raise OSError(16, "busy")

    server.engine.before = busy
    server.stop(run, kill=True)
    assert server.state(run) is RunState.STOPPED and not server.store.attempt(run, 1).removed
    if not known:
        server.restart()
        server.engine.before = lambda *_: None
    server.engine.before = lambda *_: None
    server.advance(30)
    assert server.store.attempt(run, 1).removed and server.engine._machine.tasks == {}
    assert server.store.attempt(run, 1).cause == Cause.STOPPED
