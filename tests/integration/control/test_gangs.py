"""Runs of several tasks on the fake engine: real store, real task directories, simulated bodies."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.control.runs import shutdown, task_reader
from stoker.engine.base import Observation, Surroundings
from stoker.scheduling import gang_deadlock
from stoker.spec.states import Cause
from stoker.testing.fake_engine import Behaviour
from support.control.gang_rig import DIE, DONE, FAIL, LONG, Gang, gang
from support.waiting import wait

__all__ = ["gang"]


def test_all_tasks_of_a_run_start_and_it_ends_when_they_have(gang: Gang) -> None:
    row = gang.end(gang.submit(workers=3).id)
    assert (row.state, row.attempt, row.exit_code) == ("succeeded", 1, 0)
    assert sorted(gang.started) == [(f"worker-{index}", 1, 1) for index in range(3)]
    assert {task.task for task in gang.store.tasks(row.id, 1)} == {"worker-0", "worker-1", "worker-2"}
    assert {task.exit_code for task in gang.store.tasks(row.id, 1)} == {0}


def test_every_member_is_told_of_the_same_world(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(workers=2).id
    gang.until(run, "running")
    places = gang.store.attempt(run, 1).placement
    orders = [gang.order(run, name) for name in places]
    ports = [port for place in places.values() for port in place.ports]
    assert len(set(ports)) == len(ports) > 0
    assert all(order.env["STOKER_WORLD_SIZE"] == "2" for order in orders)
    gang.controller.stop_run(run, kill=True, by="ada")
    assert gang.end(run).state == "stopped"


def test_one_that_fails_starts_the_world_again_in_the_same_attempt(gang: Gang) -> None:
    gang.bodies = {("worker-0", 1): LONG, ("worker-1", 1): FAIL}
    row = gang.end(gang.submit(workers=2, retries=1).id)
    assert (row.state, row.attempt, row.failures) == ("succeeded", 1, 1)
    assert gang.store.attempt(row.id, 1).generation == 2
    assert sorted(gang.started) == [
        ("worker-0", 1, 1), ("worker-0", 1, 2), ("worker-1", 1, 1), ("worker-1", 1, 2)
    ]  # fmt: skip
    assert "reforming" in gang.kinds(row.id)


def test_without_retries_the_run_fails_and_names_the_task(gang: Gang) -> None:
    gang.bodies = {("worker-0", 1): LONG, ("worker-1", 1): FAIL}
    row = gang.end(gang.submit(workers=2).id)
    assert (row.state, row.cause, row.exit_code) == ("failed", "user-error", 3)
    evidence = gang.store.attempt(row.id, 1).evidence
    assert (evidence["task"], evidence["last_lines"][-1]) == ("worker-1", "ValueError: no")
    wait(lambda: gang.store.attempt(row.id, 1).removed)


def test_a_lost_launcher_is_replaced_alone_and_costs_no_retry(gang: Gang) -> None:
    gang.bodies = {("worker-0", 1): LONG, ("worker-1", 1): DIE}
    row = gang.end(gang.submit(workers=2).id)
    assert (row.state, row.attempt, row.failures) == ("succeeded", 1, 0)
    assert sorted(gang.started) == [
        ("worker-0", 1, 1), ("worker-0", 1, 2), ("worker-1", 1, 1), ("worker-1", 2, 2)
    ]  # fmt: skip


def test_a_launcher_that_was_told_to_end_is_replaced_and_gets_no_order(gang: Gang) -> None:
    """A user deletes a pod: during its grace it still exists, but starts nothing."""
    gang.bodies = {("worker-0", 1): LONG, ("worker-1", 1): LONG}
    run = gang.submit(workers=2).id
    gang.end(run, lambda _: len(gang.started) == 2)
    gang.engine.terminate_launcher(run, 1, "worker-1")
    row = gang.end(run)
    assert (row.state, row.attempt, row.failures) == ("succeeded", 1, 0)
    assert gang.generation(run) == 2
    assert gang.placement(run)["worker-1"].incarnation == 2
    assert [event.text for event in gang.store.events(run) if event.kind == "reforming"] == [
        "worker-1: preempted; worker-1 is replaced, generation 2 follows"
    ]


def test_all_are_told_to_end(gang: Gang) -> None:
    """All their nodes are drained together."""
    gang.bodies = {(f"worker-{index}", 1): LONG for index in (0, 1)}
    run = gang.submit(workers=2).id
    gang.end(run, lambda _: len(gang.started) == 2)
    gang.bodies = {}
    for task in ("worker-0", "worker-1"):
        gang.engine.terminate_launcher(run, 1, task)
    row = gang.end(run)
    assert (row.state, row.failures) == ("succeeded", 0)


def test_a_member_lost_while_the_next_generation_waits_is_replaced(tmp_path: Path) -> None:
    """The others have no order yet, so none of them has to be stopped or waited for."""
    gang = Gang(tmp_path, retry_backoff=3600.0, retry_backoff_max=3600.0)
    try:
        gang.bodies = {("worker-0", number): LONG for number in (1, 2)}
        gang.bodies |= {("worker-1", number): FAIL for number in (1, 2)}
        run = gang.submit(workers=2, retries=2).id
        gang.end(run, lambda _: gang.generation(run) == 3)
        gang.engine.kill_launcher(run, 1, "worker-1")
        row = gang.end(run)
        assert (row.state, row.attempt, row.failures) == ("succeeded", 1, 2)
        place = gang.placement(run)["worker-1"]
        assert (place.incarnation, place.generation) == (2, 4)
    finally:
        gang.close()


def test_when_nobody_survives_the_attempt_is_over(gang: Gang) -> None:
    gang.bodies = {("worker-0", 1): DIE, ("worker-1", 1): DIE}
    run = gang.submit(workers=2).id
    row = gang.end(run, lambda row: row.attempt == 2)
    assert gang.store.attempt(run, 1).cause == "lost"
    gang.bodies = {}
    assert row.failures == 0


def test_a_task_that_cannot_be_stopped_does_not_cost_the_others_their_place(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its courier hangs. The others are seen to have stopped, and only that task is ended."""
    monkeypatch.setattr(shutdown, "_STOP_MARGIN", 0.5)
    real, answers = gang.engine.reach, threading.Event()

    async def reach(handle: Any, task: str) -> Any:
        directory = await real(handle, task)
        if task == "worker-1":
            write = directory.write_order
            directory.write_order = lambda order: (order.verb == "stop" and answers.wait(60), write(order))
        return directory

    gang.engine.reach = reach  # type: ignore[method-assign]
    gang.bodies = {("worker-0", 1): LONG, ("worker-1", 1): LONG, ("worker-2", 1): FAIL}
    gang.otherwise = LONG
    run = gang.submit(workers=3, retries=1, grace=0).id
    wait(lambda: {("worker-0", 1, 2), ("worker-1", 2, 2), ("worker-2", 1, 2)} <= set(gang.started))
    assert gang.store.run(run).attempt == 1
    answers.set()
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_a_parameter_server_comes_back_alone(gang: Gang) -> None:
    gang.bodies = {("ps-0", 1): DIE, ("worker-0", 1): LONG, ("worker-1", 1): LONG, ("ps-0", 2): LONG}
    run = gang.submit(workers=2, roles={"ps": {}}).id
    gang.end(run, lambda _: ("ps-0", 2, 2) in gang.started)
    assert sorted(one for one in gang.started if one[0].startswith("worker")) == [
        ("worker-0", 1, 1),
        ("worker-1", 1, 1),
    ]
    gang.controller.stop_run(run, kill=False, by="ada")
    assert gang.end(run).state == "stopped"


