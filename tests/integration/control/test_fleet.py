"""Several engines under one loop: the choice of a cluster, silence, waiting, added and removed clusters."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker.blobs import BlobStore
from stoker.control.controller import Controller
from stoker.engine.base import Engine, Gpu, Node
from stoker.errors import Conflict, EngineUnavailable, NotFound, Refused, SpecError
from stoker.settings import ControlSettings, Home, Settings
from stoker.store import Store
from stoker.store.rows import RunRow
from stoker.testing.fake_engine import FakeEngine
from support.control.rigs import Watched, scripted
from support.waiting import wait


class Clouds:
    """Clusters that are fake engines, by name; a configuration is a number of nodes and of GPUs on each."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.made: dict[str, FakeEngine] = {}

    def make(self, name: str, config: Mapping[str, Any]) -> Engine:
        gpus = tuple(Gpu(f"{name}-gpu-{i}", i, "H", 1 << 30) for i in range(int(config.get("gpus", 0))))
        nodes = [
            Node(f"n{i}", cpu=2, memory=8 << 30, gpus=gpus, tags=frozenset({name}))
            for i in range(int(config.get("nodes", 1)))
        ]
        self.made[name] = FakeEngine(Home(self._home.root / name), scripted, name=name, nodes=nodes)
        return self.made[name]

    def changed(self, config: Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
        return {**config, **dict(change.split("=") for change in changes)}


class Rig(Watched):
    def __init__(self, root: Path) -> None:
        control = ControlSettings(poll=0.05, retry_backoff=0.01, retry_backoff_max=0.05, fault_retries=3)
        self.settings = Settings(Home(root / "home"), control=control)
        self.settings.home.root.mkdir(parents=True)
        self.clouds = Clouds(self.settings.home)
        self._keys = 0
        self._open()

    def _open(self) -> None:
        node = Node("local", cpu=1, memory=8 << 30, tags=frozenset({"local"}))
        self.store = Store.open(self.settings.home.database)
        self.local = FakeEngine(self.settings.home, scripted, name="local", nodes=[node])
        blobs = BlobStore(self.settings.home.blobs)
        self.controller = Controller(self.settings, self.store, blobs, self.local, self.clouds)
        self.controller.start()

    def restart(self) -> None:
        self.close()
        self._open()

    def add(self, name: str, **config: Any) -> FakeEngine:
        self.controller.clusters.add(name, config, [])
        wait(lambda: self.controller.clusters.show(name)["reachable"])
        return self.clouds.made[name]

    def submit(self, *words: str, record: Mapping[str, Any] | None = None, **job: Any) -> RunRow:
        self._keys += 1
        return self.controller.submit(
            key=f"key-{self._keys}",
            job={"run": list(words or ("train",)), **job},
            code=None,
            secrets={},
            record=record or {},
            user="ada",
        )[0]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_a_run_goes_to_the_cluster_it_names(rig: Rig) -> None:
    rig.add("lab")
    row = rig.ended(rig.submit(cluster="lab").id)
    assert row.state == "succeeded"
    attempt = rig.store.attempt(row.id, 1)
    assert (attempt.engine, attempt.placement["worker-0"].node) == ("lab", "lab/n0")
    other = rig.ended(rig.submit().id)
    assert rig.store.attempt(other.id, 1).engine == "local"


def test_any_takes_the_first_that_has_room(rig: Rig) -> None:
    rig.add("lab")
    first = rig.submit("hang", cluster="any")
    rig.until(first.id, "running")
    second = rig.submit("hang", cluster="any")
    rig.until(second.id, "running")
    engines = {rig.store.attempt(run.id, 1).engine for run in (first, second)}
    assert engines == {"local", "lab"}


def test_an_unknown_cluster_is_refused_by_name(rig: Rig) -> None:
    with pytest.raises(NotFound, match="no cluster 'moon'"):
        rig.submit(cluster="moon")


def test_what_can_never_fit_in_its_cluster_is_refused(rig: Rig) -> None:
    rig.add("lab", gpus=2)
    with pytest.raises(Refused, match="can never start"):
        rig.submit(cluster="lab", resources={"gpu": 3})
    assert rig.ended(rig.submit(cluster="lab", resources={"gpu": 2}).id).state == "succeeded"


def test_clusters_survive_a_restart_and_runs_on_them_too(rig: Rig) -> None:
    rig.add("lab")
    row = rig.submit("hang", cluster="lab")
    rig.until(row.id, "running")
    rig.restart()
    assert [one["name"] for one in rig.controller.clusters.every()] == ["local", "lab"]
    wait(lambda: rig.controller.clusters.show("lab")["runs"] == 1)
    rig.controller.stop_run(row.id, kill=True, by="ada")
    assert rig.ended(row.id).state == "stopped"


def test_a_cluster_with_runs_is_not_forgotten(rig: Rig) -> None:
    rig.add("lab")
    row = rig.submit("hang", cluster="lab")
    rig.until(row.id, "running")
    with pytest.raises(Conflict, match="on cluster lab"):
        rig.controller.clusters.remove("lab")
    rig.controller.stop_run(row.id, kill=True, by="ada")
    rig.ended(row.id)
    rig.controller.clusters.remove("lab")
    assert [one["name"] for one in rig.controller.clusters.every()] == ["local"]
    with pytest.raises(NotFound):
        rig.submit(cluster="lab")


@pytest.mark.parametrize("name", ["local", "any", "Bad Name", "-x", "a/b", ""])
def test_an_invalid_cluster_name_is_refused(rig: Rig, name: str) -> None:
    with pytest.raises(SpecError):
        rig.controller.clusters.add(name, {}, [])


def test_a_cluster_that_does_not_answer_delays_no_other(rig: Rig) -> None:
    lab = rig.add("lab")
    lab.unavailable = True
    row = rig.submit(cluster="lab")
    assert rig.ended(rig.submit().id).state == "succeeded"
    wait(lambda: not rig.controller.clusters.show("lab")["reachable"])
    rig.restart()
    assert rig.ended(rig.submit().id).state == "succeeded"
    assert rig.ended(row.id).state == "succeeded"


def test_silence_on_a_node_that_is_not_ready_is_replaced_after_lost_after(rig: Rig) -> None:
    lab = rig.add("lab", nodes=2)
    row = rig.submit("hang", "train", cluster="lab", lost_after="1s")
    rig.until(row.id, "running")
    lab.node_ready = False
    lab.silent.add((row.id, 1, "worker-0"))
    done = rig.ended(row.id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 2, 0)
    first = rig.store.attempt(row.id, 1)
    assert first.cause == "lost" and "lost_after" in first.evidence["proof"]


def test_silence_on_a_ready_node_ends_the_task_and_waits_for_the_proof(rig: Rig) -> None:
    lab = rig.add("lab")
    row = rig.submit("hang", "train", cluster="lab", lost_after="500ms")
    rig.until(row.id, "running")
    lab.node_ready = True
    lab.silent.add((row.id, 1, "worker-0"))
    wait(lambda: lab.calls.get("stop", 0))
    assert rig.store.run(row.id).attempt == 1, "not replaced before its end is proven"
    lab.silent.clear()
    assert rig.ended(row.id).attempt == 2


def test_each_incarnation_that_falls_silent_on_a_ready_node_is_ended(rig: Rig) -> None:
    lab = rig.add("lab")
    row = rig.submit("hang", cluster="lab", workers=2, lost_after="300ms")
    rig.until(row.id, "running")
    lab.node_ready = True
    for generation in (2, 3):
        before = lab.calls.get("stop", 0)
        lab.silent.add((row.id, 1, "worker-1"))
        wait(lambda before=before: lab.calls.get("stop", 0) > before)
        lab.silent.clear()
        wait(lambda number=generation: number in {body for _, body in lab.starts(row.id, 1, "worker-1")})
    assert rig.store.attempt(row.id, 1).placement["worker-1"].incarnation == 3


def test_a_server_that_dies_after_it_gave_somebody_up_does_not_wait_for_his_end(rig: Rig) -> None:
    """The lost task may still live, so the next server has the world meet at another address."""
    lab = rig.add("lab")
    row = rig.submit("hang", cluster="lab", workers=2, lost_after="300ms")
    rig.until(row.id, "running")

    def refuse(method: str, _: Any) -> None:
        if method == "submit":
            raise EngineUnavailable("it does not answer")

    lab.before, lab.node_ready = refuse, False
    lab.silent.add((row.id, 1, "worker-1"))
    wait(lambda: rig.store.attempt(row.id, 1).generation == 2)
    rig.restart()
    lab = rig.clouds.made["lab"]
    for task in ("worker-0", "worker-1"):
        wait(lambda task=task: 2 in {body for _, body in lab.starts(row.id, 1, task)})
    placement = rig.store.attempt(row.id, 1).placement
    assert {name: (place.incarnation, place.moved) for name, place in placement.items()} == {
        "worker-0": (1, 1),
        "worker-1": (2, 1),
    }


def test_when_most_fall_silent_together_nothing_is_replaced(rig: Rig) -> None:
    lab = rig.add("lab", nodes=2)
    rows = [rig.submit("hang", cluster="lab", lost_after="300ms", resources={"cpu": 2}) for _ in range(2)]
    for row in rows:
        rig.until(row.id, "running")
    nodes = {rig.store.attempt(row.id, 1).placement["worker-0"].node for row in rows}
    assert len(nodes) == 2
    lab.node_ready = False
    lab.silent |= {(row.id, 1, "worker-0") for row in rows}
    time.sleep(2.0)
    assert [rig.store.run(row.id).attempt for row in rows] == [1, 1]


def test_exclusive_waits_for_its_lease(rig: Rig) -> None:
    lab = rig.add("lab")
    row = rig.submit("hang", "train", cluster="lab", lost_after="200ms", lease="3s", exclusive=True)
    rig.until(row.id, "running")
    lab.node_ready = False
    lab.silent.add((row.id, 1, "worker-0"))
    time.sleep(1.0)
    assert rig.store.run(row.id).attempt == 1
    assert rig.ended(row.id).attempt == 2


def test_why_says_why_a_task_does_not_come_up_and_it_ends_in_time(rig: Rig) -> None:
    lab = rig.add("lab")
    lab.waiting = ("the image cannot be pulled: no such tag", "image", 600.0)
    row = rig.submit(cluster="lab")
    text = wait(lambda: rig.controller.why(row.id)["text"], lambda text: "cannot be pulled" in text)
    assert "as `image`" in text
    lab.waiting = ("the image cannot be pulled: no such tag", "image", 0.5)
    done = rig.ended(row.id)
    assert (done.state, done.cause) == ("failed", "image")
    assert "no such tag" in done.reason
    assert any(event.kind == "waiting" for event in rig.store.events(row.id))


def test_waiting_that_ends_is_forgotten(rig: Rig) -> None:
    lab = rig.add("lab")
    lab.waiting = ("0/2 nodes have room", "engine-error", 600.0)
    row = rig.submit(cluster="lab")
    wait(lambda: rig.controller.why(row.id)["text"], lambda text: "nodes have room" in text)
    lab.waiting = None
    assert rig.ended(row.id).state == "succeeded"


def test_a_task_that_is_not_up_can_be_stopped(rig: Rig) -> None:
    lab = rig.add("lab")
    lab.waiting = ("waits for a node", "", 600.0)
    row = rig.submit(cluster="lab")
    rig.until(row.id, "starting")
    rig.controller.stop_run(row.id, kill=False, by="ada")
    assert rig.ended(row.id).state == "stopped"
    wait(lambda: rig.store.attempt(row.id, 1).removed)


def test_a_failed_run_is_kept_for_inspection_and_holds_its_place(rig: Rig) -> None:
    rig.add("lab", gpus=1)
    row = rig.submit("fail", cluster="lab", keep_on_failure="1h", resources={"gpu": 1})
    assert rig.ended(row.id).state == "failed"
    other = rig.submit(cluster="lab", resources={"gpu": 1})
    rig.restart()
    time.sleep(0.5)
    assert not rig.store.attempt(row.id, 1).removed
    assert rig.store.run(other.id).state == "queued"
    rig.controller.stop_run(row.id, kill=False, by="ada")
    wait(lambda: rig.store.attempt(row.id, 1).removed)
    assert rig.ended(other.id).state == "succeeded"
    assert rig.store.run(row.id).state == "failed"


def test_what_succeeded_is_not_kept(rig: Rig) -> None:
    row = rig.submit(keep_on_failure="1h")
    rig.ended(row.id)
    wait(lambda: rig.store.attempt(row.id, 1).removed)


def test_resizing_in_place_frees_room_for_others(rig: Rig) -> None:
    lab = rig.add("lab")
    row = rig.submit("hang", cluster="lab", resources={"cpu": 2})
    rig.until(row.id, "running")
    other = rig.submit(cluster="lab", resources={"cpu": 1})
    assert rig.store.run(other.id).state == "queued"
    assert rig.controller.resize(row.id, cpu=1.0, memory=None)["how"] == "in place"
    assert rig.ended(other.id).state == "succeeded"
    assert rig.store.run(row.id).job["resources"]["cpu"] == 1.0
    assert lab.calls["resize"] == 1


def test_resizing_by_restart_says_so(rig: Rig) -> None:
    lab = rig.add("lab")
    lab.resize_problem = "the node has no room for it"
    row = rig.submit("hang", "train", cluster="lab")
    rig.until(row.id, "running")
    answer = rig.controller.resize(row.id, cpu=2.0, memory=None)
    assert answer["how"] == "restart" and "no room" in answer["text"]
    done = rig.ended(row.id)
    assert (done.attempt, done.failures) == (2, 0)
    assert rig.store.attempt(row.id, 2).placement["worker-0"].cpu == 2.0


def test_resizing_beyond_every_node_is_refused(rig: Rig) -> None:
    rig.add("lab")
    row = rig.submit("hang", cluster="lab")
    rig.until(row.id, "running")
    with pytest.raises(Refused, match="can never fit"):
        rig.controller.resize(row.id, cpu=64.0, memory=None)


LINK = {"host": os.uname().nodename, "links": {"data": "/mnt/set"}}


@pytest.mark.parametrize(
    ("job", "record", "reason"),
    [
        ({}, {**LINK, "host": "another"}, "the server is on another machine"),
        ({"image": "alpine"}, LINK, "is not in the image"),
        ({"roles": {"ps": {"image": "alpine"}}}, LINK, "is not in the image"),
        ({"cluster": "lab"}, LINK, "is not on the cluster lab"),
        ({"cluster": "any"}, LINK, "is not on the cluster lab"),
    ],
)
def test_a_link_out_of_the_folder_is_refused_where_its_target_is_not(
    rig: Rig, job: dict[str, Any], record: dict[str, Any], reason: str
) -> None:
    rig.add("lab")
    with pytest.raises(Refused, match=f"'data' points to '/mnt/set'.*{reason}") as caught:
        rig.submit(record=record, **job)
    assert "mount" in str(caught.value.hint) and ".stokerignore" in str(caught.value.hint)


def test_a_run_with_a_link_out_of_the_folder_cannot_move_to_a_cluster(rig: Rig) -> None:
    rig.add("lab")
    row = rig.ended(rig.submit(record=LINK).id)
    assert row.state == "succeeded"
    with pytest.raises(Refused, match="'data' points to"):
        rig.controller.resume(row.id, key="again", secrets={}, changes=["cluster=lab"])


def test_a_record_with_paths_that_lead_out_is_refused(rig: Rig) -> None:
    for record in ({"links": {"../x": "/mnt"}}, {"folders": ["../x"]}, {"folders": {"a": 1}}):
        with pytest.raises(SpecError):
            rig.submit(record=record)
