"""Nodes and GPUs with repeated failures are set aside, and come back."""

from __future__ import annotations

import pytest

from stoker.scheduling import Ask, NodeShape, Request
from stoker.scheduling.node_health import Failure, HealthRules, HealthTracker, trusted

GI = 1 << 30
NODES = [NodeShape("a", 8, GI, ("0", "1")), NodeShape("b", 8, GI, ("0", "1")), NodeShape("c", 8, GI)]
HOUR = 3600.0


def lost(node: str, run: str, generation: int, at: float = 0.0) -> Failure:
    return Failure(node, ("0",), "lost", run, str(generation), at)


def fault(node: str, gpus: str, generation: int, at: float = 0.0, run: str = "one") -> Failure:
    return Failure(node, tuple(gpus), "gpu-fault", run, str(generation), at)


def suspicion(*failures: Failure) -> HealthTracker:
    made = HealthTracker()
    for failure in failures:
        made.failed(failure)
        made.failed(failure)
    return made


def names(made: HealthTracker, now: float = 10.0, nodes=NODES, requests=()) -> list[str]:
    return [aside.name for aside in made.aside(now, nodes, requests) if not aside.spared]


def test_three_losses_by_two_runs_set_a_node_aside():
    made = suspicion(lost("a", "one", 1), lost("a", "one", 2, 60))
    assert names(made) == []
    made.failed(lost("a", "two", 1, 120))
    (aside,) = made.aside(130, NODES)
    assert (aside.name, aside.since, aside.until) == ("a", 120, 120 + 6 * HOUR)
    assert aside.reason == "3 times lost within 2 min (one, two)"


def test_one_run_alone_sets_no_node_aside_but_avoids_it():
    made = suspicion(*[lost("a", "one", n) for n in range(9)])
    assert names(made) == []
    assert made.avoid("one", 10) == {"a"}
    assert made.avoid("two", 10) == frozenset()


def test_a_gang_that_loses_many_tasks_at_once_lost_the_node_once():
    made = suspicion(*[Failure("a", (str(n),), "lost", "one", "1", 0) for n in range(8)], lost("a", "two", 1))
    assert names(made) == []
    assert made.avoid("one", 10) == frozenset()


def test_three_faults_of_any_runs_set_a_gpu_aside():
    made = suspicion(fault("a", "01", 1), fault("a", "0", 2), fault("a", "0", 3))
    assert names(made) == ["a#0"]
    shape = trusted(NODES, made.aside(10, NODES))[0]
    assert (shape.gpus, shape.ready) == (("1",), True)
    assert made.avoid("one", 10) == {"a#0"}


def test_faults_of_the_run_itself_do_not_count():
    made = suspicion(*[Failure("a", ("0",), "user-error", run, "1", 0) for run in "abcdef"])
    assert made.failures == ()


def test_failures_far_apart_are_chance():
    assert names(suspicion(*[lost("a", f"run-{n}", 1, n * HOUR) for n in range(4)]), 4 * HOUR) == []


def test_old_failures_do_not_count():
    made = suspicion(*[lost("a", f"run-{n}", 1) for n in range(3)])
    assert names(made, 6 * HOUR - 1) == ["a"]
    assert names(made, 6 * HOUR) == []
    assert made.failures == ()


def test_success_clears_the_node_and_the_gpus_it_used():
    made = suspicion(
        *[lost("a", f"run-{n}", 1) for n in range(3)],
        *[fault("a", "0", n) for n in range(3)],
        *[fault("a", "1", n, run="other") for n in range(3)],
        *[fault("b", "0", n, run="third") for n in range(3)],
    )
    assert names(made, nodes=[*NODES, NodeShape("d", 8, GI, ("0", "1"))]) == ["a", "a#0", "a#1", "b#0"]
    made.went_well("a", ["0"])
    assert names(made, nodes=[*NODES, NodeShape("d", 8, GI, ("0", "1"))]) == ["a#1", "b#0"]


def test_the_last_node_that_fits_is_kept():
    made = suspicion(*[lost("c", f"run-{n}", 1) for n in range(3)])
    wide = Request("wide", 0, 1, (Ask(cpu=8),) * 3)
    assert names(made) == ["c"]
    assert names(made, requests=[wide]) == []
    (aside,) = made.aside(10, NODES, [wide])
    assert aside.spared
    assert trusted(NODES, [aside]) == NODES
    never = Request("never", 0, 1, (Ask(cpu=99),))
    assert names(made, requests=[never]) == ["c"]


def test_a_machine_that_is_alone_is_never_set_aside():
    only = [NodeShape("local", 8, GI, ("0", "1"))]
    made = suspicion(
        *[lost("local", f"run-{n}", 1) for n in range(3)], *[fault("local", "0", n) for n in range(3)]
    )
    assert names(made, nodes=only) == []
    assert {aside.name for aside in made.aside(10, only)} == {"local", "local#0"}


def test_of_all_nodes_that_fail_one_is_left():
    made = suspicion(*[lost(node, f"run-{n}", 1) for node in "abc" for n in range(3)])
    assert len(names(made)) < 3
    assert any(node.ready for node in trusted(NODES, made.aside(10, NODES)))


def test_removed_nodes_are_not_mentioned():
    made = suspicion(*[lost("gone", f"run-{n}", 1) for n in range(3)])
    assert made.aside(10, NODES) == ()


def test_a_restored_instance_continues():
    made = suspicion(*[lost("a", f"run-{n}", 1) for n in range(3)])
    assert HealthTracker(failures=made.failures).aside(10, NODES) == made.aside(10, NODES)


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_the_rules_can_be_set(failures):
    made = HealthTracker(HealthRules(failures=failures, runs=1))
    for n in range(failures):
        assert names(made) == []
        made.failed(lost("a", "one", n))
    assert names(made) == ["a"]
