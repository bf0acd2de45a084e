"""Where a task may run: pools, clusters, and places that another scheduler chose."""

from __future__ import annotations

import pytest

from stoker.errors import Conflict
from stoker.scheduling import Ask, NodeShape, Place, Request, Scheduler, Start
from support.scheduling import scheduler

GI = 1 << 30
A100, SPOT, V100 = (frozenset({f"gpu-prod:pool:{name}"}) for name in ("a100", "spot", "v100"))


def node(name: str, domain: str = "", *, cpu: float = 8, gpus: int = 0, tags: str = "", ready: bool = True):
    ids = tuple(str(n) for n in range(gpus))
    pools = frozenset(f"gpu-prod:pool:{tag}" for tag in tags.split())
    return NodeShape(name, cpu, 16 * GI, ids, ready, pools, domain)


def ask(made: Scheduler, id: str, *asks: Ask, domains: tuple[str, ...] = ()) -> list[Start]:
    ask.seq += 1
    made.enqueue(Request(id, 0, ask.seq, asks, domains))
    return made.decide()


ask.seq = 0


def test_a_task_goes_only_to_its_pool():
    made = scheduler(node("a", gpus=4), node("b", gpus=2, tags="a100 spot"), node("c", gpus=1, tags="spot"))
    assert ask(made, "one", Ask(gpu=2, among=A100)) == [Start("one", (Place("b", ("0", "1")),))]
    assert ask(made, "two", Ask(gpu=1, among=A100)) == []
    assert ask(made, "three", Ask(gpu=1, among=A100 | SPOT)) == [Start("three", (Place("c", ("0",)),))]


def test_a_gang_of_equal_tasks_stays_in_its_pool():
    made = scheduler(node("a", cpu=8), node("b", cpu=2, tags="a100"), node("c", cpu=1, tags="a100"))
    (start,) = ask(made, "gang", *[Ask(cpu=1, among=A100)] * 3)
    assert sorted(place.node for place in start.places) == ["b", "b", "c"]


def test_tasks_of_one_gang_may_want_different_pools():
    """Equal amounts and different pools: nodes of equal size are not interchangeable."""
    made = scheduler(node("a", cpu=2, tags="a100 spot"), node("b", cpu=2, tags="a100"))
    (start,) = ask(made, "gang", Ask(cpu=2, among=A100), Ask(cpu=2, among=SPOT))
    assert [place.node for place in start.places] == ["b", "a"]


def test_a_gang_never_spans_two_clusters():
    made = scheduler(node("e1", "east", cpu=1), node("w1", "west", cpu=1))
    assert ask(made, "pair", Ask(cpu=1), Ask(cpu=1)) == []
    why = made.explain("pair")
    assert why.state == "impossible"
    assert why.reason == "asks for 2 tasks of 1 CPU at once in one cluster; the roomiest, east, holds 1"
    made.set_nodes([node("e1", "east", cpu=1), node("w1", "west", cpu=1), node("w2", "west", cpu=1)])
    (start,) = made.decide()
    assert {place.node for place in start.places} == {"w1", "w2"}


def test_the_preferred_cluster_that_fits_is_taken_also_where_another_fits_tighter():
    made = scheduler(node("e1", "east", cpu=2), node("w1", "west", cpu=8), node("n1", "north", cpu=1))
    assert ask(made, "one", Ask(cpu=2), domains=("west", "east"))[0].places == (Place("w1"),)
    assert ask(made, "two", Ask(cpu=7), domains=("east", "west")) == []
    assert ask(made, "three", Ask(cpu=1), domains=("north", "east"))[0].places == (Place("n1"),)
    assert ask(made, "four", Ask(cpu=1), domains=("north", "east"))[0].places == (Place("e1"),)
    assert ask(made, "five", Ask(cpu=1))[0].places == (Place("e1"),), "by name where none is preferred"


def test_a_run_that_waits_in_one_cluster_reserves_nothing_in_another():
    made = scheduler(node("e1", "east", cpu=4, gpus=2), node("w1", "west", cpu=4, gpus=1))
    ask(made, "trains", Ask(cpu=1, gpu=2), domains=("east",))
    assert ask(made, "blocked", Ask(cpu=4, gpu=2), domains=("east",)) == []
    assert ask(made, "elsewhere", Ask(cpu=4, gpu=1), domains=("west",))[0].places == (Place("w1", ("0",)),)
    assert ask(made, "behind", Ask(cpu=1), domains=("east",)) == []
    assert made.explain("behind").behind == "blocked"


