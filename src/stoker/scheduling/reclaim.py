"""What is on loan comes back when somebody waits for it.

Whoever waits may have back what is on loan to those of its own priority or a lower one: extras are a loan, not a
possession, so it does not matter who came first. A higher priority keeps what it has.

All who wait are looked at in their order. Each is given, on paper, what is free and what already comes back for it.
If that is not enough, those are asked whose tasks would make it enough: the lowest priority first; then as few gangs
as possible, because each has to form anew; then as few tasks as possible; then the newest gang and its last tasks.
Nobody is asked where it would not be enough, and nobody twice: what comes back is promised to the one for whom it was
asked, until one before it in the queue needs it more.

This is a plan, and nothing is held by it: who starts where is decided when the room is really there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from stoker.scheduling.holders import Holders
from stoker.scheduling.holding import Holding
from stoker.scheduling.ledger import Ledger, Node
from stoker.scheduling.model import Amount, Place, Shape, Shrink
from stoker.scheduling.placement import Room, place_in_one
from stoker.scheduling.queue import Bucket, Key, Queue
from stoker.scheduling.reserve import Reserve

TRIES = 32
"""How many ways to ask are compared once one is known. Each costs a placement or a few."""


class Loan(NamedTuple):
    """A task that could be given back, or is about to be. Sorts in the order in which they are asked."""

    priority: int
    newest: int
    """Its gang's place in the order of submission, negative."""
    gang: str
    last: int
    """Its number, negative."""
    node: str
    returns: Amount

    @property
    def task(self) -> int:
        return -self.last


def shrink(holders: Holders, queue: Queue, ledger: Ledger) -> list[Shrink]:
    """Who is told to give back what, and for whom."""
    holdings = holders.elastic()
    told = {holding.request.id: holding.giving for holding in holdings}
    for holding in holdings:
        holding.giving = {**holding.giving, **dict.fromkeys(holding.too_many(), "")}
    if any(holding.giving or holding.on_loan() for holding in holdings):
        heads = [(bucket.keys.first(), bucket) for bucket in queue.buckets.values()]
        heads += holders.incomplete()
        giving = _Plan(ledger, holdings).walk(heads, lambda id: id in queue or id in holders.short)
        for holding in holdings:
            holding.giving = giving[holding.request.id]
    shrinks = []
    for holding in holdings:
        id = holding.request.id
        news = _news(told[id], holding.giving)
        shrinks += [Shrink(id, tuple(tasks), asker) for asker, tasks in news.items()]
        holding.may_grow = holding.may_grow and not news
    return shrinks


