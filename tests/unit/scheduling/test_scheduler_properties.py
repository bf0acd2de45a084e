"""Invariants for every sequence of events, checked against a slow scheduler written from the policy alone."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import assume, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.scheduling import Ask, NodeShape, Place, Request, Scheduler, Start
from stoker.scheduling.model import Held, Snapshot

QUIET = settings(print_blob=True)

GPUS = ("0", "1", "2", "10")
NAMES = ("ant", "bee", "cat", "dog")
RED, BLUE = frozenset({"red"}), frozenset({"blue"})

# Few kinds of nodes and tasks, so that runs compete for the same resources.
KINDS = [
    {"cpu": 4, "memory": 4, "gpus": ()},
    {"cpu": 4, "memory": 8, "gpus": ("0", "1")},
    {"cpu": 2, "memory": 3, "gpus": ("10", "2", "0")},
    {"cpu": 0.3, "memory": 1, "gpus": ("1",)},
    {"cpu": 1, "memory": 0, "gpus": ()},
]
ASKS = [
    Ask(cpu=1),
    Ask(cpu=2, memory=1),
    Ask(cpu=1, gpu=1),
    Ask(cpu=1, memory=2, gpu=2),
    Ask(gpu=1),
    Ask(cpu=0.1),
    Ask(cpu=0.3, memory=2),
    Ask(memory=3),
    Ask(),
    Ask(cpu=1, among=RED),
    Ask(cpu=1, gpu=1, among=BLUE),
    Ask(cpu=1, memory=1, among=RED | BLUE),
]
DOMAINS = [(), (), (), ("east",), ("west",), ("west", "east"), ("east", "nowhere")]
shapes = st.builds(
    lambda name, kind, ready, tags, domain: NodeShape(name, ready=ready, tags=tags, domain=domain, **kind),
    st.sampled_from(NAMES),
    st.sampled_from(KINDS),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([frozenset(), RED, BLUE, RED | BLUE]),
    st.sampled_from(["east", "east", "west"]),
)
clusters = st.lists(shapes, min_size=1, max_size=4, unique_by=lambda node: node.name)
domains = st.sampled_from(DOMAINS)
asks = st.sampled_from(ASKS)
gangs = st.one_of(
    st.tuples(asks),
    st.tuples(asks),
    st.builds(lambda ask, n: (ask,) * n, asks, st.integers(2, 3)),
    st.lists(asks, min_size=2, max_size=4).map(tuple),
)
extras = st.one_of(st.just(()), st.just(()), gangs)
sizes = st.sampled_from([None, None, None, 2, 3])
priorities = st.sampled_from([0, 0, 0, 1, -1])


# -- the slow scheduler ----------------------------------------------------------------------------------------


def exact(cpu: float) -> Fraction:
    return Fraction(str(cpu))


def asks_of(held: Held) -> list[Ask]:
    """The requests of the tasks that have a place."""
    return [(held.request.asks + held.request.extra)[index] for index in held.indexes]


class Free:
    """What is free on one node, in fractions and without code of the scheduler."""

    def __init__(self, node: NodeShape, snapshot: Snapshot) -> None:
        on_it = [
            (ask, place)
            for held in snapshot.held
            for ask, place in zip(asks_of(held), held.places, strict=True)
            if place.node == node.name
        ]
        taken = {gpu for _, place in on_it for gpu in place.gpus}
        self.node = node
        self.gpus = {gpu for gpu in node.gpus if gpu not in taken}
        self.left = [
            max(Fraction(0), exact(node.cpu) - sum(exact(ask.cpu) for ask, _ in on_it)),
            max(Fraction(0), Fraction(node.memory - sum(ask.memory for ask, _ in on_it))),
            Fraction(len(self.gpus)),
        ]


def wants(ask: Ask) -> list[Fraction]:
    return [exact(ask.cpu), Fraction(ask.memory), Fraction(ask.gpu)]


def may_go(ask: Ask, node: NodeShape) -> bool:
    return not ask.among or bool(ask.among & node.tags)


def fits(asks: tuple[Ask, ...], nodes: list[NodeShape], rooms: list[list[Fraction]]) -> bool:
    """Tries every assignment that the tags allow."""
    allowed = [[i for i, node in enumerate(nodes) if may_go(ask, node)] for ask in asks]
    for choice in itertools.product(*allowed):
        left = [list(room) for room in rooms]
        for ask, index in zip(asks, choice, strict=True):
            left[index] = [a - b for a, b in zip(left[index], wants(ask), strict=True)]
        if all(value >= 0 for room in left for value in room):
            return True
    return False


def choice_of_domains(request: Request, nodes: list[NodeShape]) -> list[str]:
    return list(request.domains or sorted({node.domain for node in nodes}))


def fits_in(request: Request, domain: str, nodes: list[NodeShape], rooms: list[list[Fraction]]) -> bool:
    there = [i for i, node in enumerate(nodes) if node.domain == domain]
    return fits(request.asks, [nodes[i] for i in there], [rooms[i] for i in there])


def most_on(ask: Ask, node: NodeShape, limit: int) -> int:
    total = [exact(node.cpu), Fraction(node.memory), Fraction(len(node.gpus))]
    fitting = [int(has // want) for has, want in zip(total, wants(ask), strict=True) if want]
    return min([limit, *fitting])


def kept_for(blocked: list[Request], nodes: list[NodeShape]) -> list[list[Fraction]]:
    """What is reserved on each node for blocked runs: of each kind of task as many as wait, or as fit. Only
    domains that can hold a whole run count for it."""
    kept = [[Fraction(0)] * 3 for _ in nodes]
    empty = [[exact(node.cpu), Fraction(node.memory), Fraction(len(node.gpus))] for node in nodes]
    alike = {(request.asks, request.domains): request for request in blocked}
    for (gang, wanted), request in alike.items():
        number = sum((other.asks, other.domains) == (gang, wanted) for other in blocked)
        open_to_it = [d for d in choice_of_domains(request, nodes) if fits_in(request, d, nodes, empty)]
        for ask in set(gang):
            for index, node in enumerate(nodes):
                if node.domain in open_to_it and may_go(ask, node):
                    times = most_on(ask, node, number * gang.count(ask))
                    kept[index] = [a + times * b for a, b in zip(kept[index], wants(ask), strict=True)]
    return kept


def check_decision(before: Snapshot, starts: list[Start]) -> None:
    """Walk the queue in order: each run starts exactly if it fits into what the runs before it leave."""
    started = {start.id: start for start in starts}
    nodes = [node for node in before.nodes if node.ready]
    free = [Free(node, before) for node in nodes]
    blocked: list[Request] = []
    order = sorted(before.queued, key=lambda request: (-request.priority, request.seq, request.id))
    assert [start.id for start in starts] == [request.id for request in order if request.id in started]
    for request in order:
        kept = kept_for(blocked, nodes)
        rooms = [
            [max(Fraction(0), has - keeps) for has, keeps in zip(space.left, kept[index], strict=True)]
            for index, space in enumerate(free)
        ]
        fitting = [d for d in choice_of_domains(request, nodes) if fits_in(request, d, nodes, rooms)]
        assert bool(fitting) == (request.id in started), request
        if request.id not in started:
            blocked.append(request)
            continue
        places = started[request.id].places
        assert len(request.asks) <= len(places) <= request.most
        for ask, place in zip(request.asks, places[: len(request.asks)], strict=True):
            assert take(ask, place, free).node.domain == fitting[0], "not the domain it prefers"
    check_extras([request for request in order if request.id in started], started, blocked, free)


def take(ask: Ask, place: Place, free: list[Free]) -> Free:
    (space,) = [space for space in free if space.node.name == place.node]
    assert may_go(ask, space.node), "not a node it may go to"
    assert len(place.gpus) == ask.gpu
    assert set(place.gpus) <= space.gpus, "a GPU that is not free"
    space.gpus -= set(place.gpus)
    space.left = [a - b for a, b in zip(space.left, wants(ask), strict=True)]
    assert min(space.left) >= 0, "more than there is"
    return space


def check_extras(
    begun: list[Request], started: dict[str, Start], blocked: list[Request], free: list[Free]
) -> None:
    """Extras use only what all waiting runs leave, and every extra that fits there is given."""
    kept = dict(
        zip([space.node.name for space in free], kept_for(blocked, [s.node for s in free]), strict=True)
    )
    for request in begun:
        places = started[request.id].places
        (domain,) = {space.node.domain for space in free for place in places if space.node.name == place.node}
        for ask, place in zip(request.extra, places[len(request.asks) :], strict=False):
            space = take(ask, place, free)
            assert space.node.domain == domain
            assert all(
                left >= keeps or not want
                for left, keeps, want in zip(space.left, kept[place.node], wants(ask), strict=True)
            ), "an extra takes what is kept for one that waits"
    for request in begun:
        places = started[request.id].places
        if len(places) == request.most:
            continue
        ask = request.extra[len(places) - len(request.asks)]
        (domain,) = {space.node.domain for space in free for place in places if space.node.name == place.node}
        for space in free:
            room = [max(Fraction(0), a - b) for a, b in zip(space.left, kept[space.node.name], strict=True)]
            fits_there = all(has >= want for has, want in zip(room, wants(ask), strict=True))
            assert not (space.node.domain == domain and may_go(ask, space.node) and fits_there), request


# -- every sequence of events ----------------------------------------------------------------------------------


class Events(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.number = 0
        self.decided = False
        self.at_once = True

    def changed(self) -> None:
        """A decision follows every event, as on a server, or only some of them."""
        self.decided = False
        if self.at_once:
            self.decide()

    @rule(at_once=st.booleans())
    def change_the_habit(self, at_once: bool) -> None:
        self.at_once = at_once

    @initialize(nodes=clusters)
    def begin(self, nodes: list[NodeShape]) -> None:
        self.scheduler.set_nodes(nodes)

    @rule(nodes=clusters)
    def nodes_change(self, nodes: list[NodeShape]) -> None:
        self.scheduler.set_nodes(nodes)
        self.changed()

    @rule(gang=gangs, priority=priorities, domains=domains, extra=extras, size=sizes)
    def enqueue(
        self,
        gang: tuple[Ask, ...],
        priority: int,
        domains: tuple[str, ...],
        extra: tuple[Ask, ...] = (),
        size: int | None = None,
    ) -> None:
        self.number += 1
        request = Request(f"run-{self.number}", priority, self.number, gang, domains, extra, size)
        self.scheduler.enqueue(request)
        self.scheduler.enqueue(request)
        self.changed()

    @rule(gang=gangs, count=st.integers(3, 8), domains=domains)
    def enqueue_many(self, gang: tuple[Ask, ...], count: int, domains: tuple[str, ...]) -> None:
        for _ in range(count):
            self.enqueue(gang, 0, domains)

    @precondition(lambda self: self.scheduler.snapshot().queued)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.scheduler.snapshot().queued))
        self.scheduler.withdraw(chosen.id)
        self.scheduler.withdraw(chosen.id)
        self.changed()

    @precondition(lambda self: self.scheduler.snapshot().held)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        """Sometimes it is queued again at once, like a run that lost its attempt."""
        chosen = data.draw(st.sampled_from(self.scheduler.snapshot().held)).request
        self.scheduler.release(chosen.id)
        self.scheduler.release(chosen.id)
        if again:
            self.scheduler.enqueue(chosen)
        self.changed()

    @precondition(lambda self: self.scheduler.snapshot().queued)
    @rule(data=st.data(), priority=priorities)
    def change_priority(self, data: st.DataObject, priority: int) -> None:
        chosen = data.draw(st.sampled_from(self.scheduler.snapshot().queued))
        self.scheduler.enqueue(replace(chosen, priority=priority))
        self.changed()

    @rule(ask=asks, node=st.sampled_from((*NAMES, "gone")), data=st.data())
    def adopt(self, ask: Ask, node: str, data: st.DataObject) -> None:
        """Its places are accepted, also on an unknown node; but not a GPU that another run holds."""
        held = {
            gpu
            for held in self.scheduler.snapshot().held
            for place in held.places
            if place.node == node
            for gpu in place.gpus
        }
        gpus = [gpu for gpu in GPUS if gpu not in held][: ask.gpu]
        assume(len(gpus) == ask.gpu)
        self.number += 1
        self.scheduler.adopt(
            Request(f"run-{self.number}", 0, self.number, (ask,)), [Place(node, tuple(gpus))]
        )
        self.changed()

    @precondition(lambda self: self.scheduler.snapshot().held)
    @rule(data=st.data(), node=st.sampled_from((*NAMES, "gone")))
    def move(self, data: st.DataObject, node: str) -> None:
        """The engine reports all tasks on one node, without their GPUs."""
        snapshot = self.scheduler.snapshot()
        chosen = data.draw(st.sampled_from(snapshot.held))
        free = [Free(shape, snapshot).gpus for shape in snapshot.nodes if shape.name == node] or [set()]
        back = {gpu for place in chosen.places if place.node == node for gpu in place.gpus}
        assume(sum(ask.gpu for ask in asks_of(chosen)) <= len(free[0] | back))
        moved = self.scheduler.move(chosen.request.id, [Place(node)] * len(chosen.places))
        assert [place.node for place in moved] == [node] * len(chosen.places)
        assert [len(place.gpus) for place in moved] == [ask.gpu for ask in asks_of(chosen)]
        assert self.scheduler.move(chosen.request.id, [Place(node)] * len(chosen.places)) == moved
        self.changed()

    @rule()
    def decide(self) -> None:
        before = self.scheduler.snapshot()
        starts = self.scheduler.decide()
        check_decision(before, starts)
        assert not (self.decided and starts), "nothing changed, and yet something starts"
        assert self.scheduler.decide() == []
        self.decided = True

    @invariant()
    def equals_its_rebuild(self) -> None:
        snapshot = self.scheduler.snapshot()
        rebuilt, twin = Scheduler.from_snapshot(snapshot), copy.deepcopy(self.scheduler)
        assert rebuilt.snapshot() == snapshot
        assert rebuilt.decide() == twin.decide()
        assert rebuilt.snapshot() == twin.snapshot()
        for request in twin.snapshot().queued:
            assert rebuilt.explain(request.id) == twin.explain(request.id)

    @invariant()
    def no_gpu_twice(self) -> None:
        gpus = [
            (place.node, gpu)
            for held in self.scheduler.snapshot().held
            for place in held.places
            for gpu in place.gpus
        ]
        assert len(gpus) == len(set(gpus))

    @invariant()
    def the_waiting_know_why(self) -> None:
        twin = copy.deepcopy(self.scheduler)
        twin.decide()
        snapshot = twin.snapshot()
        for position, request in enumerate(snapshot.queued, start=1):
            why = twin.explain(request.id)
            assert (why.position, why.queued) == (position, len(snapshot.queued))
            assert why.state in ("waiting", "impossible")
            assert why.reason
            assert why.state == "impossible" or why.short or why.behind or len(request.asks) > 1
            for shortage in why.short:
                assert shortage.short > 0


TestEvents = Events.TestCase
TestEvents.settings = settings(QUIET, max_examples=60, stateful_step_count=25)


# -- overtaking delays no run ----------------------------------------------------------------------------------

ready = clusters.map(lambda nodes: [replace(node, ready=True) for node in nodes])
wishes = st.tuples(gangs, domains)


@settings(QUIET, max_examples=300)
@given(
    nodes=ready,
    early=st.lists(wishes, max_size=8),
    late=st.lists(st.tuples(wishes, st.integers(-1, 0)), max_size=12),
    data=st.data(),
)
def test_the_head_starts_when_it_would_have_started_alone(nodes, early, late, data):
    """In two worlds, one of them with later runs, the head starts at the same time."""
    crowded, quiet = Scheduler(), Scheduler()
    for scheduler in (crowded, quiet):
        scheduler.set_nodes(nodes)
        for number, (gang, wanted) in enumerate(early):
            scheduler.enqueue(Request(f"early-{number}", 0, number, gang, wanted))
        scheduler.decide()
        for request in scheduler.snapshot().queued[1:]:
            scheduler.withdraw(request.id)
        scheduler.decide()
    assume(quiet.snapshot().queued)
    head = quiet.snapshot().queued[0]
    running = [held.request.id for held in quiet.snapshot().held]
    for end in data.draw(st.permutations(running)):
        for _ in range(data.draw(st.integers(0, 3))):
            if late:
                (gang, wanted), priority = late.pop()
                crowded.enqueue(Request(f"late-{len(late)}", priority, 1000 - len(late), gang, wanted))
        crowded.decide()
        for scheduler in (crowded, quiet):
            scheduler.release(end)
        alone = [start.id for start in quiet.decide()]
        assert (head.id in alone) == (head.id in [start.id for start in crowded.decide()])
        if head.id in alone:
            return
    assert quiet.explain(head.id).state == "impossible"


@settings(QUIET, max_examples=300)
@given(
    nodes=ready,
    early=st.lists(wishes, max_size=10),
    late=st.lists(st.tuples(wishes, st.integers(-1, 0)), max_size=12),
    data=st.data(),
)
def test_no_run_starves(nodes, early, late, data):
    """A blocked run starts at the latest when all runs that ran or were ahead of it have gone."""
    scheduler = Scheduler()
    scheduler.set_nodes(nodes)
    for number, (gang, wanted) in enumerate(early):
        scheduler.enqueue(Request(f"early-{number}", 0, number, gang, wanted))
    scheduler.decide()
    waiting = [r for r in scheduler.snapshot().queued if scheduler.explain(r.id).state != "impossible"]
    assume(waiting)
    chosen = data.draw(st.sampled_from(waiting))
    ahead = [f"early-{number}" for number in range(chosen.seq)] + [
        held.request.id for held in scheduler.snapshot().held
    ]
    for number, ((gang, wanted), priority) in enumerate(late):
        scheduler.enqueue(Request(f"late-{number}", priority, 1000 + number, gang, wanted))
        if data.draw(st.booleans()):
            scheduler.decide()
        if ahead and data.draw(st.booleans()):
            scheduler.release(ahead.pop(data.draw(st.integers(0, len(ahead) - 1))))
    for id in ahead:
        scheduler.withdraw(id)
    scheduler.decide()
    for id in {*ahead, *(f"early-{number}" for number in range(chosen.seq))}:
        scheduler.withdraw(id)
        scheduler.release(id)
    scheduler.decide()
    assert scheduler.explain(chosen.id).state == "held"


@settings(QUIET, max_examples=100)
@given(
    nodes=ready, wish=wishes, others=st.lists(wishes, max_size=6), count=st.integers(2, 12), data=st.data()
)
def test_equal_shapes_start_in_order(nodes, wish, others, count, data):
    gang, wanted = wish
    scheduler = Scheduler()
    scheduler.set_nodes(nodes)
    line = [Request(f"run-{number:02}", -(number // 4), number % 4, gang, wanted) for number in range(count)]
    for request in data.draw(st.permutations(line)):
        scheduler.enqueue(request)
    for number, other in enumerate(others):
        scheduler.enqueue(Request(f"other-{number}", 0, 100 + number, *other))
    seen: list[str] = []
    for _ in range(2 * count + len(others)):
        starts = scheduler.decide()
        seen.extend(start.id for start in starts if start.id.startswith("run"))
        for held in scheduler.snapshot().held:
            scheduler.release(held.request.id)
    assert seen == sorted(seen)
    possible = scheduler.can_ever_fit(gang, wanted).ok
    assert len(seen) == (count if possible else 0)
