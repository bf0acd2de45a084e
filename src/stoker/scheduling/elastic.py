"""Which elastic requests get more tasks than they need, from resources that no waiting request can use.

Resources are shared out after every request that can start has started, from what is free beyond the reservations of
all waiting requests of any priority. So no waiting request starts later because another one grew.

The next task goes to the highest priority, then to the request with the fewest extra tasks, then to the first in
order. So two requests that grow together end with equally many, as far as there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from stoker.scheduling.allocation import Allocation
from stoker.scheduling.allocations import Allocations
from stoker.scheduling.model import Ask, Grow, Place, Shape, form_of
from stoker.scheduling.placement import Room, place_in_one
from stoker.scheduling.queue import LAST, Queue
from stoker.scheduling.reservations import Reservations

Turn = tuple[int, int, int, str]
"""(-priority, tasks beyond its need, seq, id): the order of growing."""


class GrowthRequest:
    """A request that wants more tasks, and the ones it gets."""

    __slots__ = ("_extras", "_missing", "_refused", "allocation", "domains", "got", "in_order")

    def __init__(self, allocation: Allocation, domains: tuple[str, ...], in_order: bool = False) -> None:
        self.allocation = allocation
        self.domains = domains
        """The domain of its other tasks. More or none: not known yet, so it gets nothing."""
        self.in_order = in_order
        """Stops at the first task that does not fit, so that its tasks are numbered without gaps."""
        self.got: dict[int, str] = {}
        """Further task -> node."""
        self._missing = allocation.wanted()
        self._extras = len(allocation.indexes) - len(allocation.request.asks)
        self._refused: set[Ask] = set()

    @property
    def turn(self) -> Turn:
        request = self.allocation.request
        return (-request.priority, self._extras + len(self.got), request.seq, request.id)

    def take_one(self, rooms: Sequence[Room]) -> bool:
        """Takes one more task from these rooms, if one fits."""
        tasks = self.allocation.request.tasks
        while self._missing:
            index = self._missing.pop(0)
            ask = tasks[index]
            if ask in self._refused:
                continue
            nodes = place_in_one(Shape(form_of([ask], (), self.allocation.request.avoid)), [rooms])
            if nodes is not None:
                self.got[index] = nodes[0]
                next(room for room in rooms if room.name == nodes[0]).take(ask.amount())
                return True
            self._refused.add(ask)
            if self.in_order:
                self._missing.clear()
        return False

    def apply(self, allocations: Allocations) -> dict[int, Place]:
        """Adds what it got to its allocation."""
        return allocations.add(self.allocation, self.got, self.allocation.request.avoid) if self.got else {}


def grow(allocations: Allocations, queue: Queue) -> list[Grow]:
    """The requests that grow, and their new tasks."""
    requests = growth_requests(allocations)
    if not requests:
        return []
    share_out(requests, allocations.reserve(queue.buckets.values()))
    grown = []
    for request in requests:
        given = request.apply(allocations)
        if given:
            request.allocation.may_grow = False
            grown.append(Grow(request.allocation.request.id, tuple(given), tuple(given.values())))
    return grown


def growth_requests(allocations: Allocations) -> list[GrowthRequest]:
    """One for each allocation that may grow."""
    return [
        GrowthRequest(allocation, allocations.domains(allocation))
        for allocation in allocations.elastic()
        if allocation.may_grow
    ]


def share_out(requests: Sequence[GrowthRequest], reserve: Reservations) -> None:
    """Fills in what each request gets. `reserve` holds all waiting requests."""
    turns = [(request.turn, request) for request in requests if len(request.domains) == 1]
    heapify(turns)
    rooms: dict[tuple[str, ...], list[Room]] = {}
    while turns:
        _, request = turns[0]
        if request.domains not in rooms:
            fields = list(reserve.fields(request.domains, LAST))
            rooms[request.domains] = fields[0] if fields else []
        if request.take_one(rooms[request.domains]):
            heapreplace(turns, (request.turn, request))
        else:
            heappop(turns)
