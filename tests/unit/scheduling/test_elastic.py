"""Gangs that have more than they need, lose a task, and give some back."""

from __future__ import annotations

import pytest

from stoker.errors import Conflict
from stoker.scheduling import Ask, NodeShape, Place, Request, Scheduler, Start, gpu_name

GI = 1 << 30
ONE = Ask(cpu=1)
GPU = Ask(gpu=1)


def node(name: str, cpu: float = 4, gpus: int = 0, domain: str = "", ready: bool = True) -> NodeShape:
    return NodeShape(name, cpu, GI, tuple(str(n) for n in range(gpus)), ready, domain=domain)


def scheduler(*nodes: NodeShape) -> Scheduler:
    made = Scheduler()
    made.set_nodes(nodes)
    return made


def gang(id: str, least: int, most: int, ask: Ask = ONE, **more) -> Request:
    gang.seq += 1
    return Request(
        id, more.pop("priority", 0), gang.seq, (ask,) * least, extra=(ask,) * (most - least), **more
    )


gang.seq = 0


def start(made: Scheduler, *requests: Request) -> dict[str, int]:
    """Who starts, with how many tasks."""
    for request in requests:
        made.enqueue(request)
    return {begun.id: len(begun.places) for begun in made.decide()}


def held(made: Scheduler, id: str) -> dict[int, Place]:
    (found,) = [held for held in made.snapshot().held if held.request.id == id]
    return dict(zip(found.indexes, found.places, strict=True))


# -- a start with extras -----------------------------------------------------------------------------------------


def test_it_starts_with_what_is_free():
    made = scheduler(node("a", 4))
    assert start(made, gang("elastic", 2, 8)) == {"elastic": 4}


def test_it_does_not_start_below_what_it_needs():
    made = scheduler(node("a", 4))
    start(made, gang("other", 3, 3))
    assert start(made, gang("elastic", 2, 8)) == {}
    made.release("other")
    assert start(made) == {"elastic": 4}


def test_who_could_start_comes_before_the_extras_of_one_that_starts():
    made = scheduler(node("a", 4))
    assert start(made, gang("elastic", 2, 8, priority=5), gang("plain", 1, 1)) == {"elastic": 3, "plain": 1}


def test_extras_leave_what_is_kept_for_one_that_waits():
    """It waits for a GPU and four CPUs: these stay free although no GPU is."""
    made = scheduler(node("a", 8, gpus=1))
    start(made, gang("trains", 1, 1, GPU))
    assert start(made, gang("waits", 1, 1, Ask(cpu=4, gpu=1)), gang("elastic", 1, 8)) == {"elastic": 4}


def test_two_that_start_together_share_what_is_left():
    made = scheduler(node("a", 8))
    assert start(made, gang("one", 1, 8), gang("two", 1, 8)) == {"one": 4, "two": 4}


def test_the_higher_priority_takes_its_extras_first():
    made = scheduler(node("a", 8))
    assert start(made, gang("one", 1, 4), gang("two", 1, 8, priority=1)) == {"two": 7, "one": 1}


def test_extras_stay_in_the_cluster_of_the_others():
    made = scheduler(node("e", 2, domain="east"), node("w", 8, domain="west"))
    assert start(made, gang("elastic", 2, 8, domains=("east", "west"))) == {"elastic": 2}


def test_extras_of_another_kind_end_where_the_first_does_not_fit():
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
    made.resize_gang("nobody", 9)


# -- giving back, and a place for one that was lost --------------------------------------------------------------


def test_what_is_given_back_in_part_starts_others_and_the_rest_keep_their_numbers():
    made = scheduler(node("a", 4, gpus=4))
    start(made, gang("elastic", 2, 4, GPU))
    made.release_part("elastic", [1])
    assert start(made, gang("other", 1, 1, GPU)) == {"other": 1}
    assert held(made, "elastic") == {n: Place("a", (str(n),)) for n in (0, 2, 3)}
    assert held(made, "other") == {0: Place("a", ("1",))}
    made.release_part("elastic", [1])
    made.release_part("nobody", [1])