def test_the_endings_of_the_others_are_read_when_one_cannot_come_back(gang: Gang) -> None:
    gang.bodies = {("ps-0", 1): DIE}
    gang.otherwise = LONG
    real, observe = gang.engine.reach, gang.engine.observe

    async def reach(handle: Any, task: str) -> Any:
        directory = await real(handle, task)
        if task == "ps-0" and ("ps-0", 1, 1) in gang.started:
            directory._arrived = lambda: False
        return directory

    async def observed() -> list[Observation]:
        never = {"waiting": "no node has so much", "hopeless": Cause.ENGINE_ERROR, "patience": 0.0}
        return [
            replace(one, **(never if one.task == "ps-0" and one.incarnation == 2 else {}))
            for one in await observe()
        ]

    gang.engine.reach, gang.engine.observe = reach, observed  # type: ignore[method-assign]
    run = gang.submit(workers=2, roles={"ps": {}}).id
    gang.end(run, lambda row: row.attempt > 1 or gang.ended(run))
    attempt = gang.store.attempt(run, 1)
    assert attempt.cause == Cause.ENGINE_ERROR and "no node has so much" in attempt.evidence["message"]
    codes = {row.task: (row.phase, row.exit_code) for row in gang.store.tasks(run, 1)}
    assert codes["worker-0"] == codes["worker-1"] == ("ended", 143)
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_a_restarted_server_finds_tasks_that_never_stopped(gang: Gang) -> None:
    gang.bodies = {("ps-0", 1): DIE}
    gang.otherwise = LONG
    run = gang.submit(workers=2, roles={"ps": {}}).id
    gang.end(run, lambda _: ("ps-0", 2, 2) in gang.started)
    gang.restart()
    gang.end(
        run, lambda _: gang.controller.why(run)["text"].startswith("it runs with all 3 tasks, generation 2")
    )
    assert gang.order(run, "worker-0").generation == 1
    gang.controller.stop_run(run, kill=False, by="ada")
    assert gang.end(run).state == "stopped"


