"""All that hold: their tasks, and the places of these in the ledger. The only one who changes both together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stoker.scheduling.allocation import Allocation
from stoker.scheduling.ledger import Ledger
from stoker.scheduling.model import Amount, Held, Place, Request, Shape, amounts, form_of
from stoker.scheduling.placement import Space, place_in_one
from stoker.scheduling.queue import FIRST, LAST, Bucket, Key, Queue, key_of
from stoker.scheduling.reservations import Reservations


class Allocations:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._all: dict[str, Allocation] = {}
        self.short: set[str] = set()
        """Those of them that wait for a new place for a task."""
        self._elastic: set[str] = set()
        """Those that may have more than they need."""

    def get(self, id: str) -> Allocation | None:
        return self._all.get(id)

    def elastic(self) -> list[Allocation]:
        return [self._all[id] for id in sorted(self._elastic)] if self._elastic else []

    def snapshot(self) -> tuple[Held, ...]:
        return tuple(holding.held(self._ledger.places(id)) for id, holding in sorted(self._all.items()))

    def restore(self, held: Held) -> None:
        """All of one that holds that is not its places."""
        holding = self._all[held.request.id]
        holding.restore(held)
        self._note(holding)

    def incomplete(self) -> Iterator[tuple[Key, Bucket]]:
        """Those that lost a task for which there was no room, as one who waits for it before all others."""
        for id in sorted(self.short):
            holding = self._all[id]
            asks = [holding.request.tasks[index] for index in sorted(holding.lost)]
            bucket = Bucket(Shape(form_of(asks, self.domains(holding))))
            bucket.keys.add(FIRST)
            yield key_of(holding.request), bucket

    def domains(self, holding: Allocation) -> tuple[str, ...]:
        """Where more of its tasks may go: to the others."""
        domain = self._ledger.domain_of(self._ledger.places(holding.request.id))
        domain = holding.domain if domain is None else domain
        return holding.request.domains if domain is None else (domain,)

    # -- changes ---------------------------------------------------------------------------------------------

    def start(self, request: Request, shape: Shape, places: tuple[Place, ...]) -> None:
        self._hold(Allocation(request, shape.indexes), places, shape.tasks)

    def hold(self, holding: Allocation, places: tuple[Place, ...]) -> None:
        """It has exactly this from now on."""
        self._ledger.release(holding.request.id)
        self._hold(holding, places, amounts(holding.asks))

    def release(self, id: str) -> bool:
        """Whether it held anything."""
        if not self._ledger.release(id):
            return False
        del self._all[id]
        self.short.discard(id)
        self._elastic.discard(id)
        return True

    def give_back(self, holding: Allocation, gone: frozenset[int], *, for_good: bool) -> None:
        """The places of these tasks. They wait for no other."""
        self._drop(holding, gone)
        holding.lost -= gone
        if for_good:
            holding.done |= gone.intersection(range(len(holding.request.tasks)))
        self._note(holding)

    def replace(self, holding: Allocation, index: int, avoid: frozenset[str], queue: Queue) -> Place | None:
        """Another place for this task: for one it needs wherever one is free, for an extra where nobody waits for it.
        None: there is none, and one that it needs waits for it."""
        self._drop(holding, frozenset({index}))
        holding.done -= {index}
        needed = holding.needs(index)
        shape = Shape(form_of([holding.request.tasks[index]], self.domains(holding), avoid))
        fields: Iterable[Sequence[Space]] = self._ledger.fields(shape.domains)
        if not needed:
            fields = self.reserve(queue.buckets.values()).fields(shape.domains, LAST)
        nodes = place_in_one(shape, fields)
        given = {} if nodes is None else self.add(holding, {index: nodes[0]}, avoid)
        if needed and nodes is None:
            holding.lost |= {index}
        self._note(holding)
        return given.get(index)

    def reserve(self, waiting: Iterable[Bucket]) -> Reservations:
        """What is kept for those that miss a task, and for all of these."""
        reserve = Reservations(self._ledger)
        for bucket in (*[bucket for _, bucket in self.incomplete()], *waiting):
            reserve.block(bucket)
        return reserve

    def add(self, holding: Allocation, nodes: Mapping[int, str], avoid: frozenset[str]) -> dict[int, Place]:
        """Further tasks on these nodes, where there is room. Which places that makes."""
        tasks = holding.request.tasks
        given = amounts([tasks[index] for index in nodes])
        more = dict(zip(nodes, self._ledger.choose(given, list(nodes.values()), avoid), strict=True))
        holding.lost -= more.keys()
        self._keep(holding, {**self._places(holding), **more})
        return more

    def _places(self, holding: Allocation) -> dict[int, Place]:
        return dict(zip(holding.indexes, self._ledger.places(holding.request.id), strict=True))

    def _drop(self, holding: Allocation, gone: frozenset[int]) -> None:
        before = self._places(holding)
        if gone.isdisjoint(before):
            return
        domain = self._ledger.domain_of(tuple(before.values()))
        holding.domain = holding.domain if domain is None else domain
        holding.giving = {index: asker for index, asker in holding.giving.items() if index not in gone}
        self._keep(holding, {index: place for index, place in before.items() if index not in gone})

    def _keep(self, holding: Allocation, places: Mapping[int, Place]) -> None:
        holding.indexes = tuple(sorted(places))
        self.hold(holding, tuple(places[index] for index in holding.indexes))

    def _hold(self, holding: Allocation, places: tuple[Place, ...], tasks: tuple[Amount, ...]) -> None:
        id = holding.request.id
        self._ledger.hold(id, tasks, places)
        self._all[id] = holding
        if holding.request.extra:
            self._elastic.add(id)

    def _note(self, holding: Allocation) -> None:
        if holding.lost:
            self.short.add(holding.request.id)
        else:
            self.short.discard(holding.request.id)
