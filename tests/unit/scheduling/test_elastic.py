"""Gangs with extra tasks, gangs that lose a task, and gangs that give tasks back."""

from __future__ import annotations

import pytest

from stoker.errors import Conflict
from stoker.scheduling import Ask, Grow, NodeShape, Place, Request, Scheduler, Start
from stoker.scheduling.model import gpu_name
from support.scheduling import scheduler

GI = 1 << 30
ONE = Ask(cpu=1)
GPU = Ask(gpu=1)


def node(name: str, cpu: float = 4, gpus: int = 0, domain: str = "", ready: bool = True) -> NodeShape:
    return NodeShape(name, cpu, GI, tuple(str(n) for n in range(gpus)), ready, domain=domain)


def gang(id: str, least: int, most: int, ask: Ask = ONE, **more) -> Request:
    gang.seq += 1
    return Request(
        id, more.pop("priority", 0), gang.seq, (ask,) * least, extra=(ask,) * (most - least), **more
    )


gang.seq = 0


def start(made: Scheduler, *requests: Request) -> dict[str, int]:
    """The gangs that start, with their numbers of tasks."""
    for request in requests:
        made.enqueue(request)
    return {begun.id: len(begun.places) for begun in made.decide()}


def held(made: Scheduler, id: str) -> dict[int, Place]:
    (found,) = [held for held in made.snapshot().held if held.request.id == id]
    return dict(zip(found.indexes, found.places, strict=True))


# -- a start with extras -----------------------------------------------------------------------------------------


