"""Runs of several tasks on the fake engine: real store, real task directories, simulated bodies."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from box import wait

sys.path.insert(0, str(Path(__file__).parent))

from rigs import Watched

from stoker.blobs import BlobStore
from stoker.control import leaving
from stoker.control.controller import Controller
from stoker.engine.base import Node, Observation, Surroundings
from stoker.errors import Refused
from stoker.scheduling import gangs
from stoker.settings import ControlSettings, Home, Settings
from stoker.store import Store
from stoker.store.rows import RunRow
from stoker.task.formats import Order, TaskInfo
from stoker.task.near import NearTaskDir
from stoker.testing.fake_engine import Behaviour, FakeEngine

LONG = Behaviour(hang=True)
FAIL = Behaviour(exit_code=3, lines=("ValueError: no",))
DIE = Behaviour(launcher_dies=True)
DONE = Behaviour()


class Gang(Watched):
    """A server's inside without HTTP. `bodies`: what each (task, generation) does; the rest end well at once. Every
    body that starts is written down."""

    def __init__(self, root: Path, **control: float) -> None:
        rhythms = {"poll": 0.05, "retry_backoff": 0.01, "retry_backoff_max": 0.05}
        rhythms |= {"grow_after": 0.05, "grow_patience": 0.1, **control}
        self.settings = Settings(Home(root / "home"), control=ControlSettings(fault_retries=3, **rhythms))
        self.settings.home.root.mkdir(parents=True, exist_ok=True)
        self.bodies: dict[tuple[str, int], Behaviour] = {}
        self.otherwise: Behaviour = DONE
        self.started: list[tuple[str, int, int]] = []
        self.blobs = BlobStore(self.settings.home.blobs)
        self._open()

    def _open(self) -> None:
        self.store = Store.open(self.settings.home.database)
        nodes = [Node("local", cpu=4, memory=8 << 30)]
        self.engine = FakeEngine(self.settings.home, self._script, nodes=nodes)
        self.controller = Controller(self.settings, self.store, self.blobs, self.engine)
        self.controller.start()

    def _script(self, info: TaskInfo, order: Order) -> Behaviour:
        started = (info.task, info.incarnation, order.generation)
        if started not in self.started:
            self.started.append(started)
        return self.bodies.get((info.task, order.generation), self.otherwise)

    def close(self) -> None:
        self.controller.shutdown()
        self.store.close()

    def restart(self) -> None:
        self.close()
        self._open()

    def submit(self, **job: Any) -> RunRow:
        key = f"key-{time.monotonic_ns()}"
        row, _ = self.controller.submit(
            key=key, job={"run": ["train"], **job}, code=None, secrets={}, record={}, user="ada"
        )
        return row

    def end(self, run: str, until: Callable[[RunRow], bool] | None = None) -> RunRow:
        """Let time pass until the run has ended, or something else holds of it."""

        def look() -> RunRow:
            self.engine.advance(1)
            return self.store.run(run)

        return wait(look, until or (lambda row: row.state in ("succeeded", "failed", "stopped")))

    def order(self, run: str, task: str) -> Order:
        """The newest order to run."""
        look = NearTaskDir(str(self.settings.home.tasks / run / "1" / task)).order
        return wait(look, lambda found: found is not None and found.verb == "run")

    def workers(self, run: str) -> list[str]:
        """Who is in the world now."""
        return sorted(name for name, place in self.placement(run).items() if not place.get("joining"))

    def placement(self, run: str) -> dict[str, Any]:
        return self.store.attempt(run, 1).placement if self.store.run(run).attempt else {}

    def generation(self, run: str) -> int:
        return self.store.attempt(run, 1).generation if self.store.run(run).attempt else 0

    def ended(self, run: str) -> bool:
        return self.store.run(run).state in ("succeeded", "failed", "stopped")

    def kinds(self, run: str) -> list[str]:
        return [event.kind for event in self.store.events(run)]


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    made = Gang(tmp_path)
    yield made
    made.close()


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
    ports = [port for place in places.values() for port in place["ports"]]
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


def test_without_retries_the_run_fails_and_says_who_it_was(gang: Gang) -> None:
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


def test_a_launcher_that_was_told_to_end_is_replaced_and_not_asked_again(gang: Gang) -> None:
    """As when somebody deletes a pod: for as long as its grace lasts it is there, and starts nothing."""
    gang.bodies = {("worker-0", 1): LONG, ("worker-1", 1): LONG}
    run = gang.submit(workers=2).id
    gang.end(run, lambda _: len(gang.started) == 2)
    gang.engine.terminate_launcher(run, 1, "worker-1")
    row = gang.end(run)
    assert (row.state, row.attempt, row.failures) == ("succeeded", 1, 0)
    assert gang.generation(run) == 2
    assert gang.placement(run)["worker-1"]["incarnation"] == 2
    assert [event.text for event in gang.store.events(run) if event.kind == "reforming"] == [
        "worker-1: preempted; worker-1 is replaced, generation 2 follows"
    ]


def test_all_are_told_to_end(gang: Gang) -> None:
    """As when their nodes are drained together."""
    gang.bodies = {(f"worker-{index}", 1): LONG for index in (0, 1)}
    run = gang.submit(workers=2).id
    gang.end(run, lambda _: len(gang.started) == 2)
    gang.bodies = {}
    for task in ("worker-0", "worker-1"):
        gang.engine.terminate_launcher(run, 1, task)
    row = gang.end(run)
    assert (row.state, row.failures) == ("succeeded", 0)


def test_a_member_lost_while_the_next_generation_waits_is_replaced(tmp_path: Path) -> None:
    """The others have no order yet: there is nobody to be stopped, and nobody to wait for."""
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
        assert (place["incarnation"], place["generation"]) == (2, 4)
    finally:
        gang.close()


def test_when_nobody_survives_the_attempt_is_over(gang: Gang) -> None:
    gang.bodies = {("worker-0", 1): DIE, ("worker-1", 1): DIE}
    run = gang.submit(workers=2).id
    row = gang.end(run, lambda row: row.attempt == 2)
    assert gang.store.attempt(run, 1).cause == "lost"
    gang.bodies = {}
    assert row.failures == 0


def test_one_that_cannot_be_told_to_stop_does_not_cost_the_others_their_place(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its courier hangs. That the others have stopped is seen all the same, and only that one is ended."""
    monkeypatch.setattr(leaving, "_STOP_MARGIN", 0.5)
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