class _Plan:
    def __init__(self, ledger: Ledger, holdings: Sequence[Holding]) -> None:
        self._ledger = ledger
        self._coming: dict[str, list[int]] = {}
        """What will be on each node beyond what is left there now: more by what is given back, less by what is
        promised."""
        self._reserve = Reserve(ledger, self._view)
        self._giving = {holding.request.id: dict(holding.giving) for holding in holdings}
        self._pending: dict[str, list[Loan]] = {}
        """What comes back and is not counted yet, by who asked."""
        self._loans: list[Loan] = []
        for holding in holdings:
            places = dict(zip(holding.indexes, ledger.places(holding.request.id), strict=True))
            for index, asker in sorted(holding.giving.items()):
                self._pending.setdefault(asker, []).append(self._loan(holding, index, places[index]))
            self._loans += [self._loan(holding, index, places[index]) for index in holding.on_loan()]
        open_nodes = {node.name for node in ledger.open}
        self._loans = sorted(loan for loan in self._loans if loan.node in open_nodes)

    def _loan(self, holding: Holding, index: int, place: Place) -> Loan:
        request = holding.request
        task = request.tasks[index].amount()
        returns = Amount(task.cpu, task.memory, self._ledger.node(place.node).would_return(place.gpus))
        return Loan(request.priority, -request.seq, request.id, -index, place.node, returns)

    def walk(
        self, heads: Iterable[tuple[Key, Bucket]], waits: Callable[[str], bool]
    ) -> dict[str, dict[int, str]]:
        """Everyone who waits, in order, as `Scheduler.decide` does; only on paper. `heads`: the first of each kind.
        Returns for each gang the tasks it is to give back, old and new, with who asks."""
        waiting = [(key, number, bucket) for number, (key, bucket) in enumerate(heads)]
        heapify(waiting)
        for asker in [asker for asker in self._pending if not waits(asker)]:
            self._count(self._pending.pop(asker))  # nobody waits for it any more: it is for all
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
        """Where it could go with what is there, with what comes back, and with what it asks for."""
        asker = key[2]
        self._count(self._pending.pop(asker, ()))
        nodes = self._fit(shape, key)
        if nodes is not None:
            return nodes
        behind = [loan for loans in self._pending.values() for loan in loans]
        self._count(behind)
        asked: list[Loan] | None = [] if self._fit(shape, key) is not None else self._ask(shape, key)
        if asked is None:
            self._count(behind, -1)
            return None
        self._count(asked)
        used = set(self._fit(shape, key) or ())
        self._count([loan for loan in behind if loan.node not in used], -1)
        for loan in behind:
            if loan.node in used:
                self._pending[self._giving[loan.gang][loan.task]].remove(loan)
                self._giving[loan.gang][loan.task] = asker
        for loan in asked:
            self._giving[loan.gang][loan.task] = asker
            self._loans.remove(loan)
        return self._fit(shape, key)

    def _ask(self, shape: Shape, key: Key) -> list[Loan] | None:
        """Whom to ask; None when it would not be enough."""
        mine = [loan for loan in self._loans if loan.priority <= -key[0] and loan.gang != key[2]]
        for highest in sorted({loan.priority for loan in mine}):
            pool = [loan for loan in mine if loan.priority <= highest]
            if self._enough(pool, shape, key):
                return self._cheapest(pool, shape, key)
        return None

    def _cheapest(self, pool: list[Loan], shape: Shape, key: Key) -> list[Loan]:
        best: list[Loan] = []
        tries = TRIES
        gangs = list(dict.fromkeys(loan.gang for loan in pool))
        nodes = list(dict.fromkeys(loan.node for loan in pool))
        parts = [[loan for loan in pool if loan.gang == gang] for gang in gangs]
        parts += [[loan for loan in pool if loan.node == node] for node in nodes]
        for part in parts:
            tries -= bool(best)
            if len(best) == 1 or not tries:
                break
            if self._enough(part, shape, key):
                needed = self._needed(part, shape, key)
                best = min(best, needed, key=_cost) if best else needed
        return best or self._needed(pool, shape, key)

    def _needed(self, pool: list[Loan], shape: Shape, key: Key) -> list[Loan]:
        """Those of them that are needed; who is asked last is spared first."""
        needed = list(pool)
        for loan in reversed(pool):
            rest = [other for other in needed if other is not loan]
            if self._enough(rest, shape, key):
                needed = rest
        return needed

    def _enough(self, loans: Sequence[Loan], shape: Shape, key: Key) -> bool:
        self._count(loans)
        fits = self._fit(shape, key) is not None
        self._count(loans, -1)
        return fits

    def _fit(self, shape: Shape, key: Key) -> list[str] | None:
        return place_in_one(shape, self._reserve.fields(shape.domains, key))

    def _view(self, node: Node) -> Room:
        room = Room.of(node)
        coming = self._coming.get(node.name)
        if coming:
            room.cpu = max(0, node.total.cpu - node.used_cpu + coming[0])
            room.memory = max(0, node.total.memory - node.used_memory + coming[1])
            room.gpu = max(0, node.gpu + coming[2])
        return room

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


def _next_key(bucket: Bucket, key: Key) -> Key | None:
    """Who comes after it among its equals."""
    rank = bucket.keys.rank(key) + 1
    return bucket.keys.at(rank) if rank < len(bucket.keys) else None


def _cost(loans: Sequence[Loan]) -> tuple[int, int, tuple[Loan, ...]]:
    return len({loan.gang for loan in loans}), len(loans), tuple(loans)


def _news(before: Mapping[int, str], after: Mapping[int, str]) -> dict[str, list[int]]:
    """The tasks a gang is told about now, by who asks."""
    found: dict[str, list[int]] = {}
    for index in sorted(after.keys() - before.keys()):
        found.setdefault(after[index], []).append(index)
    return found
