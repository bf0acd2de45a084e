"""Runs of several tasks in real pods, over pod addresses: killed, deleted, drilled, restarted."""

from __future__ import annotations

import random
import time

import pytest
from bodies import hurry
from boxes import ClusterBox
from faulting import box
from rooms import clear, fill

from support.box import ENDED
from support.gangs import begin, check, checkpointed, generation, sizes, starts, trains
from support.seeds import seeds
from support.waiting import wait

__all__ = ["box"]

pytestmark = pytest.mark.timeout(900)

SMALL = ("--cluster", "lab", "--cpu", "0.1", "--memory", "128Mi", "--grace", "2s")


def world(box: ClusterBox, *flags: str, steps: int = 120, pause: float = 0.1) -> str:
    run = begin(box, *SMALL, *flags, steps=steps, pause=pause)
    box.until(run, "running", limit=180)
    return run


def test_pods_train_as_one_over_their_own_addresses(box: ClusterBox) -> None:
    run = world(box, "--workers", "3", steps=80)
    addresses = {pod["status"]["podIP"] for pod in box.pods(run)}
    assert len(addresses) == 3
    check(box, run, 3, steps=80)


@pytest.mark.parametrize("how", ["process", "launcher", "pod"])
def test_a_lost_member_is_replaced_and_the_others_keep_their_pods(box: ClusterBox, how: str) -> None:
    run = world(box, "--workers", "2", "--retries", "2")
    checkpointed(box, run)
    before = box.uids(run)
    box.lose(run, how, "worker-1")
    wait(lambda: generation(box, run), lambda number: number == 2, limit=240)
    old = "" if how == "process" else before["worker-1"]
    wait(lambda: box.uids(run).get("worker-1") not in (None, old), limit=240)
    after = box.uids(run)
    assert after["worker-0"] == before["worker-0"]
    assert (after["worker-1"] == before["worker-1"]) == (how == "process")
    seen = check(box, run, 2, steps=120)
    assert len(seen["attempts"]) == 1
    assert any(body["step"] > 0 for body in starts(box, run)), "it went on from its checkpoint"


def test_a_restarted_server_adopts_the_world(box: ClusterBox) -> None:
    run = world(box, "--workers", "2", steps=240)
    checkpointed(box, run)
    before = box.uids(run)
    box.kill_server()
    time.sleep(1)
    box("ps")
    assert box.uids(run) == before
    check(box, run, 2, steps=240)
    assert generation(box, run) == 1


def test_an_elastic_run_grows_and_shrinks_and_keeps_its_pods(box: ClusterBox) -> None:
    one, two = box.cluster.nodes
    fill(box, one, leave=2)
    fill(box, two, leave=0)
    run = world(box, "--workers", "2..3", steps=2000, pause=0.5)
    trains(box, run, 1, 2)
    first = box.uids(run)
    assert sorted(first) == ["worker-0", "worker-1"]
    clear(box, two)
    trains(box, run, 2, 3)
    grown = box.uids(run)
    assert first.items() < grown.items(), "present members keep their pods"
    box("scale", run, "2")
    trains(box, run, 3, 2)
    fewer = wait(lambda: box.uids(run), lambda seen: len(seen) == 2, limit=180)
    assert fewer.items() < grown.items()
    box("scale", run, "3")
    trains(box, run, 4, 3)
    more = box.uids(run)
    assert fewer.items() < more.items() and len(more) == 3
    assert set(more.values()) - set(grown.values()), "the member that left is not reused"
    hurry(run)
    seen = check(box, run, 3, steps=2000)
    assert sizes(box, run) == {1: 2, 2: 3, 3: 2, 4: 3}
    assert (len(seen["attempts"]), seen["attempts"][0]["generation"]) == (1, 4)


@pytest.mark.parametrize("seed", seeds(1, 2, most=5))
def test_chaos(box: ClusterBox, seed: int) -> None:
    """Any member is lost at any time in any way; the final value is that of an undisturbed training."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    run = world(box, "--workers", "3", "--retries", "20", steps=2000)
    checkpointed(box, run)
    hurt = 0
    for _ in range(2):
        time.sleep(chance.uniform(0.0, 3.0))
        how, task = chance.choice(["process", "launcher", "pod"]), f"worker-{chance.randrange(3)}"
        try:
            box.lose(run, how, task)
            hurt += 1
        except Exception as exc:  # the task may be starting again; this is part of the test
            print(how, task, exc)
    assert hurt, "no member was hurt"
    wait(lambda: box.show(run)["attempts"], lambda tries: len(tries) > 1 or tries[-1]["generation"] > 1)

    def look() -> str:
        hurry(run)
        time.sleep(0.5)
        return str(box.show(run)["state"])

    wait(look, lambda state: state in ENDED, limit=300)
    check(box, run, 3, steps=2000)
