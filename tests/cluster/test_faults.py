"""Faults of nodes and pods, and the resulting states."""

from __future__ import annotations

import time

import pytest
from boxes import ClusterBox
from faulting import box, node_of, said, train, undisturbed, whole

from support.waiting import wait

__all__ = ["box"]

pytestmark = pytest.mark.timeout(900)


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
    """Nothing is started twice before lost_after; then the old task is fenced."""
    run = train(box, 280, "--lost-after", "30s")
    first = node_of(box, run)
    box.cluster.orphan_node(first)
    cut = time.monotonic()
    shown = wait(lambda: box.show(run), lambda seen: len(seen["attempts"]) >= 2, limit=240)
    assert time.monotonic() - cut >= 30, "not before the rules allow it"
    assert shown["attempts"][0]["cause"] == "lost"
    shown = box.ended(run, limit=300)
    assert shown["state"] == "succeeded"
    whole(box, run, 280)
    processes = {word for word, _ in said(box, run, "begin")}
    assert len(processes) == 2
    box("pull", run, "-o", "out")
    found = next((box.work / "out").rglob("model.json")).read_text()
    assert said(box, run, "end")[0][0] in found, "the outputs are those of the new task"
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
    """The pod is deleted with it; the run continues elsewhere and no retry is spent."""
    run = train(box, 60)
    box.kubectl("delete", "secret", f"stoker-{run}-1")
    shown = box.ended(run, limit=300)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 2)
    whole(box, run, 60)


def test_a_cut_longer_than_lost_after_ends_the_pod_first(box: ClusterBox) -> None:
    """The node is ready, so the pod is deleted first: two bodies never run at once."""
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


def test_the_server_is_killed_while_it_runs(box: ClusterBox) -> None:
    run = train(box, 100)
    for _ in range(3):
        box.kill_server()
        time.sleep(2)
        box("ps")
    undisturbed(box, run, 100)