def test_a_cluster_that_can_never_hold_a_run_is_not_reserved_for_it():
    """The run may go anywhere, but only east has two GPUs on one node: west is free for others."""
    made = scheduler(node("e1", "east", cpu=4, gpus=2), node("w1", "west", cpu=4, gpus=1))
    ask(made, "trains", Ask(gpu=2))
    assert ask(made, "blocked", Ask(cpu=4, gpu=2)) == []
    assert ask(made, "elsewhere", Ask(cpu=4, gpu=1))[0].places == (Place("w1", ("0",)),)
    assert ask(made, "behind", Ask(cpu=1)) == []


def test_a_run_that_waits_for_a_pool_reserves_nothing_outside_it():
    made = scheduler(node("a", cpu=4), node("b", cpu=4, gpus=1, tags="a100"))
    ask(made, "trains", Ask(gpu=1, among=A100))
    assert ask(made, "blocked", Ask(cpu=4, gpu=1, among=A100)) == []
    assert ask(made, "plain", Ask(cpu=4))[0].places == (Place("a"),)
    assert ask(made, "into-the-pool", Ask(cpu=1, among=A100)) == []


CLUSTERS = (
    node("big", "gpu-prod", gpus=4, tags="a100 a100:gpu"),
    node("mid", "gpu-prod", cpu=32, gpus=2, tags="a100", ready=False),
    node("old", "gpu-test", cpu=4, gpus=8, tags="v100"),
)


@pytest.mark.parametrize(
    ("asks", "domains", "reason"),
    [
        ([Ask(gpu=8)], ("gpu-prod",), "no node of cluster gpu-prod has 8 GPUs; the largest has 4"),
        (
            [Ask(memory=20 * GI, among=A100)],
            ("gpu-prod",),
            "no node of pool a100 in cluster gpu-prod has 20 GiB of memory; the largest has 16 GiB",
        ),
        (
            [Ask(gpu=8, among=frozenset({"gpu-prod", "gpu-prod:gpu"}))],
            (),
            "there is no node of cluster gpu-prod that takes it",
        ),
        (
            [Ask(gpu=8, among=A100 | {"gpu-prod:pool:a100:gpu"})],
            (),
            "no node of pool a100 in cluster gpu-prod has 8 GPUs; the largest has 4",
        ),
        ([Ask(gpu=9)], ("gpu-test", "gpu-prod"), "asks for 9 GPUs; the largest node has 8"),
        (
            [Ask(cpu=99, among=A100 | V100)],
            ("gpu-prod", "gpu-test"),
            "no node of pool a100 or pool v100 has 99 CPUs; the largest has 32",
        ),
        (
            [Ask(cpu=16, gpu=4, among=A100)],
            ("gpu-prod", "gpu-test"),
            "no node of pool a100 has 16 CPUs and 4 GPUs at once",
        ),
        ([Ask(among=A100)], ("gpu-test",), "there is no node of pool a100 in cluster gpu-test that takes it"),
        ([Ask()], ("nowhere",), "there is no node of cluster nowhere that takes it"),
        (
            [Ask(gpu=2, among=A100)] * 4,
            ("gpu-prod",),
            "asks for 4 tasks of 2 GPUs at once; all nodes of pool a100 in cluster gpu-prod together hold 3",
        ),
        (
            [Ask(gpu=3)] * 3,
            (),
            "asks for 3 tasks of 3 GPUs at once in one cluster; the roomiest, gpu-test, holds 2",
        ),
        (
            [Ask(cpu=30), Ask(gpu=8)],
            (),
            "asks for 2 tasks with 30 CPUs and 8 GPUs in all in one cluster; they do not fit the nodes together",
        ),
        (
            [Ask(cpu=30), Ask(cpu=8, gpu=1)],
            ("gpu-prod",),
            "",
        ),
        (
            [Ask(cpu=30), Ask(cpu=7), Ask(cpu=6, gpu=1)],
            ("gpu-prod",),
            "asks for 3 tasks with 43 CPUs and 1 GPU in all; "
            "they do not fit the nodes of cluster gpu-prod together",
        ),
    ],
)
def test_a_run_that_never_fits_names_the_restriction(asks, domains, reason):
    made = scheduler(*CLUSTERS)
    assert made.can_ever_fit(asks, domains).reason == reason
    assert made.can_ever_fit(asks, domains).ok == (not reason)
    if reason:
        ask(made, "asked", *asks, domains=domains)
        assert made.explain("asked").reason == reason


def test_only_nodes_it_may_go_to_are_named_as_not_ready():
    made = scheduler(*CLUSTERS, node("away", "gpu-test", cpu=64, ready=False))
    ask(made, "asked", Ask(cpu=30, among=A100))
    assert made.explain("asked").reason == "would fit if all nodes were ready; not ready: mid"


