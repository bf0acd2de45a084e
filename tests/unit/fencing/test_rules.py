"""The fencing rules by example."""

from __future__ import annotations

import pytest

from stoker.task import fencing
from stoker.task.fencing import END, KEEP, REPLACE, TaskSight, Vigil
from stoker.task.formats import Order

JOURNAL = [
    {"k": "starting", "seq": 3, "generation": 2, "at": 9e9},
    {"k": "checkpoint", "number": 1, "generation": 2},
    {"k": "ended", "seq": 5, "generation": 2, "kind": "stopped"},
]


@pytest.mark.parametrize(
    ("seq", "generation", "verb", "starts"),
    [
        (6, 3, "run", True),
        (6, 3, "stop", False),
        (6, 2, "run", False),  # the same generation under a new number
        (5, 3, "run", False),  # already executed
        (4, 3, "run", False),  # late: a newer order was executed
    ],
)
def test_what_may_start(seq, generation, verb, starts):
    assert fencing.may_start(JOURNAL, Order(seq, generation, verb)) is starts


def test_the_first_order_starts():
    assert fencing.may_start([], Order(1, 1, "run"))


def test_only_the_newest_generation_of_a_live_attempt_counts():
    assert fencing.accept(2, 2, ended=False)
    assert not fencing.accept(1, 2, ended=False)
    assert not fencing.accept(3, 2, ended=False)
    assert not fencing.accept(2, 2, ended=True)


def watch(sights, seconds=200.0, every=2.0, vigil=None):
    """Show the same sights for a while; the decisions at the end."""
    vigil = vigil or Vigil()
    now, decided = 1000.0, {}
    for _ in range(int(seconds / every) + 1):
        decided = vigil.look(now, sights)
        now += every
    return decided


def others(count=5):
    return [TaskSight(f"fine-{n}", "alive", f"node-{n}", True) for n in range(count)]


def test_proof_of_death_replaces_at_once():
    assert Vigil().look(0.0, [TaskSight("t", "gone", "n")]) == {"t": REPLACE}


def test_silence_counts_only_on_a_node_the_engine_calls_not_ready():
    for ready, decision in [(False, REPLACE), (True, END), (None, KEEP)]:
        assert watch([TaskSight("t", "silent", "n", ready), *others()])["t"] == decision


def test_silence_shorter_than_lost_after_does_not_count():
    assert watch([TaskSight("t", "silent", "n", False), *others()], seconds=118)["t"] == KEEP


def test_time_in_which_the_engine_did_not_answer_does_not_count():
    vigil, sights = Vigil(), [TaskSight("t", "silent", "n", False), *others()]
    for now in range(0, 2000, 10):
        decided = vigil.look(float(now), sights if now % 20 else None)
        assert decided.get("t", KEEP) == KEEP


def test_one_long_pause_of_our_own_is_not_silence():
    vigil, sights = Vigil(), [TaskSight("t", "silent", "n", False), *others()]
    vigil.look(0.0, sights)
    assert vigil.look(3600.0, sights)["t"] == KEEP


def test_a_task_seen_again_restarts_its_time():
    vigil = Vigil()
    watch([TaskSight("t", "silent", "n", False), *others()], seconds=110, vigil=vigil)
    watch([TaskSight("t", "alive", "n", True), *others()], seconds=2, vigil=vigil)
    assert watch([TaskSight("t", "silent", "n", False), *others()], seconds=100, vigil=vigil)["t"] == KEEP


def test_silence_of_most_tasks_is_a_fault_of_our_own():
    sights = [TaskSight(f"t{n}", "silent", f"n{n}", False) for n in range(3)]
    assert set(watch([*sights, *others(2)]).values()) == {KEEP}
    assert watch([*sights, *others(3)])["t0"] == REPLACE


def test_the_loss_of_one_node_is_not_a_fault_of_our_own():
    assert set(watch([TaskSight(f"t{n}", "silent", "n", False) for n in range(3)]).values()) == {REPLACE}


def test_exclusive_waits_for_the_lease():
    patient = [TaskSight("t", "silent", "n", False, lease=600.0, exclusive=True), *others()]
    assert watch(patient, seconds=640)["t"] == KEEP
    assert watch(patient, seconds=670)["t"] == REPLACE
    forever = [TaskSight("t", "silent", "n", False, lease=None, exclusive=True), *others()]
    assert watch(forever, seconds=5000)["t"] == KEEP
