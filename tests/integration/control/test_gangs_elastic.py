"""Runs that grow and shrink, on the fake engine."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.control.placement import engine_watcher
from stoker.control.runs import task_reader
from stoker.control.runs.reconcile import Reconciler
from stoker.engine.base import Node, Observation
from stoker.errors import EngineError, Refused
from stoker.spec.states import Cause
from stoker.store.rows import RunRow
from support.control.gang_rig import LONG, Gang, gang

__all__ = ["gang"]

ELASTIC: dict[str, Any] = {"workers": "1..3", "resources": {"cpu": 1}, "retries": 0}


def alone_at_first(gang: Gang) -> str:
    """A run that has one worker and room for two more."""
    gang.otherwise = LONG
    other = gang.submit(resources={"cpu": 3}).id
    gang.until(other, "running")
    run = gang.submit(**ELASTIC).id
    gang.until(run, "running")
    assert gang.workers(run) == ["worker-0"]
    gang.controller.stop_run(other, kill=True, by="ada")
    return run


def test_an_elastic_run_starts_with_what_is_free_and_grows(gang: Gang) -> None:
    run = alone_at_first(gang)
    gang.end(run, lambda _: len(gang.workers(run)) == 3 and ("worker-2", 2, 2) in gang.started)
    assert gang.order(run, "worker-0").env["STOKER_WORLD_SIZE"] == "3"
    assert {one for one in gang.started if one[0] == "worker-0" and one[1] != 1} == set()
    row = gang.store.run(run)
    assert (row.attempt, row.failures, row.faults) == (1, 0, 0)
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_extra_workers_are_given_back_to_waiting_runs(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(**ELASTIC).id
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    other = gang.submit(name="other", resources={"cpu": 2}).id
    gang.end(other, lambda row: row.state == "running")
    left = gang.workers(run)
    assert len(left) == 2
    assert gang.order(run, left[0]).env["STOKER_WORLD_SIZE"] == "2"
    row = gang.store.run(run)
    assert (row.state, row.attempt, row.failures, row.faults) == ("running", 1, 0, 0)
    for one in (run, other):
        gang.controller.stop_run(one, kill=True, by="ada")
        gang.end(one)


def test_a_user_scales_a_run_down_and_up(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(**ELASTIC).id
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    assert gang.controller.scale(run, 1)["to"] == 1
    gang.end(run, lambda _: len(gang.workers(run)) == 1)
    gang.controller.scale(run, 2)
    gang.end(run, lambda _: len(gang.workers(run)) == 2)
    assert len(gang.started) == len({(task, generation) for task, _, generation in gang.started})
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_scaling_says_what_is_wrong(gang: Gang) -> None:
    gang.otherwise = LONG
    fixed, elastic = gang.submit(resources={"cpu": 1}).id, gang.submit(**ELASTIC).id
    gang.until(fixed, "running")
    with pytest.raises(Refused, match="neither more nor fewer"):
        gang.controller.scale(fixed, 2)
    with pytest.raises(Refused, match="outside"):
        gang.controller.scale(elastic, 9)
    for one in (fixed, elastic):
        gang.controller.stop_run(one, kill=True, by="ada")
        gang.end(one)


def test_a_server_that_dies_while_a_run_grows_goes_on_growing(gang: Gang) -> None:
    gang.otherwise = LONG
    other = gang.submit(resources={"cpu": 3}).id
    gang.until(other, "running")
    run = gang.submit(**ELASTIC).id
    gang.until(run, "running")
    gang.controller.stop_run(other, kill=True, by="ada")
    gang.end(run, lambda _: len(gang.placement(run)) == 3)
    gang.restart()
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)
    assert len(gang.started) == len({(task, generation) for task, _, generation in gang.started})


# -- leaving -------------------------------------------------------------------------------------------------


class Stuck:
    """While it is set the engine cannot end anything."""

    def __init__(self, gang: Gang) -> None:
        self.tries = 0
        gang.engine.before = self._before
        self._gang = gang

    def _before(self, method: str, _: Any) -> None:
        if method == "stop":
            self.tries += 1
            raise EngineError("it does not end")

    def let_go(self) -> None:
        self._gang.engine.before = lambda *_: None


def test_who_is_let_go_keeps_its_place_until_it_has_ended(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(**ELASTIC | {"workers": "2..3"}).id
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    stuck = Stuck(gang)
    gang.controller.scale(run, 2)
    gang.end(run, lambda row: len(gang.workers(run)) == 2 and row.state == "running")
    other = gang.submit(name="other", resources={"cpu": 2}).id
    gang.end(run, lambda _: stuck.tries >= 3)
    assert len(gang.alive(run)) == 3
    assert gang.store.run(other).state == "queued", "one of its two places is still taken"
    stuck.let_go()
    gang.end(other, lambda row: row.state == "running")
    assert gang.alive(run) == gang.workers(run)
    for one in (run, other):
        gang.controller.stop_run(one, kill=True, by="ada")
        gang.end(one)


def test_a_name_is_not_reused_before_its_task_has_ended(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(**ELASTIC | {"workers": "2..3"}).id
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    stuck = Stuck(gang)
    gang.controller.scale(run, 2)
    gang.end(run, lambda _: len(gang.workers(run)) == 2)
    gang.controller.scale(run, 3)
    gang.end(run, lambda _: stuck.tries >= 3)
    assert len(gang.placement(run)) == 2
    stuck.let_go()
    gang.end(run, lambda _: len(gang.workers(run)) == 3 and ("worker-2", 3, 3) in gang.started)
    row = gang.store.run(run)
    assert (row.state, row.attempt, row.failures, row.faults) == ("running", 1, 0, 0)
    assert {one[1] for one in gang.started if one[0] != "worker-2"} == {1}, "the others keep their places"
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_a_server_that_dies_while_a_run_shrinks_goes_on_shrinking(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were told to stop, and the next step was not recorded."""
    # The endings were read before, and are not read again.
    monkeypatch.setattr(task_reader, "_JOURNAL_WAIT", 0.1)
    gang.otherwise = LONG
    run = gang.submit(**ELASTIC).id
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    reached = threading.Event()

    async def dies(*_: Any) -> None:
        reached.set()
        raise RuntimeError("the server dies here")

    with monkeypatch.context() as patched:
        patched.setattr(Reconciler, "_restart", dies)
        gang.controller.scale(run, 2)
        gang.end(run, lambda _: reached.is_set())
        gang.close()
    gang.open()
    gang.end(run, lambda _: len(gang.workers(run)) == 2 and ("worker-0", 1, 2) in gang.started)
    assert gang.store.run(run).attempt == 1
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_the_next_server_ends_the_tasks_that_were_being_released(gang: Gang) -> None:
    gang.otherwise = LONG
    run = gang.submit(**ELASTIC).id
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    Stuck(gang)
    gang.controller.scale(run, 1)
    gang.end(run, lambda _: gang.workers(run) == ["worker-0"])
    assert len(gang.alive(run)) == 3
    gang.restart()
    gang.end(run, lambda _: gang.alive(run) == ["worker-0"])
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_a_lost_node_shrinks_a_run_and_it_grows_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watcher, "_CAPACITY_EVERY", 0.05)
    here, there = Node("local", cpu=2, memory=8 << 30), Node("there", cpu=1, memory=8 << 30)
    gang = Gang(tmp_path, here, there)
    gang.otherwise = LONG
    run = gang.submit(**ELASTIC | {"workers": "2..3", "lost_after": "1s"}).id
    gang.end(run, lambda row: len(gang.workers(run)) == 3 and row.state == "running")
    (lost,) = [name for name, place in gang.placement(run).items() if place.node == "there"]
    gang.engine.silent.add((run, 1, lost))
    gang.engine.node_ready = False
    gang.engine.nodes = [here, replace(there, ready=False)]
    gang.end(run, lambda row: len(gang.workers(run)) == 2 and row.state == "running")
    assert {place.moved for place in gang.placement(run).values()} == {1}, (
        "the lost task may try their old address"
    )
    gang.engine.silent.clear()
    gang.engine.node_ready = True
    gang.engine.nodes = [here, there]
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    gang.end(run, lambda _: (lost, 3, 3) in gang.started)
    assert {name for name, incarnation, _ in gang.started if incarnation > 1} == {lost}
    row = gang.store.run(run)
    assert (row.attempt, row.failures) == (1, 0)
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)
    gang.close()