def test_waiting_names_the_pool_and_its_holders_only():
    nodes = [node("a", "gpu-prod", gpus=1, tags="a100"), node("b", "gpu-prod", gpus=1)]
    made = scheduler(*nodes)
    ask(made, "inside", Ask(gpu=1, among=A100))
    ask(made, "outside", Ask(gpu=1))
    ask(made, "asked", Ask(gpu=1, among=A100), domains=("gpu-prod",))
    assert made.explain("asked").reason == "short of 1 GPU on a of pool a100, held by inside"
    made.set_nodes([*nodes, node("c", "gpu-test")])
    made.decide()
    why = made.explain("asked")
    assert why.reason == "short of 1 GPU on a of pool a100 in cluster gpu-prod, held by inside"


def test_the_only_cluster_is_no_restriction():
    made = scheduler(node("local", "local", gpus=2))
    assert made.can_ever_fit([Ask(gpu=4)], ("local",)).reason == "asks for 4 GPUs; the largest node has 2"
    ask(made, "holds", Ask(gpu=2), domains=("local",))
    ask(made, "waits", Ask(gpu=1), domains=("local",))
    assert made.explain("waits").reason == "short of 1 GPU on local, held by holds"


def test_the_shortage_is_named_where_it_is_smallest():
    made = scheduler(node("e1", "east", gpus=4), node("w1", "west", gpus=4))
    ask(made, "most", Ask(gpu=4), domains=("east",))
    ask(made, "some", Ask(gpu=2), domains=("west",))
    ask(made, "asked", Ask(gpu=3))
    assert [(s.node, s.short) for s in made.explain("asked").short] == [("w1", 1)]


# -- another scheduler chose------------------------------------------------------------------------------------


def test_a_move_corrects_the_ledger():
    made = scheduler(node("a", gpus=2), node("b", gpus=2))
    assert ask(made, "one", Ask(cpu=1, gpu=2))[0].places == (Place("a", ("0", "1")),)
    assert made.move("one", [Place("b")]) == (Place("b", ("0", "1")),)
    assert made.snapshot().held[0].places == (Place("b", ("0", "1")),)
    assert ask(made, "two", Ask(gpu=1))[0].places == (Place("a", ("0",)),)
    made.release("one")
    assert ask(made, "three", Ask(gpu=2))[0].places == (Place("b", ("0", "1")),)


def test_a_moved_gang_has_a_gpu_for_each_task():
    made = scheduler(node("a", gpus=2), node("b", gpus=4))
    made.adopt(Request("other", 0, 1, (Ask(gpu=1),)), [Place("b", ("1",))])
    ask(made, "gang", Ask(gpu=1), Ask(gpu=1))
    assert made.move("gang", [Place("b"), Place("b")]) == (Place("b", ("0",)), Place("b", ("2",)))
    assert made.move("gang", [Place("b", ("3",)), Place("b")]) == (Place("b", ("3",)), Place("b", ("2",)))


def test_a_move_starts_the_runs_that_now_fit():
    made = scheduler(node("a", tags="a100"), node("b"))
    ask(made, "one", Ask(cpu=8, among=A100))
    assert ask(made, "two", Ask(cpu=8, among=A100)) == []
    made.move("one", [Place("b")])
    assert made.decide() == [Start("two", (Place("a"),))]


def test_a_move_is_repeated_without_harm_and_keeps_its_gpus():
    made = scheduler(node("a", gpus=1), node("b", gpus=2))
    made.adopt(Request("other", 0, 1, (Ask(gpu=1),)), [Place("b", ("0",))])
    ask(made, "one", Ask(gpu=1))
    assert made.move("one", [Place("b")]) == (Place("b", ("1",)),)
    made.release("other")
    made.decide()
    before = made.snapshot()
    assert made.move("one", [Place("b")]) == (Place("b", ("1",)),)
    assert made.snapshot() == before
    assert made.move("unknown", [Place("b")]) == ()
    with pytest.raises(Conflict):
        made.move("one", [])


def test_a_move_onto_a_full_node_is_accepted_until_its_release():
    made = scheduler(node("a", cpu=1, gpus=1), node("b", cpu=1, gpus=1))
    ask(made, "one", Ask(cpu=1, gpu=1))
    ask(made, "two", Ask(cpu=1, gpu=1))
    assert made.move("two", [Place("a")]) == (Place("a", ("0",)),)
    made.release("one")
    assert ask(made, "three", Ask(gpu=1), Ask(gpu=1)) == []
    assert ask(made, "four", Ask(cpu=1))[0].places == (Place("b"),)
    made.release("two")
    assert [start.id for start in made.decide()] == ["three"]


def test_gpus_on_a_node_that_was_not_known_yet_are_counted_when_it_is():
    made = scheduler(node("a", gpus=1))
    ask(made, "one", Ask(gpu=1))
    assert made.move("one", [Place("new")]) == (Place("new"),)
    made.set_nodes([node("a", gpus=1), node("new", gpus=2)])
    assert made.move("one", [Place("new")]) == (Place("new", ("0",)),)
    assert ask(made, "two", Ask(gpu=2)) == []