EAST_AND_WEST = [node("e", 2, domain="east"), node("w", 8, domain="west")]
STARTS = {
    "it starts with all that is free": ([node("a", 4)], [gang("elastic", 2, 8)], {"elastic": 4}),
    "one that can start comes before the extras of another":
        ([node("a", 4)], [gang("rich", 2, 8, priority=5), gang("plain", 1, 1)], {"rich": 3, "plain": 1}),
    "two that start together share what is left":
        ([node("a", 8)], [gang("one", 1, 8), gang("two", 1, 8)], {"one": 4, "two": 4}),
    "the higher priority takes its extras first":
        ([node("a", 8)], [gang("one", 1, 4), gang("two", 1, 8, priority=1)], {"two": 7, "one": 1}),
    "extras stay in the cluster of the others":
        (EAST_AND_WEST, [gang("elastic", 2, 8, domains=("east", "west"))], {"elastic": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "gangs", "started"), STARTS.values(), ids=STARTS.keys())
def test_starts_with_extras(nodes, gangs, started):
    assert start(scheduler(*nodes), *gangs) == started


def test_it_does_not_start_below_what_it_needs():
    made = scheduler(node("a", 4))
    start(made, gang("other", 3, 3))
    assert start(made, gang("elastic", 2, 8)) == {}
    made.release("other")
    assert start(made) == {"elastic": 4}


def test_extras_leave_what_is_reserved_for_a_waiting_run():
    """It waits for a GPU and four CPUs, which stay free although no GPU is."""
    made = scheduler(node("a", 8, gpus=1))
    start(made, gang("trains", 1, 1, GPU))
    assert start(made, gang("waits", 1, 1, Ask(cpu=4, gpu=1)), gang("elastic", 1, 8)) == {"elastic": 4}


def test_extras_end_at_the_first_that_does_not_fit():
    made = scheduler(node("a", 4, gpus=2))
    made.enqueue(Request("mixed", 0, 1, (ONE,), extra=(GPU, GPU, GPU, ONE)))
    assert made.decide() == [
        Start("mixed", (Place("a"), Place("a", ("0",)), Place("a", ("1",)))),
    ]


def test_size_limits_it_until_it_is_changed():
    made = scheduler(node("a", 8))
    made.enqueue(gang("elastic", 2, 8))
    made.resize_gang("elastic", 3)
    assert start(made) == {"elastic": 3}
    with pytest.raises(Conflict, match="may have 2 to 8 tasks, not 9"):
        made.resize_gang("elastic", 9)
    made.resize_gang("unknown", 9)


# -- giving back -------------------------------------------------------------------------------------------------


def test_returned_tasks_make_room_and_the_rest_keep_their_numbers():
    made = scheduler(node("a", 4, gpus=4))
    start(made, gang("elastic", 2, 4, GPU))
    made.release_part("elastic", [1])
    assert start(made, gang("other", 1, 1, GPU)) == {"other": 1}
    assert held(made, "elastic") == {n: Place("a", (str(n),)) for n in (0, 2, 3)}
    assert held(made, "other") == {0: Place("a", ("1",))}
    made.release_part("elastic", [1])
    made.release_part("unknown", [1])


def test_a_gang_that_gave_back_all_its_tasks_can_grow_again():
    made = scheduler(node("e", 1, domain="east", ready=False), node("w", 1, domain="west"))
    made.adopt(gang("one", 1, 2), [Place("e")])
    made.release_part("one", [0])
    made = Scheduler.from_snapshot(made.snapshot())
    made.may_grow("one")
    assert made.adjust() == []
    made.set_nodes([node("w", 1, domain="west"), node("e2", 1, domain="east")])
    assert [grown.places for grown in made.adjust()] == [(Place("e2"),)]


def test_a_restart_keeps_the_existing_tasks():
    made = scheduler(node("a", 8))
    request = gang("elastic", 2, 8)
    made.adopt(request, [Place("a"), Place("a")], [5, 1])
    assert sorted(held(made, "elastic")) == [1, 5]
    assert Scheduler.from_snapshot(made.snapshot()).snapshot() == made.snapshot()
    for wrong in ([1, 1], [1, 8], [1]):
        with pytest.raises(Conflict):
            made.adopt(request, [Place("a"), Place("a")], wrong)
    with pytest.raises(Conflict):
        made.adopt(request, [Place("a")])


def test_after_a_restart_no_gang_is_asked_again_for_the_same_tasks():
    made = scheduler(node("a", 4))
    made.adopt(gang("elastic", 1, 4), [Place("a")] * 4, [0, 1, 2, 3], leaving=[2, 9])
    assert start(made, gang("waits", 1, 1)) == {}
    assert made.adjust() == []
    assert start(made, gang("next", 1, 1)) == {}
    assert asked(made) == [("elastic", (3,), "next")]
    made.release_part("elastic", [2, 3])
    assert start(made) == {"waits": 1, "next": 1}


def test_a_move_names_the_tasks_where_they_come_in_another_order():
    made = scheduler(node("a", gpus=4), node("b", gpus=4))
    made.adopt(gang("elastic", 1, 8, GPU), [Place("a", (gpu,)) for gpu in "012"], [0, 3, 5])
    moved = made.move("elastic", [Place("a", ("2",)), Place("b"), Place("a", ("0",))], [5, 3, 0])
    assert moved == (Place("a", ("2",)), Place("b", ("0",)), Place("a", ("0",)))
    assert held(made, "elastic") == {0: Place("a", ("0",)), 3: Place("b", ("0",)), 5: Place("a", ("2",))}
    with pytest.raises(Conflict):
        made.move("elastic", [Place("a"), Place("b"), Place("a")], [0, 1, 2])


def test_a_move_of_some_leaves_the_others_where_they_are():
    made = scheduler(node("a", gpus=4), node("b", gpus=4))
    made.adopt(gang("elastic", 1, 8, GPU), [Place("a", (gpu,)) for gpu in "012"], [0, 3, 5])
    assert made.move("elastic", [Place("b")], [3]) == (Place("b", ("0",)),)
    assert held(made, "elastic") == {0: Place("a", ("0",)), 3: Place("b", ("0",)), 5: Place("a", ("2",))}
    for wrong in ([4], [3, 3], []):
        with pytest.raises(Conflict):
            made.move("elastic", [Place("b")] * max(1, len(wrong)), wrong)


# -- avoided nodes -----------------------------------------------------------------------------------------------


def test_a_request_avoids_a_node_where_it_can():
    made = scheduler(node("a", 2), node("b", 4))
    assert start(made, gang("one", 2, 2, avoid=frozenset({"a"}))) == {"one": 2}
    assert {place.node for place in held(made, "one").values()} == {"b"}
    assert start(made, gang("two", 3, 3, avoid=frozenset({"a"}))) == {"two": 3}


def test_a_request_avoids_a_gpu_where_it_can():
    made = scheduler(node("a", gpus=2), node("b", gpus=4))
    bad = frozenset({gpu_name("a", "0")})
    start(made, gang("one", 1, 1, GPU, avoid=bad), gang("two", 1, 1, Ask(gpu=2), avoid=bad))
    assert held(made, "one") == {0: Place("a", ("1",))}
    assert held(made, "two") == {0: Place("b", ("0", "1"))}
    start(made, gang("three", 3, 3, GPU, avoid=bad))
    assert sorted(place.node for place in held(made, "three").values()) == ["a", "b", "b"]


# -- growing -----------------------------------------------------------------------------------------------------


def test_a_gang_grows_only_when_it_may_and_is_asked_once():
    made = scheduler(node("a", 4, gpus=4))
    start(made, gang("other", 2, 2, GPU), gang("elastic", 1, 4, GPU))
    made.release("other")
    assert (made.decide(), made.adjust()) == ([], [])
    made.may_grow("elastic")
    assert made.adjust() == [Grow("elastic", (2, 3), (Place("a", ("0",)), Place("a", ("1",))))]
    made.release_part("elastic", [0])
    assert made.adjust() == []
    made.may_grow("elastic")
    made.may_grow("elastic", False)
    assert made.adjust() == []
    made.may_grow("elastic")
    assert made.adjust() == [Grow("elastic", (0,), (Place("a", ("2",)),))]
    made.may_grow("unknown")


def test_no_gang_grows_into_a_reservation():
    made = scheduler(node("a", 4))
    start(made, gang("other", 3, 3), gang("elastic", 1, 4))
    start(made, gang("waits", 1, 1, Ask(cpu=3)))
    made.release_part("other", [0])
    made.may_grow("elastic")
    assert (made.decide(), made.adjust()) == ([], [])
    made.withdraw("waits")
    assert made.adjust() == [Grow("elastic", (1,), (Place("a"),))]


def test_the_highest_priority_grows_first_then_the_smallest_gang():
    made = scheduler(node("a", 12))
    filler = gang("filler", 6, 6)
    start(made, filler)
    start(made, gang("one", 1, 8))
    assert made.snapshot().held[1].indexes == (0, 1, 2, 3, 4, 5)
    made.release_part("one", [3, 4, 5])
    start(made, gang("two", 1, 8), gang("urgent", 1, 3, priority=1), gang("full", 1, 1))
    assert {held.request.id: len(held.places) for held in made.snapshot().held} == {
        "filler": 6,
        "one": 3,
        "two": 1,
        "urgent": 1,
        "full": 1,
    }
    made.release("filler")
    for id in ("one", "two", "urgent", "full"):
        made.may_grow(id)
    assert {grown.id: len(grown.indexes) for grown in made.adjust()} == {"urgent": 2, "two": 3, "one": 1}


def test_a_start_leaves_growing_gangs_their_share():
    made = scheduler(node("a", 8))
    start(made, gang("filler", 7, 7), gang("old", 1, 8))
    made.may_grow("old")
    made.release("filler")
    assert start(made, gang("new", 1, 8)) == {"new": 4}
    assert [(grown.id, len(grown.indexes)) for grown in made.adjust()] == [("old", 3)]


def test_it_grows_by_another_kind_where_the_first_does_not_fit():
    made = scheduler(node("a", 4))
    made.enqueue(Request("mixed", 0, 1, (ONE,), extra=(GPU, ONE)))
    made.decide()
    made.may_grow("mixed")
    assert made.adjust() == [Grow("mixed", (2,), (Place("a"),))]


def test_a_larger_size_lets_it_grow():
    made = scheduler(node("a", 4))
    made.enqueue(gang("elastic", 1, 4, size=2))
    assert start(made) == {"elastic": 2}
    made.may_grow("elastic")
    assert made.adjust() == []
    made.resize_gang("elastic", 3)
    assert [grown.indexes for grown in made.adjust()] == [(2,)]


# -- reclaiming what was lent ------------------------------------------------------------------------------------


def asked(made: Scheduler) -> list[tuple[str, tuple[int, ...], str]]:
    return [(shrink.id, shrink.indexes, shrink.asked_by) for shrink in made.adjust()]


def test_a_waiting_run_reclaims_what_was_lent():
    made = scheduler(node("a", 4))
    start(made, gang("elastic", 1, 4))
    assert start(made, gang("waits", 2, 2)) == {}
    assert asked(made) == [("elastic", (2, 3), "waits")]
    assert (made.decide(), made.adjust()) == ([], []), "no gang is asked twice"
    made.release_part("elastic", [3])
    assert (made.decide(), made.adjust()) == ([], [])
    made.release_part("elastic", [2])
    assert start(made) == {"waits": 2}


def test_needed_tasks_are_not_reclaimed():
    made = scheduler(node("a", 4))
    start(made, gang("elastic", 3, 4))
    start(made, gang("waits", 2, 2, priority=9))
    assert asked(made) == []
    made.release_part("elastic", [0])
    assert start(made) == {}
    assert asked(made) == [], "the extra replaces the task that it gave back"


def test_a_lower_priority_waits():
    made = scheduler(node("a", 4))
    start(made, gang("elastic", 1, 4, priority=1))
    start(made, gang("waits", 1, 1))
    assert asked(made) == []
    start(made, gang("equal", 1, 1, priority=1))
    assert asked(made) == [("elastic", (3,), "equal")]


def test_nothing_is_reclaimed_where_it_would_not_be_enough():
    made = scheduler(node("a", 4), node("b", 4))
    start(made, gang("elastic", 1, 4))
    start(made, gang("other", 1, 1, Ask(cpu=3)))
    start(made, gang("waits", 1, 1, Ask(cpu=4)))
    assert asked(made) == []


def test_the_lowest_priority_is_asked_first_then_the_newest():
    made = scheduler(node("a", 9))
    start(made, gang("high", 1, 3, priority=1))
    start(made, gang("old", 1, 3))
    start(made, gang("new", 1, 3))
    start(made, gang("waits", 3, 3, priority=2))
    assert sorted(asked(made)) == [("new", (1, 2), "waits"), ("old", (2,), "waits")]


def test_one_gang_is_asked_for_two_rather_than_two_gangs_for_one_each():
    made = scheduler(node("a", 3), node("b", 3))
    made.adopt(gang("old", 1, 4), [Place(name) for name in "abbb"])
    made.adopt(gang("new", 1, 2), [Place("a"), Place("a")])
    made.adopt(gang("newest", 1, 2), [Place("c"), Place("a")])
    start(made, gang("waits", 1, 1, Ask(cpu=2)))
    assert asked(made) == [("old", (2, 3), "waits")]


def test_as_few_tasks_as_possible():
    """One task on node a makes room; on node b it would take two."""
    made = scheduler(node("a", 4), node("b", 4))
    elastic = gang("elastic", 1, 6)
    made.adopt(elastic, [Place(name) for name in "babbb"], range(5))
    made.adopt(gang("plain", 1, 1, Ask(cpu=2)), [Place("a")])
    start(made, gang("waits", 1, 1, Ask(cpu=2)))
    assert asked(made) == [("elastic", (1,), "waits")]


def test_all_waiting_runs_are_served_at_once():
    """Four runs of one node each wait, and the gang is asked for four tasks at once."""
    made = scheduler(*[node(name, 1) for name in "abcdef"])
    start(made, gang("elastic", 1, 6))
    start(made, *[gang(f"waits-{n}", 1, 1) for n in range(4)])
    shrinks = asked(made)
    assert {asker for _, _, asker in shrinks} == {f"waits-{n}" for n in range(4)}
    assert {index for _, indexes, _ in shrinks for index in indexes} == {2, 3, 4, 5}
    made.release_part("elastic", [2, 3, 4, 5])
    assert len(start(made)) == 4


def test_a_run_ahead_takes_the_returned_place_and_the_other_reclaims_again():
    made = scheduler(node("a", 4))
    start(made, gang("elastic", 1, 4))
    start(made, gang("waits", 1, 1))
    assert asked(made) == [("elastic", (3,), "waits")]
    start(made, gang("urgent", 1, 1, priority=1))
    assert asked(made) == [("elastic", (2,), "waits")]
    made.release_part("elastic", [2, 3])
    assert start(made) == {"urgent": 1, "waits": 1}


def test_places_reclaimed_for_a_withdrawn_run_are_free_for_all():
    made = scheduler(node("a", 4))
    start(made, gang("elastic", 1, 4))
    start(made, gang("waits", 1, 1))
    assert asked(made) == [("elastic", (3,), "waits")]
    made.withdraw("waits")
    start(made, gang("next", 1, 1))
    assert asked(made) == []
    made.release_part("elastic", [3])
    assert start(made) == {"next": 1}


def test_a_gang_that_gives_back_does_not_grow_meanwhile():
    made = scheduler(node("a", 4))
    start(made, gang("elastic", 1, 4))
    made.may_grow("elastic")
    start(made, gang("waits", 1, 1))
    assert asked(made) == [("elastic", (3,), "waits")]
    made.set_nodes([node("a", 4), node("b", 1)])
    assert start(made) == {"waits": 1}
    made.set_nodes([node("a", 4), node("b", 2)])
    made.may_grow("elastic")
    assert made.adjust() == []
    made.release_part("elastic", [3])
    assert [type(change) for change in made.adjust()] == [Grow]


def test_a_smaller_size_is_given_back():
    made = scheduler(node("a", 4))
    start(made, gang("elastic", 1, 4))
    made.resize_gang("elastic", 2)
    assert asked(made) == [("elastic", (2, 3), "")]
    assert asked(made) == []
    made.release_part("elastic", [2, 3])
    made.may_grow("elastic")
    assert made.adjust() == []


# -- messages ----------------------------------------------------------------------------------------------------


def named(role: str, count: int, **needs) -> tuple[Ask, ...]:
    return tuple(Ask(name=f"{role}-{n}", **needs) for n in range(count))


def test_a_waiting_gang_shows_how_many_tasks_fit_and_what_the_next_one_lacks():
    made = scheduler(node("a", 8, gpus=4), node("b", 8, gpus=1))
    made.adopt(gang("digits", 1, 1, GPU), [Place("b", ("0",))])
    asks = (*named("chief", 1, cpu=1), *named("worker", 5, gpu=1))
    made.enqueue(Request("wide", 0, 99, asks))
    made.decide()
    why = made.explain("wide")
    assert why.reason == "5 of 6 tasks fit now; worker-4 lacks 1 GPU on a, held by digits"
    assert [(short.resource, short.short, short.node) for short in why.short] == [("gpu", 1, "a")]


def test_a_gang_that_can_never_start_names_the_role_that_is_too_big():
    made = scheduler(node("a", 8, gpus=2))
    asks = (*named("chief", 1, cpu=1), *named("worker", 2, gpu=4))
    verdict = made.can_ever_fit(asks)
    assert (verdict.reason, verdict.task) == ("worker-0: asks for 4 GPUs; the largest node has 2", 1)
    assert made.can_ever_fit(asks[1:]).reason == "asks for 4 GPUs; the largest node has 2"


def test_role_names_do_not_matter():
    assert Ask(cpu=1, name="chief-0") == Ask(cpu=1, name="worker-0")
    assert hash(Ask(cpu=1, name="chief-0")) == hash(Ask(cpu=1))


def test_giving_back_is_explained_to_both_runs():
    made = scheduler(node("a", 4))
    made.enqueue(Request("elastic", 0, 98, named("worker", 1, cpu=1), extra=named("worker", 4, cpu=1)[1:]))
    made.decide()
    made.enqueue(Request("waits", 0, 99, (ONE, ONE)))
    made.decide()
    made.adjust()
    assert (
        made.explain("elastic").reason
        == "has 4 of up to 4 tasks on a; gives back worker-2, worker-3 for waits"
    )
    assert made.explain("waits").reason == (
        "0 of 2 tasks fit now; task 0 lacks 1 CPU on a, held by elastic; elastic gives back 2 tasks for it"
    )
