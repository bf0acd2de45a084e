"""Takes back tasks on loan when another request waits for their room.

A waiting request may take back what is on loan to requests of its own priority or a lower one. Extras are a loan, so
it does not matter which request came first. A request of higher priority keeps its extras.

All waiting requests are examined in order. Each is planned onto what is free and what already comes back for it. If
that is not enough, tasks are reclaimed that make it enough: from the lowest priority first; then from as few gangs as
possible, because each has to form anew; then as few tasks as possible; then the newest gang and its last tasks.
Nothing is reclaimed where it would not be enough, and no task twice: what comes back is promised to the request that
asked, until one before it in the queue needs it more.

This is only a plan and reserves nothing: which request starts where is decided when the room is really free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from stoker.scheduling.allocation import Allocation
from stoker.scheduling.allocations import Allocations
from stoker.scheduling.ledger import Ledger, NodeAccount
from stoker.scheduling.model import Amount, Place, Shape, Shrink
from stoker.scheduling.placement import Room, place_in_one
from stoker.scheduling.queue import Bucket, Key, Queue
from stoker.scheduling.reservations import Reservations

TRIES = 8
"""How many ways to reclaim are compared once one is known. Each costs a few placements."""


_NOTHING = (0, 0, 0)


class Loan(NamedTuple):
    """A task that could be given back, or is about to be. Sorts in the order of reclaiming."""

    priority: int
    newest: int
    """The seq of its gang, negative."""
    gang: str
    last: int
    """Its number, negative."""
    node: str
    returns: Amount

    @property
    def task(self) -> int:
        return -self.last


def shrink(allocations: Allocations, queue: Queue, ledger: Ledger) -> list[Shrink]:
    """Which requests give back which tasks, and for which request."""
    loaned = allocations.elastic()
    before = {allocation.request.id: allocation.giving for allocation in loaned}
    for allocation in loaned:
        allocation.giving = {**allocation.giving, **dict.fromkeys(allocation.too_many(), "")}
    if any(allocation.giving or allocation.on_loan() for allocation in loaned):
        giving = _Plan(ledger, loaned).walk(queue)
        for allocation in loaned:
            allocation.giving = giving[allocation.request.id]
    shrinks = []
    for allocation in loaned:
        id = allocation.request.id
        news = _added(before[id], allocation.giving)
        shrinks += [Shrink(id, tuple(tasks), asker) for asker, tasks in news.items()]
        allocation.may_grow = allocation.may_grow and not news
    return shrinks


class _Plan:
    def __init__(self, ledger: Ledger, loaned: Sequence[Allocation]) -> None:
        self._ledger = ledger
        self._coming: dict[str, list[int]] = {}
        """Expected change of what is free on each node: plus what comes back, minus what is promised."""
        self._reserve = Reservations(ledger)
        self._giving = {allocation.request.id: dict(allocation.giving) for allocation in loaned}
        self._pending: dict[str, list[Loan]] = {}
        """Loans that come back and are not counted yet, by the request that asked."""
        self._loans: list[Loan] = []
        for allocation in loaned:
            places = dict(zip(allocation.indexes, ledger.places(allocation.request.id), strict=True))
            for index, asker in sorted(allocation.giving.items()):
                self._pending.setdefault(asker, []).append(self._loan(allocation, index, places[index]))
            self._loans += [self._loan(allocation, index, places[index]) for index in allocation.on_loan()]
        open_nodes = {node.name for node in ledger.open}
        self._loans = sorted(loan for loan in self._loans if loan.node in open_nodes)

    def _loan(self, allocation: Allocation, index: int, place: Place) -> Loan:
        request = allocation.request
        task = request.tasks[index].amount()
        returns = Amount(task.cpu, task.memory, self._ledger.node(place.node).would_return(place.gpus))
        return Loan(request.priority, -request.seq, request.id, -index, place.node, returns)

    def walk(self, queue: Queue) -> dict[str, dict[int, str]]:
        """Plans for every waiting request in order, as `Scheduler.decide` does. Returns for each gang the tasks it
        gives back, old and new, with the request that asks."""
        waiting = [(bucket.keys.first(), at, bucket) for at, bucket in enumerate(queue.buckets.values())]
        heapify(waiting)
        for asker in [asker for asker in self._pending if asker not in queue]:
            self._count(self._pending.pop(asker))  # the request no longer waits: its room is for all
        while waiting and (self._loans or self._pending):
            key, number, bucket = waiting[0]
            nodes = self._serve(key, bucket.shape)
            if nodes is None:
                self._reserve.block(bucket)
                heappop(waiting)
                continue
            self._promise(bucket.shape, nodes)
            following = _next_key(bucket, key)
            if following is None:
                heappop(waiting)
            else:
                heapreplace(waiting, (following, number, bucket))
        return self._giving

    def _serve(self, key: Key, shape: Shape) -> list[str] | None:
        """The nodes for this request with what is free, what comes back and what it reclaims."""
        asker = key[2]
        self._count(self._pending.pop(asker, ()))
        rooms = _Rooms(self._ledger.fields(shape.domains), self._coming, self._reserve.kept(key))
        nodes = rooms.fit(shape)
        if nodes is not None:
            return nodes
        behind = [loan for loans in self._pending.values() for loan in loans if loan.gang != asker]
        rooms.add(behind)
        asked: list[Loan] | None = [] if rooms.fit(shape) is not None else self._ask(shape, key, rooms)
        if asked is None:
            return None
        rooms.add(asked)
        used = set(rooms.fit(shape) or ())
        rooms.add([loan for loan in behind if loan.node not in used], -1)
        taken = [loan for loan in behind if loan.node in used]
        for loan in taken:
            self._pending[self._giving[loan.gang][loan.task]].remove(loan)
        for loan in asked:
            self._loans.remove(loan)
        for loan in (*taken, *asked):
            self._giving[loan.gang][loan.task] = asker
        self._count((*taken, *asked))
        return rooms.fit(shape)

    def _ask(self, shape: Shape, key: Key, rooms: _Rooms) -> list[Loan] | None:
        """The loans to reclaim; None when they would not be enough."""
        mine = [loan for loan in self._loans if loan.priority <= -key[0] and loan.gang != key[2]]
        for highest in sorted({loan.priority for loan in mine}):
            pool = [loan for loan in mine if loan.priority <= highest]
            if rooms.enough(pool, shape):
                return _cheapest(pool, shape, rooms)
        return None

    def _count(self, loans: Iterable[Loan], sign: int = 1) -> None:
        for loan in loans:
            self._add(loan.node, loan.returns, sign)

    def _promise(self, shape: Shape, nodes: Sequence[str]) -> None:
        for task, name in zip(shape.tasks, nodes, strict=True):
            self._add(name, task, -1)

    def _add(self, node: str, amount: Amount, sign: int) -> None:
        coming = self._coming.setdefault(node, [0, 0, 0])
        for resource, value in enumerate(amount):
            coming[resource] += sign * value


class _Rooms:
    """What a waiting request would find on its nodes. Loans are added and removed on trial."""

    def __init__(
        self,
        fields: Sequence[Sequence[NodeAccount]],
        coming: Mapping[str, Sequence[int]],
        kept: Mapping[str, Sequence[int]],
    ) -> None:
        self._fields = [[Room.of(node) for node in field] for field in fields]
        self._rooms = {room.name: room for field in self._fields for room in field}
        self._left: dict[str, list[int]] = {}
        """The same before negative amounts become zero: a node may have promised or lost more than it has."""
        for node in (node for field in fields for node in field):
            more, less = coming.get(node.name, _NOTHING), kept.get(node.name, _NOTHING)
            self._left[node.name] = [
                node.total.cpu - node.used_cpu + more[0] - less[0],
                node.total.memory - node.used_memory + more[1] - less[1],
                node.gpu + more[2] - less[2],
            ]
            self._cut(node.name)

    def fit(self, shape: Shape) -> list[str] | None:
        return place_in_one(shape, self._fields)

    def enough(self, loans: Sequence[Loan], shape: Shape) -> bool:
        self.add(loans)
        fits = self.fit(shape) is not None
        self.add(loans, -1)
        return fits

    def add(self, loans: Iterable[Loan], sign: int = 1) -> None:
        for loan in loans:
            left = self._left.get(loan.node)
            if left is not None:
                for resource, value in enumerate(loan.returns):
                    left[resource] += sign * value
                self._cut(loan.node)

    def _cut(self, name: str) -> None:
        room, (cpu, memory, gpu) = self._rooms[name], self._left[name]
        room.cpu, room.memory, room.gpu = max(0, cpu), max(0, memory), max(0, gpu)


def _cheapest(pool: list[Loan], shape: Shape, rooms: _Rooms) -> list[Loan]:
    """The cheapest sufficient set of loans: searched in one gang, on one node, and in the whole pool."""
    gangs: dict[str, list[Loan]] = {}
    nodes: dict[str, list[Loan]] = {}
    for loan in pool:
        gangs.setdefault(loan.gang, []).append(loan)
        nodes.setdefault(loan.node, []).append(loan)
    best: list[Loan] = []
    tries = TRIES
    for part in (*gangs.values(), *nodes.values()):
        tries -= bool(best)
        if len(best) == 1 or not tries:
            break
        if rooms.enough(part, shape):
            needed = _needed(part, shape, rooms)
            best = min(best, needed, key=_cost) if best else needed
    return best or _needed(pool, shape, rooms)


def _needed(pool: list[Loan], shape: Shape, rooms: _Rooms) -> list[Loan]:
    """The loans of the pool that are needed; the last in order are spared first. Whole blocks before single loans."""
    spared: set[Loan] = set()
    blocks = [pool[::-1]]
    rooms.add(pool)
    while blocks:
        block = blocks.pop()
        rooms.add(block, -1)
        if rooms.fit(shape) is not None:
            spared.update(block)
            continue
        rooms.add(block)
        if len(block) > 1:
            half = len(block) // 2
            blocks += [block[half:], block[:half]]
    needed = [loan for loan in pool if loan not in spared]
    rooms.add(needed, -1)
    return needed


def _next_key(bucket: Bucket, key: Key) -> Key | None:
    """The key after it in the same bucket."""
    rank = bucket.keys.rank(key) + 1
    return bucket.keys.at(rank) if rank < len(bucket.keys) else None


def _cost(loans: Sequence[Loan]) -> tuple[int, int, tuple[Loan, ...]]:
    return len({loan.gang for loan in loans}), len(loans), tuple(loans)


def _added(before: Mapping[int, str], after: Mapping[int, str]) -> dict[str, list[int]]:
    """The tasks that a gang is newly told to give back, by the request that asks."""
    found: dict[str, list[int]] = {}
    for index in sorted(after.keys() - before.keys()):
        found.setdefault(after[index], []).append(index)
    return found