# -- joining -------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_start_does_not_end_the_training(gang: Gang) -> None:
    def refuses(method: str, argument: Any) -> None:
        if method == "submit" and len(argument.tasks) > 1:
            raise EngineError("a webhook refused it")

    gang.engine.before = refuses
    run = alone_at_first(gang)
    gang.end(run, lambda _: "worker-1, worker-2 cannot join: a webhook refused it" in gang.said(run))
    row = gang.store.run(run)
    assert (row.state, row.attempt, gang.generation(run)) == ("running", 1, 1)
    gang.engine.before = lambda *_: None
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    assert {incarnation for name, incarnation, _ in gang.started if name == "worker-0"} == {1}
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


@pytest.mark.parametrize("how", ["dies", "cannot be placed"])
def test_a_worker_that_ends_before_it_joins_does_not_delay_another(gang: Gang, how: str) -> None:
    """It is tried again later."""
    real, observe = gang.engine.reach, gang.engine.observe
    hopeless = True

    async def reach(handle: Any, task: str) -> Any:
        directory = await real(handle, task)
        if task == "worker-2":
            directory._arrived = lambda: not hopeless
        return directory

    async def observed() -> list[Observation]:
        never = {"waiting": "no node has so much", "hopeless": Cause.ENGINE_ERROR, "patience": 0.0}
        stuck = never if hopeless and how != "dies" else {}
        return [replace(one, **(stuck if one.task == "worker-2" else {})) for one in await observe()]

    gang.engine.reach, gang.engine.observe = reach, observed  # type: ignore[method-assign]
    run = alone_at_first(gang)

    def without_it(_: RunRow) -> bool:
        if how == "dies" and "worker-2" in gang.alive(run):
            gang.engine.kill_launcher(run, 1, "worker-2")
        return gang.workers(run) == ["worker-0", "worker-1"]

    gang.end(run, without_it)
    assert "worker-2 cannot join: " in gang.said(run)
    hopeless = False
    gang.end(run, lambda _: len(gang.workers(run)) == 3)
    row = gang.store.run(run)
    assert (row.state, row.attempt, row.failures, row.faults) == ("running", 1, 0, 0)
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)
