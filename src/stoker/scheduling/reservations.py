"""What is reserved for waiting requests, so that requests which overtake them never delay them.

A blocked shape could one day run on every open node whose capacity and tags take one of its tasks. The node's domain
must be able to hold all of them. On such a node it could use at most as many tasks as wait, or as the node can hold.
That much of each resource it asks for is reserved there; where less is free, all of it. What a later request takes
beyond that is never what the blocked one lacks. Releases only add to what is free, so on that node enough of that
resource stays free until the blocked request starts.

In a domain that could not hold the shape even when empty, nothing is reserved: that would only make nodes idle. So a
request that waits for GPUs of one cluster takes nothing from requests that run in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stoker.scheduling.ledger import Ledger, NodeAccount
from stoker.scheduling.model import Shape
from stoker.scheduling.placement import Room, place, times, within
from stoker.scheduling.queue import Bucket, Key, Term

MANY = 1 << 30
"""More tasks than any queue holds."""


def whole(node: NodeAccount) -> Room:
    """The node as it is when empty."""
    return Room(node.name, node.total.cpu, node.total.memory, node.total.gpu, node.total.gpu, node.tags)


def claim(bucket: Bucket, ledger: Ledger) -> Sequence[Term]:
    """What a shape may come to use; nothing where it would not fit on empty nodes. Cached until the nodes change."""
    if bucket.terms_at != ledger.layout:
        shape = bucket.shape
        bucket.terms = tuple(term for field in fitting_fields(shape, ledger) for term in _terms(shape, field))
        bucket.terms_at = ledger.layout
    return bucket.terms


def fitting_fields(shape: Shape, ledger: Ledger) -> list[list[NodeAccount]]:
    """The open nodes of each domain in which the shape would fit if they were empty."""
    fields = ledger.fields(shape.domains)
    return [field for field in fields if place(shape, [whole(node) for node in field]) is not None]


def _terms(shape: Shape, nodes: Sequence[NodeAccount]) -> Iterator[Term]:
    for task, among, indexes in shape.groups:
        for node in within(among, nodes):
            most = times(task, whole(node), MANY)
            if most:
                yield Term(node.name, task, len(indexes), most)


class Reservations:
    """What the blocked buckets of one pass reserve against the requests behind them. Lives for one pass, during which
    the capacity of nodes must not change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._blocked: list[_Blocked] = []
        self._kept: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._blocked)

    def block(self, bucket: Bucket) -> None:
        terms = claim(bucket, self._ledger)
        if terms:
            self._blocked.append(_Blocked(bucket, terms))

    def fields(self, domains: tuple[str, ...], before: Key) -> Iterator[list[Room]]:
        """What is free in each of these domains for a request at this place in the queue, after the reservations of
        all blocked requests before it."""
        self.kept(before)
        return map(self._rooms, self._ledger.fields(domains))

    def kept(self, before: Key) -> Mapping[str, Sequence[int]]:
        """What the blocked requests before this place in the queue reserve on each node. Places may only increase."""
        for blocked in self._blocked:
            self._keep(blocked, before)
        return self._kept

    def _rooms(self, nodes: Sequence[NodeAccount]) -> list[Room]:
        rooms = []
        for node in nodes:
            room = Room.of(node)
            kept = self._kept.get(node.name)
            if kept:
                room.cpu = max(0, room.cpu - kept[0])
                room.memory = max(0, room.memory - kept[1])
                room.gpu = max(0, room.gpu - kept[2])
            rooms.append(room)
        return rooms

    def _keep(self, blocked: _Blocked, before: Key) -> None:
        if blocked.full:
            return
        then, now = blocked.count, blocked.bucket.keys.rank(before)
        if then == now:
            return
        blocked.count, blocked.full = now, True
        for name, task, each, most in blocked.terms:
            more = min(now * each, most) - min(then * each, most)
            blocked.full = blocked.full and now * each >= most
            if more:
                kept = self._kept.setdefault(name, [0, 0, 0])
                kept[0] += more * task.cpu
                kept[1] += more * task.memory
                kept[2] += more * task.gpu


class _Blocked:
    """A bucket that is blocked in this pass, and how many of its requests are counted."""

    __slots__ = ("bucket", "count", "full", "terms")

    def __init__(self, bucket: Bucket, terms: Sequence[Term]) -> None:
        self.bucket = bucket
        self.terms = terms
        self.count = 0
        """Number of its requests that are counted."""
        self.full = False
        """Whether further requests of it would reserve no more."""
