"""The scheduler by example: where runs start, which runs may overtake, and the explanations for users."""

from __future__ import annotations

import pytest

from stoker.errors import NotFound, SpecError
from stoker.scheduling import Ask, NodeShape, Place, Request, Scheduler, Start
from stoker.scheduling import scheduler as machine
from support.scheduling import scheduler

GI = 1 << 30


def ask(made: Scheduler, id: str, *asks: Ask, priority: int = 0) -> list[str]:
    """Enqueue and decide; the runs that started."""
    ask.seq += 1
    made.enqueue(Request(id, priority, ask.seq, asks))
    return [start.id for start in made.decide()]


ask.seq = 0


def test_ten_tenths_fill_one_cpu():
    made = scheduler(NodeShape("local", 1, GI))
    assert all(ask(made, f"tenth-{n}", Ask(cpu=0.1)) for n in range(10))
    assert ask(made, "one-more", Ask(cpu=0.1)) == []
    assert made.explain("one-more").short[0].short == 0.1


def test_priority_then_order_of_submission():
    made = scheduler(NodeShape("local", 1, GI))
    ask(made, "running", Ask(cpu=1))
    for id, priority in [("first", 0), ("second", 0), ("urgent", 5), ("idle", -5)]:
        ask(made, id, Ask(cpu=1), priority=priority)
    started = []
    for _ in range(4):
        made.release(made.snapshot().held[0].request.id)
        started += [start.id for start in made.decide()]
    assert started == ["urgent", "first", "second", "idle"]


def test_a_gang_starts_whole_or_not_at_all():
    made = scheduler(NodeShape("a", 1, GI), NodeShape("b", 1, GI))
    ask(made, "one", Ask(cpu=1))
    assert ask(made, "pair", Ask(cpu=1), Ask(cpu=1)) == []
    made.release("one")
    assert made.decide() == [Start("pair", (Place("a"), Place("b")))]


def test_unequal_tasks_are_packed_also_where_greedy_placement_fails():
    """Greedy puts the 3 into b, and then 2 + 2 + 2 does not fit a."""
    made = scheduler(NodeShape("a", 5, GI), NodeShape("b", 4, GI))
    assert ask(made, "gang", Ask(cpu=3), Ask(cpu=2), Ask(cpu=2), Ask(cpu=2)) == ["gang"]


def test_gpus_are_packed_and_the_lowest_ids_go_first():
    made = scheduler(
        NodeShape("big", 8, GI, ("0", "1", "2", "10")),
        NodeShape("small", 8, GI, ("5", "4")),
        NodeShape("plain", 8, GI),
    )
    made.enqueue(Request("one", 0, 1, (Ask(gpu=1),)))
    made.enqueue(Request("three", 0, 2, (Ask(gpu=3),)))
    made.enqueue(Request("cpu", 0, 3, (Ask(cpu=8),)))
    assert [start.places[0] for start in made.decide()] == [
        Place("small", ("4",)),
        Place("big", ("0", "1", "2")),
        Place("plain"),
    ]


def test_a_gang_stays_on_one_node_where_it_can():
    made = scheduler(NodeShape("four", 8, GI, tuple("0123")), NodeShape("one", 8, GI, ("0",)))
    made.enqueue(Request("gang", 0, 1, (Ask(gpu=1),) * 3))
    assert {place.node for place in made.decide()[0].places} == {"four"}


def test_a_run_that_needs_no_scarce_resource_may_overtake():
    made = scheduler(NodeShape("local", 8, GI, ("0",)))
    ask(made, "trains", Ask(cpu=1, gpu=1))
    ask(made, "waits", Ask(cpu=3, gpu=1))
    assert ask(made, "small", Ask(cpu=4)) == ["small"]
    assert ask(made, "takes-what-is-kept", Ask(cpu=1)) == []
    assert made.explain("takes-what-is-kept").behind == "waits"
    made.release("trains")
    assert [start.id for start in made.decide()] == ["waits", "takes-what-is-kept"]


def test_withdrawing_the_head_frees_its_reservation():
    made = scheduler(NodeShape("local", 4, GI))
    ask(made, "runs", Ask(cpu=3))
    ask(made, "head", Ask(cpu=2))
    assert ask(made, "small", Ask(cpu=1)) == []
    made.withdraw("head")
    assert [start.id for start in made.decide()] == ["small"]


