"""All allocations, with their places in the ledger. Only this module changes both together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stoker.scheduling.allocation import Allocation
from stoker.scheduling.ledger import Ledger
from stoker.scheduling.model import Amount, Held, Place, Request, Shape, amounts
from stoker.scheduling.queue import Bucket
from stoker.scheduling.reservations import Reservations


class Allocations:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._all: dict[str, Allocation] = {}
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
        self._all[held.request.id].restore(held)

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
        self._elastic.discard(id)
        return True

    def give_back(self, allocation: Allocation, gone: frozenset[int]) -> None:
        """Releases the places of these tasks."""
        before = self._places(allocation)
        if gone.isdisjoint(before):
            return
        domain = self._ledger.domain_of(tuple(before.values()))
        allocation.domain = allocation.domain if domain is None else domain
        allocation.giving = {index: asker for index, asker in allocation.giving.items() if index not in gone}
        self._keep(allocation, {index: place for index, place in before.items() if index not in gone})

    def reserve(self, waiting: Iterable[Bucket]) -> Reservations:
        """What is reserved for all of these buckets."""
        reserve = Reservations(self._ledger)
        for bucket in waiting:
            reserve.block(bucket)
        return reserve

    def add(
        self, allocation: Allocation, nodes: Mapping[int, str], avoid: frozenset[str]
    ) -> dict[int, Place]:
        """Adds tasks on these nodes and returns their places."""
        tasks = allocation.request.tasks
        given = amounts([tasks[index] for index in nodes])
        more = dict(zip(nodes, self._ledger.choose(given, list(nodes.values()), avoid), strict=True))
        self._keep(allocation, {**self._places(allocation), **more})
        return more

    def _places(self, allocation: Allocation) -> dict[int, Place]:
        return dict(zip(allocation.indexes, self._ledger.places(allocation.request.id), strict=True))

    def _keep(self, allocation: Allocation, places: Mapping[int, Place]) -> None:
        allocation.indexes = tuple(sorted(places))
        self.hold(allocation, tuple(places[index] for index in allocation.indexes))

    def _hold(self, allocation: Allocation, places: tuple[Place, ...], tasks: tuple[Amount, ...]) -> None:
        id = allocation.request.id
        self._ledger.hold(id, tasks, places)
        self._all[id] = allocation
        if allocation.request.extra:
            self._elastic.add(id)