def test_a_server_role_is_stopped_when_the_workers_have_ended(gang: Gang) -> None:
    gang.bodies = {("ps-0", 1): LONG}
    row = gang.end(gang.submit(workers=2, roles={"ps": {}}).id)
    assert (row.state, row.cause) == ("succeeded", "completed")


@pytest.mark.parametrize("how", [DIE, FAIL])
def test_a_task_that_ends_before_the_others_is_shown_as_ended(gang: Gang, how: Behaviour) -> None:
    gang.bodies = {("extra-0", 1): how}
    gang.otherwise = LONG
    run = gang.submit(workers=2, roles={"extra": {"on_loss": "ignore", "ends": False}}).id
    gang.end(run, lambda _: {"extra-0": "ended"}.items() <= phases(gang, run).items())
    assert gang.store.run(run).state == "running"
    gang.bodies = {}
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def phases(gang: Gang, run: str) -> dict[str, str]:
    return {row.task: row.phase for row in gang.store.tasks(run, 1)}


def test_a_role_that_may_fail_fails_alone(gang: Gang) -> None:
    gang.bodies = {("evaluator-0", 1): FAIL}
    row = gang.end(gang.submit(roles={"evaluator": {"may_fail": True}}).id)
    assert row.state == "succeeded"


def test_a_stop_reaches_all_tasks(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(workers=3).id
    gang.until(run, "running")
    gang.controller.stop_run(run, kill=False, by="ada")
    row = gang.end(run)
    assert (row.state, row.cause) == ("stopped", "stopped")
    wait(lambda: gang.store.attempt(run, 1).removed)


def test_a_suspended_gang_goes_on_as_another_attempt(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(workers=2).id
    gang.until(run, "running")
    gang.controller.suspend(run, by="ada")
    gang.end(run, lambda row: row.state == "suspended")
    gang.otherwise = DONE
    gang.controller.resume(run, key="again", secrets={}, changes=[])
    row = gang.end(run)
    assert (row.state, row.attempt) == ("succeeded", 2)


def test_a_restarted_server_finds_its_gang(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(workers=2).id
    gang.until(run, "running")
    before = list(gang.started)
    gang.restart()
    gang.bodies = {("worker-1", 1): FAIL}
    wait(lambda: gang.store.run(run), lambda row: row.state == "running")
    assert gang.started == before
    gang.controller.stop_run(run, kill=True, by="ada")
    assert gang.end(run).state == "stopped"


def test_a_server_that_dies_between_generations_goes_on_with_the_same_one(gang: Gang) -> None:
    gang.bodies = {("worker-0", 1): LONG, ("worker-1", 1): DIE, ("worker-0", 2): LONG, ("worker-1", 2): LONG}
    run = gang.submit(workers=2).id
    gang.end(run, lambda _: gang.generation(run) == 2)
    gang.restart()
    gang.end(run, lambda _: {("worker-0", 1, 2), ("worker-1", 2, 2)} <= set(gang.started))
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)
    assert len(gang.started) == len({(task, generation) for task, _, generation in gang.started}) == 4


def test_an_end_that_a_server_read_before_it_died_is_known_to_the_next(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_reader, "_JOURNAL_WAIT", 1e9)
    gang.bodies = {("worker-0", 1): LONG}
    run = gang.submit(workers=2).id
    gang.end(run, lambda _: phases(gang, run).get("worker-1") == "ended")
    gang.restart()
    gang.controller.stop_run(run, kill=False, by="ada")
    assert gang.end(run).state == "stopped"


def test_a_gang_that_does_not_come_up_in_time_is_requeued(gang: Gang) -> None:
    gang.otherwise = LONG
    real = gang.engine.reach

    async def reach(handle: Any, task: str) -> Any:
        directory = await real(handle, task)
        if task == "worker-1" and handle["attempt"] == 1:
            directory._arrived = lambda: False
        return directory

    gang.engine.reach = reach  # type: ignore[method-assign]
    run = gang.submit(workers=2, start_within=1).id
    row = gang.end(run, lambda row: row.attempt == 2 and row.state == "running")
    assert "only 1 of 2 tasks were up" in gang.store.attempt(run, 1).evidence["message"]
    assert row.failures == 0
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_of_two_gangs_with_half_their_places_each_one_lets_go_and_both_get_through(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_deadlock, "FIRST_WAIT", 0.2)
    real, observe = gang.engine.reach, gang.engine.observe
    first: dict[str, str] = {}

    def free(run: str) -> bool:
        others = [other for other in first.values() if other != run]
        return any(gang.store.run(other).attempt == 2 or gang.ended(other) for other in others)

    async def reach(handle: Any, task: str) -> Any:
        """There is room for two pods: each run got one."""
        directory = await real(handle, task)
        if task == "worker-1" and handle["attempt"] == 1:
            directory._arrived = lambda: free(handle["run"])
        return directory

    async def observed() -> list[Observation]:
        return [
            replace(found, waiting="no room", no_room=True)
            if found.task == "worker-1" and found.attempt == 1
            else found
            for found in await observe()
        ]

    gang.engine.reach, gang.engine.observe = reach, observed  # type: ignore[method-assign]
    for name in ("early", "late"):
        first[name] = gang.submit(name=name, workers=2, start_within=2, resources={"cpu": 1}).id
    assert gang.end(first["late"]).state == gang.end(first["early"]).state == "succeeded"
    early, late = (gang.store.run(first[name]) for name in ("early", "late"))
    assert (early.attempt, late.attempt, late.faults, late.failures) == (1, 2, 0, 0)
    assert f"while {early.id} waits for room too" in gang.store.attempt(late.id, 1).evidence["message"]


@pytest.mark.parametrize(("port", "restarted"), [(0, ["ps-0"]), (29400, ["ps-0", "ps-1", "worker-0"])])
def test_a_parameter_server_at_a_new_address_restarts_the_world(
    gang: Gang, port: int, restarted: list[str]
) -> None:
    """TensorFlow uses the old address, which only a restart on the same machine keeps."""
    gang.otherwise = LONG
    observe = gang.engine.observe

    async def observed() -> list[Observation]:
        return [replace(found, address="10.0.0.7" if port else "") for found in await observe()]

    gang.engine.surroundings = lambda job: Surroundings(port=port)  # type: ignore[method-assign]
    gang.engine.observe = observed  # type: ignore[method-assign]
    roles = {"ps": {"count": 2, "on_loss": "task", "ends": False}}
    run = gang.submit(framework="tensorflow", workers=1, roles=roles, resources={"cpu": 1}).id
    gang.until(run, "running")
    gang.engine.kill_launcher(run, 1, "ps-0")
    gang.end(run, lambda _: ("ps-0", 2, 2) in gang.started)
    gang.end(run, lambda _: len({task for task, _, number in gang.started if number == 2}) >= len(restarted))
    assert sorted({task for task, _, number in gang.started if number == 2}) == restarted
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)
