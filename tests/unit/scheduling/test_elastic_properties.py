"""Invariants of gangs that grow and shrink, for every sequence of events.

- Capacity is never exceeded, and no gang is asked for a task that it needs.
- Extras delay no waiting run, except for the time it takes to give them back.
- Decisions come to an end, and a scheduler rebuilt from a snapshot continues in the same way.

They are checked by counting, without code of the scheduler.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.scheduling import Ask, Grow, NodeShape, Place, Request, Scheduler, Shrink
from stoker.scheduling.model import Held, Snapshot

QUIET = settings(print_blob=True)
ASKS = [Ask(cpu=1), Ask(cpu=1), Ask(cpu=2), Ask(gpu=1), Ask(cpu=1, gpu=1)]
ROUNDS = 60
"""More than any of these small worlds needs to come to rest."""

nodes = st.lists(
    st.builds(
        lambda name, cpu, gpus, ready: NodeShape(name, cpu, 0, tuple("0123"[:gpus]), ready),
        st.sampled_from("abc"),
        st.integers(2, 6),
        st.integers(0, 3),
        st.sampled_from([True, True, True, True, True, False]),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda node: node.name,
)
gangs = st.one_of(
    st.builds(lambda ask, n: (ask,) * n, st.sampled_from(ASKS), st.integers(1, 3)),
    st.lists(st.sampled_from(ASKS), min_size=1, max_size=3).map(tuple),
)
extras = st.one_of(
    st.just(()),
    st.builds(lambda ask, n: (ask,) * n, st.sampled_from(ASKS), st.integers(1, 5)),
    st.lists(st.sampled_from(ASKS), max_size=4).map(tuple),
)
priorities = st.sampled_from([0, 0, 0, 1, -1])


# -- counting ----------------------------------------------------------------------------------------------------


def tasks_of(held: Held) -> list[tuple[int, Ask, Place]]:
    every = held.request.asks + held.request.extra
    return [(index, every[index], place) for index, place in zip(held.indexes, held.places, strict=True)]


Rooms = dict[str, tuple[float, int]]
"""What is free on each node: CPUs and GPUs."""


def rooms(snapshot: Snapshot, gone: set[tuple[str, int]] = frozenset()) -> Rooms:
    """What would be free without these tasks."""
    found: Rooms = {}
    for node in snapshot.nodes:
        on_it = [
            (ask, place)
            for held in snapshot.held
            for index, ask, place in tasks_of(held)
            if place.node == node.name and (held.request.id, index) not in gone
        ]
        taken = {gpu for _, place in on_it for gpu in place.gpus}
        if node.ready:
            found[node.name] = (
                max(0, node.cpu - sum(ask.cpu for ask, _ in on_it)),
                len([gpu for gpu in node.gpus if gpu not in taken]),
            )
    return found


def fits(asks: tuple[Ask, ...], free: Rooms) -> bool:
    for choice in itertools.product(free, repeat=len(asks)):
        chosen = list(zip(asks, choice, strict=True))
        if all(
            sum(ask.cpu for ask, name in chosen if name == node) <= cpu
            and sum(ask.gpu for ask, name in chosen if name == node) <= gpu
            for node, (cpu, gpu) in free.items()
        ):
            return True
    return False


def spare(held: Held) -> Counter[Ask]:
    """How many tasks of each kind a gang has beyond its need."""
    return Counter(ask for _, ask, _ in tasks_of(held)) - Counter(held.request.asks)


def on_loan(snapshot: Snapshot, priority: int) -> set[tuple[str, int]]:
    """The last spare tasks of each kind, of all gangs with the same or a lower priority."""
    found = set()
    for held in snapshot.held:
        left = spare(held)
        for index, ask, _ in reversed(tasks_of(held)):
            if left[ask] and held.request.priority <= priority:
                left[ask] -= 1
                found.add((held.request.id, index))
    return found


def held_in(snapshot: Snapshot) -> dict[str, Held]:
    return {held.request.id: held for held in snapshot.held}


def check_changes(before: Snapshot, changes: list[Grow | Shrink]) -> None:
    grown = {change.id: change for change in changes if isinstance(change, Grow)}
    assert len(grown) == sum(isinstance(change, Grow) for change in changes)
    asked = Counter(change.id for change in changes if isinstance(change, Shrink))
    assert not grown.keys() & asked.keys()
    known = held_in(before)
    for id, change in grown.items():
        held = known[id]
        assert held.may_grow and not held.giving
        assert not set(change.indexes) & set(held.indexes)
        assert len(held.indexes) + len(change.indexes) <= held.request.most
    check_room(before, [(known[id].request, change) for id, change in grown.items()])
    priorities = {request.id: request.priority for request in before.queued}
    priorities |= {id: held.request.priority for id, held in known.items()}
    for change in changes:
        if isinstance(change, Shrink) and change.asked_by:
            assert priorities[change.asked_by] >= priorities[change.id], "asked by a lower priority"
    for id in asked:
        held = known[id]
        given = [index for c in changes if isinstance(c, Shrink) and c.id == id for index in c.indexes]
        told = {index for index, _ in held.giving}
        assert not told & set(given), "told twice"
        kinds = {index: ask for index, ask, _ in tasks_of(held)}
        left = spare(held)
        left.subtract(kinds[index] for index in {*given, *told})
        assert all(left[kinds[index]] >= 0 for index in given), "asked for what it needs"


def check_room(before: Snapshot, grown: list[tuple[Request, Grow]]) -> None:
    free = rooms(before)
    taken = {(place.node, gpu) for held in before.held for place in held.places for gpu in place.gpus}
    for request, change in grown:
        every = request.asks + request.extra
        for index, place in zip(change.indexes, change.places, strict=True):
            cpu, gpu = free[place.node]
            free[place.node] = cpu - every[index].cpu, gpu - every[index].gpu
            assert min(free[place.node]) >= 0, "more than there is"
            assert len(place.gpus) == every[index].gpu
            assert not taken & {(place.node, gpu) for gpu in place.gpus}
            taken |= {(place.node, gpu) for gpu in place.gpus}
            kept = kept_for(before, place.node)
            assert free[place.node][0] >= kept[0] or not every[index].cpu, "taken from one that waits"
            assert free[place.node][1] >= kept[1] or not every[index].gpu, "taken from one that waits"


def kept_for(snapshot: Snapshot, name: str) -> tuple[float, int]:
    """What is reserved on a node for waiting runs: of each kind of task as many as wait, or as fit."""
    empty = rooms(Snapshot(snapshot.nodes))
    kept = [0.0, 0]
    waiting = [request.asks for request in snapshot.queued]
    alike = {amounts: waiting.count(amounts) for amounts in waiting if fits(amounts, empty)}
    for asks, number in alike.items():
        for ask in set(asks):
            most = [
                int(has // want) for has, want in zip(empty[name], (ask.cpu, ask.gpu), strict=True) if want
            ]
            times = min([number * asks.count(ask), *most])
            kept = [kept[0] + times * ask.cpu, kept[1] + times * ask.gpu]
    return kept[0], int(kept[1])


def settle(made: Scheduler) -> None:
    """A prompt control loop: every gang gives back and may grow at once, until nothing changes."""
    for _ in range(ROUNDS):
        starts, before = made.decide(), made.snapshot()
        changes = made.adjust()
        check_changes(before, changes)
        giving = {held.request.id: dict(held.giving) for held in made.snapshot().held if held.giving}
        for id, tasks in giving.items():
            made.release_part(id, tasks)
        allowed = [held.request.id for held in made.snapshot().held if not held.may_grow]
        if not (starts or changes or giving or allowed):
            return
        for id in allowed:
            made.may_grow(id)
    raise AssertionError("it never comes to rest")


# -- every sequence of events ------------------------------------------------------------------------------------


class Events(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.made = Scheduler()
        self.number = 0
        self.at_once = self.eager = True

    @initialize(nodes=nodes, crowd=st.lists(st.tuples(gangs, extras, priorities), min_size=1, max_size=4))
    def begin(
        self, nodes: list[NodeShape], crowd: list[tuple[tuple[Ask, ...], tuple[Ask, ...], int]]
    ) -> None:
        self.made.set_nodes(nodes)
        for gang, extra, priority in crowd:
            self.enqueue(gang, extra, priority)

    @rule(at_once=st.booleans(), eager=st.booleans())
    def change_the_habit(self, at_once: bool, eager: bool) -> None:
        """Whether decisions follow every event, as on a server, and whether all gangs may always grow."""
        self.at_once, self.eager = at_once, eager

    def changed(self) -> None:
        if self.eager:
            self.all_may_grow()
        if self.at_once:
            self.decide()
            self.adjust()

    @rule(nodes=nodes)
    def nodes_change(self, nodes: list[NodeShape]) -> None:
        self.made.set_nodes(nodes)
        self.changed()

    @rule(gang=gangs, extra=extras, priority=priorities)
    def enqueue(self, gang: tuple[Ask, ...], extra: tuple[Ask, ...], priority: int) -> None:
        self.number += 1
        self.made.enqueue(Request(f"run-{self.number}", priority, self.number, gang, extra=extra))
        self.changed()

    @rule(ask=st.sampled_from(ASKS), least=st.integers(1, 2), more=st.integers(1, 5), priority=priorities)
    def enqueue_workers(self, ask: Ask, least: int, more: int, priority: int) -> None:
        self.enqueue((ask,) * least, (ask,) * more, priority)

    @rule(gang=gangs, priority=st.sampled_from([0, 1]))
    def enqueue_plain(self, gang: tuple[Ask, ...], priority: int) -> None:
        self.enqueue(gang, (), priority)

    @precondition(lambda self: self.made.snapshot().queued)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.made.withdraw(data.draw(st.sampled_from(self.made.snapshot().queued)).id)
        self.changed()

    def one(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.made.snapshot().held))

    @precondition(lambda self: self.made.snapshot().held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.made.release(self.one(data).request.id)
        self.changed()

    @precondition(lambda self: self.made.snapshot().held)
    @rule(data=st.data())
    def release_part(self, data: st.DataObject) -> None:
        held = self.one(data)
        some = data.draw(st.sets(st.integers(0, len(held.request.tasks) - 1)))
        self.made.release_part(held.request.id, some)
        assert not some & set(held_in(self.made.snapshot())[held.request.id].indexes)
        self.changed()

    @rule()
    def honour_all(self) -> None:
        for held in self.made.snapshot().held:
            self.made.release_part(held.request.id, [index for index, _ in held.giving])
        self.changed()

    @precondition(lambda self: self.made.snapshot().held)
    @rule(data=st.data(), yes=st.booleans())
    def may_grow(self, data: st.DataObject, yes: bool) -> None:
        self.made.may_grow(self.one(data).request.id, yes)
        self.changed()

    @rule()
    def all_may_grow(self) -> None:
        for held in self.made.snapshot().held:
            self.made.may_grow(held.request.id)

    @precondition(lambda self: self.made.snapshot().held or self.made.snapshot().queued)
    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        snapshot = self.made.snapshot()
        request = data.draw(st.sampled_from([*snapshot.queued, *(held.request for held in snapshot.held)]))
        count = data.draw(st.integers(len(request.asks), len(request.tasks)))
        self.made.resize_gang(request.id, count)
        self.changed()

    @rule()
    def decide(self) -> None:
        before = self.made.snapshot()
        starts = self.made.decide()
        assert {start.id for start in starts} <= {request.id for request in before.queued}
        for start in starts:
            (request,) = [request for request in before.queued if request.id == start.id]
            assert len(request.asks) <= len(start.places) <= request.most
        assert self.made.decide() == []

    @rule()
    def adjust(self) -> None:
        self.made.decide()
        before = self.made.snapshot()
        check_changes(before, self.made.adjust())
        assert self.made.adjust() == []
        assert Scheduler.from_snapshot(self.made.snapshot()).adjust() == [], "no gang is asked twice"

    @invariant()
    def equals_its_rebuild(self) -> None:
        snapshot = self.made.snapshot()
        rebuilt, twin = Scheduler.from_snapshot(snapshot), copy.deepcopy(self.made)
        assert rebuilt.snapshot() == snapshot
        assert rebuilt.decide() == twin.decide()
        assert rebuilt.adjust() == twin.adjust()
        assert rebuilt.snapshot() == twin.snapshot()

    @invariant()
    def no_gpu_twice(self) -> None:
        held = [(p.node, gpu) for held in self.made.snapshot().held for p in held.places for gpu in p.gpus]
        assert len(held) == len(set(held))

    @invariant()
    def it_comes_to_rest_and_the_first_that_waits_is_not_kept_out_by_loans(self) -> None:
        twin = copy.deepcopy(self.made)
        settle(twin)
        snapshot = twin.snapshot()
        for request in snapshot.queued[:1]:
            assert not fits(request.asks, rooms(snapshot, on_loan(snapshot, request.priority)))


TestEvents = Events.TestCase
TestEvents.settings = settings(QUIET, max_examples=100, stateful_step_count=25)


# -- two worlds --------------------------------------------------------------------------------------------------


@settings(QUIET, max_examples=200)
@given(
    cpu=st.integers(2, 6),
    gpus=st.integers(0, 3),
    events=st.lists(st.tuples(gangs, extras, st.integers(0, 2)), min_size=1, max_size=12),
    data=st.data(),
)
def test_extras_delay_no_run_of_the_same_priority(cpu, gpus, events, data):
    """In two worlds, one of them without extras, the same runs run after each event."""
    # One node: on several, another order of starts would leave other gaps.
    elastic, rigid = Scheduler(), Scheduler()
    for made in (elastic, rigid):
        made.set_nodes([NodeShape("a", cpu, 0, tuple("0123"[:gpus]))])
    for number, (gang, extra, ends) in enumerate(events):
        elastic.enqueue(Request(f"run-{number}", 0, number, gang, extra=extra))
        rigid.enqueue(Request(f"run-{number}", 0, number, gang))
        for made in (elastic, rigid):
            settle(made)
        assert held_in(elastic.snapshot()).keys() == held_in(rigid.snapshot()).keys()
        running = sorted(held_in(rigid.snapshot()))
        for id in data.draw(st.permutations(running))[:ends]:
            for made in (elastic, rigid):
                made.release(id)
                settle(made)
            assert held_in(elastic.snapshot()).keys() == held_in(rigid.snapshot()).keys()