def test_a_run_that_can_never_start_reserves_nothing():
    made = scheduler(NodeShape("local", 4, GI))
    assert ask(made, "huge", Ask(cpu=64)) == []
    assert ask(made, "small", Ask(cpu=4)) == ["small"]
    assert made.explain("huge").state == "impossible"
    assert made.explain("huge").reason == "asks for 64 CPUs; the largest node has 4"


def test_a_node_that_is_not_ready_takes_nothing_new_and_loses_nothing():
    made = scheduler(NodeShape("local", 2, GI))
    ask(made, "runs", Ask(cpu=1))
    made.set_nodes([NodeShape("local", 2, GI, ready=False)])
    assert ask(made, "waits", Ask(cpu=1)) == []
    assert "not ready: local" in made.explain("waits").reason
    made.set_nodes([NodeShape("local", 2, GI)])
    assert [start.id for start in made.decide()] == ["waits"]


def test_a_gpu_that_vanishes_while_held_is_not_handed_out_when_it_returns():
    made = scheduler(NodeShape("local", 4, GI, ("0", "1")))
    ask(made, "owner", Ask(gpu=1))
    made.set_nodes([NodeShape("local", 4, GI, ("1",))])
    assert ask(made, "other", Ask(gpu=1)) == ["other"]
    made.set_nodes([NodeShape("local", 4, GI, ("0", "1"))])
    assert ask(made, "third", Ask(gpu=1)) == []
    made.release("owner")
    assert made.decide() == [Start("third", (Place("local", ("0",)),))]


def test_an_overcommitted_node_recovers_as_runs_end():
    made = scheduler(NodeShape("local", 1, GI))
    for n in range(3):
        made.adopt(Request(f"old-{n}", 0, n, (Ask(cpu=1),)), [Place("local")])
    assert ask(made, "new", Ask(cpu=1)) == []
    for n, started in enumerate([[], [], ["new"]]):
        made.release(f"old-{n}")
        assert [start.id for start in made.decide()] == started


@pytest.mark.parametrize(
    ("asks", "reason"),
    [
        ([Ask(gpu=4)], "asks for 4 GPUs; the largest node has 2"),
        ([Ask(cpu=8.5)], "asks for 8.5 CPUs; the largest node has 8"),
        ([Ask(memory=20 * GI)], "asks for 20 GiB of memory; the largest node has 16 GiB"),
        ([Ask(cpu=8, gpu=2)], "asks for 8 CPUs and 2 GPUs on one node; no node has all of it"),
        ([Ask(gpu=1)] * 3, "asks for 3 tasks of 1 GPU at once; all nodes together hold 2"),
    ],
)
def test_a_run_that_never_fits_has_a_reason(asks, reason):
    made = scheduler(NodeShape("cpu", 8, 16 * GI), NodeShape("gpu", 4, 8 * GI, ("0", "1"), ready=False))
    assert made.can_ever_fit(asks).reason == reason
    assert made.can_ever_fit([Ask(cpu=4, gpu=2)]).ok


def test_explaining_names_the_place_the_shortage_and_the_holders():
    made = scheduler(NodeShape("local", 8, GI, ("0", "1")))
    ask(made, "digits", Ask(gpu=2))
    ask(made, "first", Ask(gpu=1))
    ask(made, "second", Ask(gpu=2))
    why = made.explain("second")
    assert (why.position, why.queued, why.behind) == (2, 2, "first")
    assert why.reason == "short of 2 GPUs on local, held by digits; first comes first"
    assert made.explain("digits").state == "held"
    with pytest.raises(NotFound):
        made.explain("unknown")


def test_ten_thousand_waiting_runs_cost_one_attempt(monkeypatch):
    made = scheduler(NodeShape("local", 2, GI))
    for n in range(10_000):
        made.enqueue(Request(f"run-{n}", 0, n, (Ask(cpu=1),)))
    assert [start.id for start in made.decide()] == ["run-0", "run-1"]
    looks = []
    place = machine.place_in_one
    monkeypatch.setattr(machine, "place_in_one", lambda *args: looks.append(1) or place(*args))
    made.enqueue(Request("late", 0, 10_000, (Ask(cpu=1),)))
    assert made.decide() == []
    assert len(looks) <= 1
    made.release("run-0")
    assert [start.id for start in made.decide()] == ["run-2"]
    assert len(looks) <= 3
    assert made.explain("late").position == 9_998


@pytest.mark.parametrize("wrong", [{"cpu": -1}, {"cpu": float("nan")}, {"memory": -5}, {"cpu": float("inf")}])
def test_absurd_asks_are_refused(wrong):
    with pytest.raises(SpecError):
        Ask(**wrong)
