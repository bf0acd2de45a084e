"""All allocations, with their places in the ledger. Only this module changes both together."""

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
        """Requests with a task that waits for a new place."""
        self._elastic: set[str] = set()
        """Requests that may have more tasks than they need."""

    def get(self, id: str) -> Allocation | None:
        return self._all.get(id)

    def elastic(self) -> list[Allocation]:
        return [self._all[id] for id in sorted(self._elastic)] if self._elastic else []

    def snapshot(self) -> tuple[Held, ...]:
        return tuple(allocation.held(self._ledger.places(id)) for id, allocation in sorted(self._all.items()))

    def restore(self, held: Held) -> None:
        """Restores everything of an allocation but its places."""
        allocation = self._all[held.request.id]
        allocation.restore(held)
        self._note(allocation)

    def incomplete(self) -> Iterator[tuple[Key, Bucket]]:
        """Requests with a lost task that found no room, each as one that waits before all others."""
        for id in sorted(self.short):
            allocation = self._all[id]
            asks = [allocation.request.tasks[index] for index in sorted(allocation.lost)]
            bucket = Bucket(Shape(form_of(asks, self.domains(allocation))))
            bucket.keys.add(FIRST)
            yield key_of(allocation.request), bucket

    def domains(self, allocation: Allocation) -> tuple[str, ...]:
        """The domains for more of its tasks: that of the others."""
        domain = self._ledger.domain_of(self._ledger.places(allocation.request.id))
        domain = allocation.domain if domain is None else domain
        return allocation.request.domains if domain is None else (domain,)

    # -- changes ---------------------------------------------------------------------------------------------

    def start(self, request: Request, shape: Shape, places: tuple[Place, ...]) -> None:
        self._hold(Allocation(request, shape.indexes), places, shape.tasks)

    def hold(self, allocation: Allocation, places: tuple[Place, ...]) -> None:
        """Sets what it holds to exactly this."""
        self._ledger.release(allocation.request.id)
        self._hold(allocation, places, amounts(allocation.asks))

    def release(self, id: str) -> bool:
        """Releases it. Returns whether it held anything."""
        if not self._ledger.release(id):
            return False
        del self._all[id]
        self.short.discard(id)
        self._elastic.discard(id)
        return True

    def give_back(self, allocation: Allocation, gone: frozenset[int], *, for_good: bool) -> None:
        """Releases the places of these tasks, which wait for no other."""
        self._drop(allocation, gone)
        allocation.lost -= gone
        if for_good:
            allocation.done |= gone.intersection(range(len(allocation.request.tasks)))
        self._note(allocation)

    def replace(
        self, allocation: Allocation, index: int, avoid: frozenset[str], queue: Queue
    ) -> Place | None:
        """Another place for this task: for one it needs wherever one is free, for an extra where nobody waits for it.
        None: there is none, and one that it needs waits for it."""
        self._drop(allocation, frozenset({index}))
        allocation.done -= {index}
        needed = allocation.needs(index)
        shape = Shape(form_of([allocation.request.tasks[index]], self.domains(allocation), avoid))
        fields: Iterable[Sequence[Space]] = self._ledger.fields(shape.domains)
        if not needed:
            fields = self.reserve(queue.buckets.values()).fields(shape.domains, LAST)
        nodes = place_in_one(shape, fields)
        given = {} if nodes is None else self.add(allocation, {index: nodes[0]}, avoid)
        if needed and nodes is None:
            allocation.lost |= {index}
        self._note(allocation)
        return given.get(index)

    def reserve(self, waiting: Iterable[Bucket]) -> Reservations:
        """What is reserved for allocations that miss a task, and for all of these buckets."""
        reserve = Reservations(self._ledger)
        for bucket in (*[bucket for _, bucket in self.incomplete()], *waiting):
            reserve.block(bucket)
        return reserve

    def add(
        self, allocation: Allocation, nodes: Mapping[int, str], avoid: frozenset[str]
    ) -> dict[int, Place]:
        """Adds tasks on these nodes and returns their places."""
        tasks = allocation.request.tasks
        given = amounts([tasks[index] for index in nodes])
        more = dict(zip(nodes, self._ledger.choose(given, list(nodes.values()), avoid), strict=True))
        allocation.lost -= more.keys()
        self._keep(allocation, {**self._places(allocation), **more})
        return more

    def _places(self, allocation: Allocation) -> dict[int, Place]:
        return dict(zip(allocation.indexes, self._ledger.places(allocation.request.id), strict=True))

    def _drop(self, allocation: Allocation, gone: frozenset[int]) -> None:
        before = self._places(allocation)
        if gone.isdisjoint(before):
            return
        domain = self._ledger.domain_of(tuple(before.values()))
        allocation.domain = allocation.domain if domain is None else domain
        allocation.giving = {index: asker for index, asker in allocation.giving.items() if index not in gone}
        self._keep(allocation, {index: place for index, place in before.items() if index not in gone})

    def _keep(self, allocation: Allocation, places: Mapping[int, Place]) -> None:
        allocation.indexes = tuple(sorted(places))
        self.hold(allocation, tuple(places[index] for index in allocation.indexes))

    def _hold(self, allocation: Allocation, places: tuple[Place, ...], tasks: tuple[Amount, ...]) -> None:
        id = allocation.request.id
        self._ledger.hold(id, tasks, places)
        self._all[id] = allocation
        if allocation.request.extra:
            self._elastic.add(id)

    def _note(self, allocation: Allocation) -> None:
        if allocation.lost:
            self.short.add(allocation.request.id)
        else:
            self.short.discard(allocation.request.id)