def test_those_who_never_stopped_are_found_by_a_restarted_server(gang: Gang) -> None:
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


def test_who_serves_is_stopped_when_the_workers_are_done(gang: Gang) -> None:
    gang.bodies = {("ps-0", 1): LONG}
    row = gang.end(gang.submit(workers=2, roles={"ps": {}}).id)
    assert (row.state, row.cause) == ("succeeded", "completed")


@pytest.mark.parametrize("how", [DIE, FAIL])
def test_who_ended_while_the_others_go_on_is_seen_to_have(gang: Gang, how: Behaviour) -> None:
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


def test_who_may_fail_fails_alone(gang: Gang) -> None:
    gang.bodies = {("evaluator-0", 1): FAIL}
    row = gang.end(gang.submit(roles={"evaluator": {"may_fail": True}}).id)
    assert row.state == "succeeded"


def test_a_stop_reaches_everybody(gang: Gang) -> None:
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


def test_a_gang_that_does_not_come_up_in_time_lets_go_and_queues_again(gang: Gang) -> None:
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
    monkeypatch.setattr(gangs, "FIRST_WAIT", 0.2)
    real, observe = gang.engine.reach, gang.engine.observe
    first: dict[str, str] = {}

    def free(run: str) -> bool:
        others = [other for other in first.values() if other != run]
        return any(gang.store.run(other).attempt == 2 or gang.ended(other) for other in others)

    async def reach(handle: Any, task: str) -> Any:
        """There is room for two pods: one of each got it."""
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
def test_a_parameter_server_that_comes_back_elsewhere_has_all_begin_again(
    gang: Gang, port: int, restarted: list[str]
) -> None:
    """TensorFlow looks for it where it was: at the same ports of one machine that is enough, of another pod it is not."""
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


ELASTIC: dict[str, Any] = {"workers": "1..3", "resources": {"cpu": 1}, "retries": 0}


def test_an_elastic_run_starts_with_what_is_free_and_grows(gang: Gang) -> None:
    gang.otherwise = LONG
    other = gang.submit(resources={"cpu": 3}).id
    gang.until(other, "running")
    run = gang.submit(**ELASTIC).id
    gang.until(run, "running")
    assert gang.workers(run) == ["worker-0"]
    gang.controller.stop_run(other, kill=True, by="ada")
    gang.end(run, lambda _: len(gang.workers(run)) == 3 and ("worker-2", 2, 2) in gang.started)
    assert gang.order(run, "worker-0").env["STOKER_WORLD_SIZE"] == "3"
    assert {one for one in gang.started if one[0] == "worker-0" and one[1] != 1} == set()
    row = gang.store.run(run)
    assert (row.attempt, row.failures, row.faults) == (1, 0, 0)
    gang.controller.stop_run(run, kill=True, by="ada")
    gang.end(run)


def test_extra_workers_are_given_back_to_who_waits(gang: Gang) -> None:
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


def test_a_person_scales_a_run_down_and_up(gang: Gang) -> None:
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