def test_a_lost_task_goes_elsewhere_when_its_node_is_gone():
    made = scheduler(node("a", 2), node("b", 2))
    start(made, gang("pair", 2, 2, Ask(cpu=2)))
    made.set_nodes([node("a", 2, ready=False), node("b", 2), node("c", 2)])
    assert made.replace("pair", 0) == Place("c")
    assert held(made, "pair") == {0: Place("c"), 1: Place("b")}


def test_a_lost_task_gets_its_own_place_again_where_it_is_the_only_one():
    made = scheduler(node("a", 1), node("b", 1))
    start(made, gang("pair", 2, 2))
    assert made.replace("pair", 0, frozenset({"a"})) == Place("a")


def test_a_lost_task_keeps_away_from_its_node_and_gpu_where_it_can():
    made = scheduler(node("a", 4, gpus=3), node("b", 4, gpus=4))
    start(made, gang("pair", 2, 2, GPU))
    assert held(made, "pair") == {0: Place("a", ("0",)), 1: Place("a", ("1",))}
    assert made.replace("pair", 0, frozenset({gpu_name("a", "0")})) == Place("a", ("2",))
    assert made.replace("pair", 0, frozenset({"a"})) == Place("b", ("0",))
    assert made.replace("pair", 0, frozenset({"b"})) == Place("a", ("0",))


def test_one_that_waits_for_a_place_comes_before_all_who_wait():
    made = scheduler(node("a", 2), node("b", 2))
    start(made, gang("pair", 2, 2, Ask(cpu=2)))
    made.set_nodes([node("b", 2)])
    assert made.replace("pair", 0) is None
    assert "no room for task 0" in made.explain("pair").reason
    assert start(made, gang("urgent", 1, 1, priority=9)) == {}
    made.set_nodes([node("b", 2), node("c", 2)])
    assert start(made) == {}, "what it could use is kept for it"
    assert made.replace("pair", 0) == Place("c")
    made.release("pair")
    assert start(made) == {"urgent": 1}


def test_who_lets_the_lost_task_go_keeps_nothing_from_others():
    made = scheduler(node("a", 2), node("b", 2))
    start(made, gang("elastic", 1, 2, Ask(cpu=2)))
    made.set_nodes([node("b", 2)])
    lost = next(index for index, place in held(made, "elastic").items() if place.node == "a")
    assert made.replace("elastic", lost) is None
    made.set_nodes([node("b", 2), node("c", 1)])
    made.release_part("elastic", [lost])
    assert start(made, gang("other", 1, 1)) == {"other": 1}


def test_after_a_loss_the_cluster_is_remembered():
    made = scheduler(node("e", 1, domain="east", ready=False), node("w", 1, domain="west"))
    made.adopt(gang("one", 1, 1), [Place("e")])
    assert made.replace("one", 0) is None
    made = Scheduler.from_snapshot(made.snapshot())
    assert made.replace("one", 0) is None
    made.set_nodes([node("w", 1, domain="west"), node("e2", 1, domain="east")])
    assert made.replace("one", 0) == Place("e2")


def test_a_restart_believes_which_tasks_there_are():
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


# -- keeping away ------------------------------------------------------------------------------------------------


def test_a_request_keeps_away_from_a_node_where_it_can():
    made = scheduler(node("a", 2), node("b", 4))
    assert start(made, gang("one", 2, 2, avoid=frozenset({"a"}))) == {"one": 2}
    assert {place.node for place in held(made, "one").values()} == {"b"}
    assert start(made, gang("two", 3, 3, avoid=frozenset({"a"}))) == {"two": 3}


def test_a_request_keeps_away_from_a_gpu_where_it_can():
    made = scheduler(node("a", gpus=2), node("b", gpus=4))
    bad = frozenset({gpu_name("a", "0")})
    start(made, gang("one", 1, 1, GPU, avoid=bad), gang("two", 1, 1, Ask(gpu=2), avoid=bad))
    assert held(made, "one") == {0: Place("a", ("1",))}
    assert held(made, "two") == {0: Place("b", ("0", "1"))}
    start(made, gang("three", 3, 3, GPU, avoid=bad))
    assert sorted(place.node for place in held(made, "three").values()) == ["a", "b", "b"]
