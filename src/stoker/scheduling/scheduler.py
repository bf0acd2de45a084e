"""The scheduler: events in, decisions out. No clock, no randomness, no I/O.

The policy. Requests start in order of priority, then of submission; all tasks of a request or none. A request that
does not fit is blocked. Requests behind it may overtake it as long as they take nothing that could delay it (see
`reservations`). All tasks of a request go into one domain, the first preferred one with room for all of them. Within
it tasks are placed by best fit (see `placement`).

Elastic requests would like more tasks than they need (`Request.extra`). These are on loan, from what is left when
every request that can start has started and every waiting one has its reservation (see `elastic`). They are reclaimed
when a waiting request could start with them (see `reclaim`).

A request may give back some of its tasks (`release_part`).

A pass is incremental: it is needed only after a change, and it examines one head per bucket of equal shapes. While
nothing was given back, only requests enqueued since the last pass can start. Nothing that is cached changes a
decision: a scheduler rebuilt from a snapshot decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace as changed
from heapq import heapify, heappop, heapreplace

from stoker.errors import Conflict
from stoker.scheduling import elastic, reclaim
from stoker.scheduling import explain as explaining
from stoker.scheduling.allocation import Allocation
from stoker.scheduling.allocations import Allocations
from stoker.scheduling.feasibility import ever_fits
from stoker.scheduling.ledger import Ledger
from stoker.scheduling.model import (
    Ask,
    Explanation,
    Feasibility,
    Grow,
    NodeShape,
    Place,
    Request,
    Shrink,
    Snapshot,
    Start,
    amounts,
)
from stoker.scheduling.placement import place_in_one
from stoker.scheduling.queue import Bucket, Key, Queue
from stoker.scheduling.reservations import Reservations


class Scheduler:
    """Which requests wait, what each one holds, and which one starts next.

    Not thread-safe: one owner calls it. An event may be repeated without harm. Each decision is returned once. A
    request is queued or held or neither, never both.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._queue = Queue()
        self._allocations = Allocations(self._ledger)
        self._unsettled = False
        """Whether running requests may have to grow or shrink."""
        self._elastic_starts: list[str] = []
        """Requests that start in this decision and want more tasks than they need."""
        self._stale = False
        """Whether any request of the queue may now be able to start."""
        self._fresh: list[Bucket] = []
        """Buckets with requests enqueued since the last decision. Unless `_stale`, only these may start."""

    # -- events ----------------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Sequence[NodeShape]) -> None:
        """Sets the present nodes. Placed tasks stay placed, even where they exceed the node."""
        if tuple(sorted(nodes, key=lambda node: node.name)) != self._ledger.shapes():
            self._ledger.set_nodes(nodes)
            self._stale = self._unsettled = True

    def enqueue(self, request: Request) -> None:
        """Queues a request. An equal known request changes nothing; a known one with another priority or other asks is
        replaced. A request that holds something is not queued before it is released."""
        if self._ledger.holds(request.id):
            return
        known = self._queue.get(request.id)
        if known == request:
            return
        if known is not None:
            self.withdraw(request.id)
        self._fresh.append(self._queue.add(request))
        self._unsettled = True

    def adopt(
        self,
        request: Request,
        places: Sequence[Place],
        indexes: Sequence[int] | None = None,
        leaving: Iterable[int] = (),
    ) -> None:
        """Records what a request already holds (after a restart), whether or not it fits. `indexes`: the tasks of
        these places, where they are not the first ones. `leaving`: those of them that it was told to give back and
        need not be told again."""
        allocation = Allocation(request, tuple(range(len(places)) if indexes is None else sorted(indexes)))
        allocation.check(places, whole=indexes is None)
        allocation.giving = dict.fromkeys(sorted(set(leaving).intersection(allocation.indexes)), "")
        self.withdraw(request.id)
        self.release(request.id)
        self._allocations.hold(allocation, tuple(_in_order(places, indexes)))
        self._unsettled = True

    def move(
        self, id: str, places: Sequence[Place], indexes: Sequence[int] | None = None
    ) -> tuple[Place, ...]:
        """Records where a request really is, because another scheduler chose, whether or not it fits. A place without
        GPUs for a task that has some keeps its former GPUs there, or gets free ones. It gets none on an unknown node;
        repeat the call then. `indexes`: the tasks of these places, where they are not all tasks in order. Returns the
        places now; nothing for a request that is not known to hold anything."""
        allocation = self._allocations.get(id)
        if allocation is None:
            return ()
        chosen = allocation.indexes if indexes is None else tuple(indexes)
        allocation.check_some(places, chosen)
        before, moved = self._ledger.places(id), dict(zip(chosen, places, strict=True))
        given = [(old, moved.get(at, old)) for at, old in zip(allocation.indexes, before, strict=True)]
        now = [old if new == Place(old.node) else new for old, new in given]
        counted = all(len(place.gpus) == ask.gpu for ask, place in zip(allocation.asks, now, strict=True))
        if not counted or before != tuple(now):
            self._ledger.release(id)
            self._allocations.hold(allocation, self._ledger.name_gpus(amounts(allocation.asks), now))
            self._stale = self._unsettled = True
        found = dict(zip(allocation.indexes, self._ledger.places(id), strict=True))
        return tuple(found[index] for index in chosen)

    def withdraw(self, id: str) -> None:
        """Removes it from the queue. An unknown id is no error."""
        if self._queue.remove(id) is not None:
            self._stale = self._unsettled = True  # its reservation is free for others

    def release(self, id: str) -> None:
        """Gives back what it holds. An unknown id is no error."""
        if self._allocations.release(id):
            self._stale = self._unsettled = True

    def release_part(self, id: str, indexes: Iterable[int]) -> None:
        """Gives back the places of these tasks; the others keep theirs and their numbers. Tasks that hold nothing are
        no error."""
        allocation = self._allocations.get(id)
        if allocation is not None:
            self._allocations.give_back(allocation, frozenset(indexes))
            self._stale = self._unsettled = True

    def may_grow(self, id: str, yes: bool = True) -> None:
        """Whether it may get more tasks at the next `adjust`. Initially not, and after each growing or shrinking this
        has to be called again once it has settled. An unknown id is no error."""
        allocation = self._allocations.get(id)
        if allocation is not None and allocation.may_grow != yes:
            allocation.may_grow = yes
            self._unsettled = True

    def resize_gang(self, id: str, count: int) -> None:
        """Sets how many tasks it wants, between what it needs and what it may have. An unknown id is no error."""
        allocation, queued = self._allocations.get(id), self._queue.get(id)
        request = allocation.request if allocation is not None else queued
        if request is None:
            return
        if not len(request.asks) <= count <= len(request.tasks):
            raise Conflict(
                f"{id} may have {len(request.asks)} to {len(request.tasks)} tasks, not {count}",
                hint="Submit it again with another range of workers.",
            )
        if allocation is not None:
            allocation.request = changed(request, size=count)
            self._unsettled = True
        else:
            self.enqueue(changed(request, size=count))

    # -- decisions -------------------------------------------------------------------------------------------

    def decide(self) -> list[Start]:
        """All requests that start now, in order. They count as held from now on."""
        fresh, self._fresh = self._fresh, []
        if not self._stale and not any(self._fits_free(bucket) for bucket in fresh):
            return []
        self._stale = False
        starts: list[Start] = []
        reserve = Reservations(self._ledger)
        heads = [(bucket.keys.first(), bucket) for bucket in self._queue.buckets.values()]
        heapify(heads)
        while heads and self._any_room():
            key, bucket = heads[0]
            nodes = self._nodes_for(bucket, key, reserve)
            if nodes is None:
                reserve.block(bucket)
                heappop(heads)
                continue
            starts.append(self._start(key, bucket, nodes))
            if bucket.keys:
                heapreplace(heads, (bucket.keys.first(), bucket))
            else:
                heappop(heads)
        self._unsettled = self._unsettled or bool(starts)
        if not self._elastic_starts:
            return starts
        for _, bucket in heads:
            reserve.block(bucket)
        return self._with_extras(starts, reserve)

    def adjust(self) -> list[Grow | Shrink]:
        """How running requests change, as things stand after `decide`. A place that a request gets counts as held
        from now on. A place that it is to give back stays its own until `release_part`; it is not told twice, and
        does not grow until then."""
        if not self._unsettled:
            return []
        self._unsettled = False
        if not self._allocations.elastic():
            return []
        shrinks = reclaim.shrink(self._allocations, self._queue, self._ledger)
        return [*shrinks, *elastic.grow(self._allocations, self._queue)]

    def can_ever_fit(self, asks: Sequence[Ask], domains: tuple[str, ...] = ()) -> Feasibility:
        """Whether such a request could start on empty nodes. Nodes that are not ready count: they return."""
        return ever_fits(asks, domains, self._ledger.shapes())

    def explain(self, id: str) -> Explanation:
        """Why it waits, as things stand after the last decision. Raises NotFound for an unknown id."""
        return explaining.explain(id, self._queue, self._ledger, self._allocations)

    def holds(self, id: str) -> bool:
        """Whether it was started and not released yet."""
        return self._ledger.holds(id)

    def position(self, id: str) -> int | None:
        """Its place in the queue, from 1; None when it does not wait. Cheap: called for whole pages of runs."""
        request = self._queue.get(id)
        return None if request is None else self._queue.position(request)

    # -- the whole state -------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            nodes=self._ledger.shapes(),
            queued=tuple(self._queue),
            held=self._allocations.snapshot(),
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Scheduler:
        scheduler = cls()
        scheduler.set_nodes(snapshot.nodes)
        for held in snapshot.held:
            scheduler.adopt(held.request, held.places, held.indexes or range(len(held.places)))
            scheduler._allocations.restore(held)
        for request in snapshot.queued:
            scheduler.enqueue(request)
        return scheduler

    # -- internals -------------------------------------------------------------------------------------------

    def _any_room(self) -> bool:
        """Whether any node has room for the smallest waiting task."""
        least = self._queue.least()
        return any(
            node.cpu >= least.cpu and node.memory >= least.memory and node.gpu >= least.gpu
            for node in self._ledger.open
        )

    def _fits_free(self, bucket: Bucket) -> bool:
        return bool(bucket.keys) and self._nodes_in_free(bucket) is not None

    def _nodes_for(self, bucket: Bucket, key: Key, reserve: Reservations) -> list[str] | None:
        nodes = self._nodes_in_free(bucket)
        if nodes is None or not reserve:
            return nodes
        return place_in_one(bucket.shape, reserve.fields(bucket.shape.domains, key))

    def _nodes_in_free(self, bucket: Bucket) -> list[str] | None:
        if bucket.unfit_at == self._ledger.growth:
            return None
        nodes = place_in_one(bucket.shape, self._ledger.fields(bucket.shape.domains))
        if nodes is None:
            bucket.unfit_at = self._ledger.growth
        return nodes

    def _start(self, key: Key, bucket: Bucket, nodes: list[str]) -> Start:
        request = self._queue.remove(key[2])
        assert request is not None, "a key in a bucket belongs to a queued request"
        places = self._ledger.choose(bucket.shape.tasks, nodes, bucket.shape.avoid)
        self._allocations.start(request, bucket.shape, places)
        if request.extra:
            self._elastic_starts.append(request.id)
        return Start(request.id, places)

    def _with_extras(self, starts: list[Start], reserve: Reservations) -> list[Start]:
        """The starts with the extras that they get. Running requests that may grow take part, though `adjust` tells
        them later, so that no request gets more by the order of calls."""
        elastic_starts, self._elastic_starts = self._elastic_starts, []
        started = [
            allocation for allocation in map(self._allocations.get, elastic_starts) if allocation is not None
        ]
        requests = [
            elastic.GrowthRequest(found, self._allocations.domains(found), in_order=True) for found in started
        ]
        elastic.share_out([*requests, *elastic.growth_requests(self._allocations)], reserve)
        for request in requests:
            request.apply(self._allocations)
        return [Start(start.id, self._ledger.places(start.id)) for start in starts]


def _in_order(places: Sequence[Place], indexes: Sequence[int] | None) -> Sequence[Place]:
    """By the number of the task."""
    if indexes is None:
        return places
    return [place for _, place in sorted(zip(indexes, places, strict=True), key=lambda pair: pair[0])]
