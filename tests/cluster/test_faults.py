"""Faults of a real cluster, each with the state that must come of it.

The training here writes down, in its log, each step it does and a word of its own for each process. So what was done
twice, what was lost, and who was fenced can be read from what the user is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from box import wait
from boxes import ClusterBox
from harness import Cluster

pytestmark = pytest.mark.timeout(900)

TRAIN = """
import json, os, sys, time, uuid
who = uuid.uuid4().hex[:8]
last = int(sys.argv[1])
start = 0
if os.environ.get("STOKER_RESUME_FROM"):
    start = json.load(open(os.environ["STOKER_RESUME_FROM"]))["step"] + 1
print("begin", who, start, flush=True)
for step in range(start, last):
    path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "last.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step, "who": who}, file)
    os.replace(path + ".tmp", path)
    print("step", who, step, flush=True)
    time.sleep(0.25)
with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], "model.json"), "w") as file:
    json.dump({"step": last, "who": who}, file)
print("end", who, flush=True)
"""


@pytest.fixture
def box(tmp_path: Path, cluster: Any, namespace: str) -> Iterator[ClusterBox]:
    if not isinstance(cluster, Cluster):
        pytest.skip("breaks parts of the cluster, which only the test's own cluster is for")
    made = ClusterBox(tmp_path, cluster, namespace)
    made.write("train.py", TRAIN)
    yield made
    for name in cluster.nodes:
        if "True" not in _ready(cluster, name):
            cluster.restore_node(name)
    made.close()


def _ready(cluster: Cluster, node: str) -> str:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    return cluster.kubectl("get", "node", node, "-o", f"jsonpath={path}")


def train(box: ClusterBox, steps: int, *flags: str) -> str:
    run = box.there(
        "--cpu", "0.1", "--memory", "128Mi", "--grace", "2s", *flags, "--", "python3", "train.py", str(steps)
    )
    box.until(run, "running", limit=180)
    wait(lambda: len(said(box, run, "step")) >= 3)
    return run


def said(box: ClusterBox, run: str, word: str) -> list[list[str]]:
    """The lines that begin with this word, without it."""
    lines = [line.split() for line in box("logs", run).stdout.splitlines()]
    return [parts[1:] for parts in lines if parts and parts[0] == word]


def steps(box: ClusterBox, run: str) -> list[int]:
    return [int(step) for _, step in said(box, run, "step")]


def whole(box: ClusterBox, run: str, last: int) -> None:
    """Every step was done, in order; one process after another, none of them beside another."""
    done = steps(box, run)
    assert sorted(set(done)) == list(range(last)), "every step was done"
    order = [who for who, _ in said(box, run, "step")]
    turns = [who for at, who in enumerate(order) if at == 0 or order[at - 1] != who]
    assert len(turns) == len(set(turns)), "nobody came back after another had taken over"


def undisturbed(box: ClusterBox, run: str, last: int) -> None:
    shown = box.ended(run, limit=300)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 1)
    assert steps(box, run) == list(range(last)), "every line arrived once, in order"
    assert len(said(box, run, "begin")) == 1


def node_of(box: ClusterBox, run: str) -> str:
    return str(box.pods(run)[0]["spec"]["nodeName"])


def test_the_api_server_is_away_for_a_minute(box: ClusterBox) -> None:
    """Training goes on, nothing counts as lost, all lines arrive."""
    run = train(box, 330)
    box.cluster.stop_api()
    away = time.monotonic()
    try:
        wait(lambda: not _lab(box)["reachable"])
        assert box.show(run)["state"] == "running", "silence is never read as: all pods are gone"
        local = box.submit("--", "python3", "-c", "print('here')")
        assert box.ended(local)["state"] == "succeeded", "this machine is not held up"
        time.sleep(max(0.0, 60.0 - (time.monotonic() - away)))
        assert box.show(run)["state"] == "running"
    finally:
        box.cluster.start_api()
    undisturbed(box, run, 330)


def _lab(box: ClusterBox) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in box.json("cluster", "ls") if one["name"] == "lab")
    return found


def test_an_api_server_that_takes_connections_and_never_answers(box: ClusterBox) -> None:
    run = train(box, 160)
    box.cluster.stop_api(freeze=True)
    try:
        wait(lambda: not _lab(box)["reachable"], limit=120)
    finally:
        box.cluster.start_api()
    undisturbed(box, run, 160)


def test_the_past_is_compacted_away(box: ClusterBox) -> None:
    """Watches are told 410 Gone: the list is read anew, and nothing is missed."""
    run = train(box, 100)
    box.cluster.compact()
    undisturbed(box, run, 100)


def test_a_node_is_lost_with_everything_on_it(box: ClusterBox) -> None:
    run = train(box, 120, "--lost-after", "15s")
    first = node_of(box, run)
    box.cluster.lose_node(first)
    shown = wait(lambda: box.show(run), lambda seen: len(seen["attempts"]) >= 2, limit=240)
    assert shown["attempts"][0]["cause"] == "lost"
    assert first in str(shown["attempts"][0]["evidence"])
    shown = box.ended(run, limit=300)
    assert shown["state"] == "succeeded"
    assert shown["attempts"][1]["node"] != f"lab/{first}"
    assert int(said(box, run, "begin")[1][1]) > 0, "it went on from its checkpoint"
    whole(box, run, 120)
    box.cluster.restore_node(first)
    wait(lambda: not box.pods(run), limit=180)


def test_a_node_whose_agents_are_gone_while_the_training_lives(box: ClusterBox) -> None:
    """Nothing is started twice before lost_after; then the old one is fenced: what it still does counts for nothing."""
    run = train(box, 200, "--lost-after", "30s")
    first = node_of(box, run)
    box.cluster.orphan_node(first)
    cut = time.monotonic()
    shown = wait(lambda: box.show(run), lambda seen: len(seen["attempts"]) >= 2, limit=240)
    assert time.monotonic() - cut >= 30, "not before the rules allow it"
    assert shown["attempts"][0]["cause"] == "lost"
    shown = box.ended(run, limit=300)
    assert shown["state"] == "succeeded"
    whole(box, run, 200)
    who = {word for word, _ in said(box, run, "begin")}
    assert len(who) == 2
    box("pull", run, "-o", "out")
    found = next((box.work / "out").rglob("model.json")).read_text()
    assert said(box, run, "end")[0][0] in found, "the outputs are those of the new one"
    box.cluster.restore_node(first)
    wait(lambda: not box.pods(run), limit=180)


def test_a_pod_is_deleted_by_hand(box: ClusterBox) -> None:
    run = train(box, 60)
    box.kubectl("delete", "pod", box.pods(run)[0]["metadata"]["name"], "--wait=false")
    shown = box.ended(run, limit=300)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 2)
    assert shown["attempts"][0]["cause"] in ("lost", "evicted", "preempted")
    assert shown["failures"] == 0 if "failures" in shown else True
    whole(box, run, 60)


def test_the_secret_is_deleted_by_hand(box: ClusterBox) -> None:
    """The pod goes with it: the run goes on elsewhere, at no cost to the user."""
    run = train(box, 60)
    box.kubectl("delete", "secret", f"stoker-{run}-1")
    shown = box.ended(run, limit=300)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 2)
    whole(box, run, 60)


def test_a_cut_shorter_than_lost_after_is_nothing(box: ClusterBox) -> None:
    run = train(box, 320, "--lost-after", "10m")
    address = box.pods(run)[0]["status"]["podIP"]
    box.cluster.cut(address)
    time.sleep(60)
    assert len(box.show(run)["attempts"]) == 1
    box.cluster.heal(address)
    undisturbed(box, run, 320)


def test_a_cut_longer_than_lost_after_ends_the_pod_first(box: ClusterBox) -> None:
    """The node is ready, so the pod is deleted and its end awaited: never two at once."""
    run = train(box, 150, "--lost-after", "20s")
    address = box.pods(run)[0]["status"]["podIP"]
    box.cluster.cut(address)
    try:
        shown = wait(lambda: box.show(run), lambda seen: len(seen["attempts"]) >= 2, limit=240)
    finally:
        box.cluster.heal(address)
    assert shown["attempts"][0]["cause"] == "lost"
    assert box.ended(run, limit=300)["state"] == "succeeded"
    whole(box, run, 150)


def test_a_frozen_container_that_wakes_up(box: ClusterBox) -> None:
    """A task that stands still is not a task that is gone: with its courier answering it is left alone."""
    run = train(box, 120, "--lost-after", "10s")
    pod = box.pods(run)[0]["metadata"]["name"]
    box.cluster.freeze(pod, "main", box.namespace)
    before = steps(box, run)
    time.sleep(20)
    assert len(steps(box, run)) <= len(before) + 1
    assert box.show(run)["state"] == "running"
    box.cluster.thaw(pod, "main", box.namespace)
    undisturbed(box, run, 120)


def test_the_server_is_killed_while_it_runs(box: ClusterBox) -> None:
    run = train(box, 100)
    for _ in range(3):
        box.kill_server()
        time.sleep(2)
        box("ps")
    undisturbed(box, run, 100)
