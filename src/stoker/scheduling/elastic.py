"""Who gets more than it needs: what nobody else can use, shared out fairly.

It is shared out after everybody who could start has started, from what is free beyond the reserve of all who wait,
whatever their priority. So nobody who waits starts later because somebody else grew.

It goes task by task to the highest priority, there to who has the fewest beyond its need, there to the first in
order. So two that grow together end with as many each, as far as the room allows.
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
"""(-priority, tasks beyond its need, seq, id): who comes first."""


class Wish:
    """One that would like more tasks, and what it gets."""

    __slots__ = ("_extras", "_missing", "_refused", "domains", "got", "holding", "in_order")

    def __init__(self, holding: Allocation, domains: tuple[str, ...], in_order: bool = False) -> None:
        self.holding = holding
        self.domains = domains
        """The one where its other tasks are. More or none: it is not known yet, and nothing is given."""
        self.in_order = in_order
        """The first that does not fit is the last: its tasks are numbered without gaps."""
        self.got: dict[int, str] = {}
        """The node of each further task."""
        self._missing = holding.wanted()
        self._extras = len(holding.indexes) - len(holding.request.asks)
        self._refused: set[Ask] = set()

    @property
    def turn(self) -> Turn:
        request = self.holding.request
        return (-request.priority, self._extras + len(self.got), request.seq, request.id)

    def serve(self, rooms: Sequence[Room]) -> bool:
        """Take one task more out of these rooms, if one fits."""
        tasks = self.holding.request.tasks
        while self._missing:
            index = self._missing.pop(0)
            ask = tasks[index]
            if ask in self._refused:
                continue
            nodes = place_in_one(Shape(form_of([ask], (), self.holding.request.avoid)), [rooms])
            if nodes is not None:
                self.got[index] = nodes[0]
                next(room for room in rooms if room.name == nodes[0]).take(ask.amount())
                return True
            self._refused.add(ask)
            if self.in_order:
                self._missing.clear()
        return False

    def fulfil(self, holders: Allocations) -> dict[int, Place]:
        """It has what it got from now on."""
        return holders.add(self.holding, self.got, self.holding.request.avoid) if self.got else {}


def grow(holders: Allocations, queue: Queue) -> list[Grow]:
    """Those that may grow, and with what."""
    wishes = wishes_of(holders)
    if not wishes:
        return []
    share_out(wishes, holders.reserve(queue.buckets.values()))
    grown = []
    for wish in wishes:
        given = wish.fulfil(holders)
        if given:
            wish.holding.may_grow = False
            grown.append(Grow(wish.holding.request.id, tuple(given), tuple(given.values())))
    return grown


def wishes_of(holders: Allocations) -> list[Wish]:
    """Of all that may grow."""
    return [Wish(holding, holders.domains(holding)) for holding in holders.elastic() if holding.may_grow]


def share_out(wishes: Sequence[Wish], reserve: Reservations) -> None:
    """Fill in what each gets. `reserve` knows all who wait."""
    turns = [(wish.turn, wish) for wish in wishes if len(wish.domains) == 1]
    heapify(turns)
    rooms: dict[tuple[str, ...], list[Room]] = {}
    while turns:
        _, wish = turns[0]
        if wish.domains not in rooms:
            fields = list(reserve.fields(wish.domains, LAST))
            rooms[wish.domains] = fields[0] if fields else []
        if wish.serve(rooms[wish.domains]):
            heapreplace(turns, (wish.turn, wish))
        else:
            heappop(turns)
