"""What is kept for those who wait, so that whoever overtakes them never delays them.

A blocked shape could one day stand on every open node whose capacity and tags take one of its tasks, in every
domain that would hold all of them, and there it
could use at most so many tasks as wait, or as the node's capacity holds. That much of each resource it asks
for is set aside on each such node; where less is free, all of it is. What a later request takes beyond that
is never what the blocked one lacks: releases only add to what is free, so on that node and for that resource
enough stays free until the blocked one starts.

In a domain that would not hold the shape even when it is empty nothing is set aside: there it would only make
nodes idle. So one that waits for GPUs of one cluster keeps nothing from those that run in another.
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
    """A node as it would be with nothing on it."""
    return Room(node.name, node.total.cpu, node.total.memory, node.total.gpu, node.total.gpu, node.tags)


def claim(bucket: Bucket, ledger: Ledger) -> Sequence[Term]:
    """What a shape may come to use; nothing where it would not fit if nothing were held. Remembered until nodes
    change."""
    if bucket.terms_at != ledger.layout:
        shape = bucket.shape
        bucket.terms = tuple(term for field in holding(shape, ledger) for term in _terms(shape, field))
        bucket.terms_at = ledger.layout
    return bucket.terms


def holding(shape: Shape, ledger: Ledger) -> list[list[NodeAccount]]:
    """The open nodes of each domain in which the shape would fit if nothing were held."""
    fields = ledger.fields(shape.domains)
    return [field for field in fields if place(shape, [whole(node) for node in field]) is not None]


def _terms(shape: Shape, nodes: Sequence[NodeAccount]) -> Iterator[Term]:
    for task, among, indexes in shape.groups:
        for node in within(among, nodes):
            most = times(task, whole(node), MANY)
            if most:
                yield Term(node.name, task, len(indexes), most)


class Reservations:
    """What the blocked buckets of one pass keep from those behind them. Lives for one pass; the capacity of
    nodes must not change meanwhile."""

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
        """What is free in each of these domains to a request at this place in the queue, after everyone blocked
        before it."""
        self.kept(before)
        return map(self._rooms, self._ledger.fields(domains))

    def kept(self, before: Key) -> Mapping[str, Sequence[int]]:
        """What everyone blocked before this place in the queue keeps of each node. Places only go forward."""
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
    """A bucket that is blocked in this pass, and how far it is taken into account."""

    __slots__ = ("bucket", "count", "full", "terms")

    def __init__(self, bucket: Bucket, terms: Sequence[Term]) -> None:
        self.bucket = bucket
        self.terms = terms
        self.count = 0
        """So many of its requests."""
        self.full = False
        """More of its requests would not keep more."""
