"""The machine: events in, decisions out. No clock, no randomness, no I/O.

The policy. Requests start in order of priority, then of submission; all tasks of one or none. One that does
not fit is blocked, and those behind it may overtake as long as they take nothing that could delay it (see
`reserve`). All tasks of one request go into one domain, the first it prefers that has room for all of them; where
a task goes there is best fit (see `placement`).

What makes it incremental: a pass is needed only after something changed, and looks at one head per bucket of
equal shapes. While nothing was given back, only what was enqueued since the last pass can start. None of what
is remembered for speed changes a decision: a scheduler rebuilt from a snapshot decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from stoker.errors import Conflict
from stoker.scheduling import explain as explaining
from stoker.scheduling.ledger import Ledger
from stoker.scheduling.model import (
    Ask,
    Explanation,
    Held,
    NodeShape,
    Place,
    Request,
    Snapshot,
    Start,
    Verdict,
    amounts,
)
from stoker.scheduling.placement import place_in_one
from stoker.scheduling.queue import Bucket, Key, Queue
from stoker.scheduling.reserve import Reserve
from stoker.scheduling.verdict import ever_fits


class Scheduler:
    """Who waits, who holds what, and who starts next.

    Not thread-safe: one owner calls it. Every method but `decide` may be repeated without harm, so events may
    be delivered more than once. A request is queued or held or neither, never both.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._queue = Queue()
        self._requests: dict[str, Request] = {}
        """Of those who hold."""
        self._stale = False
        """Anything in the queue may have become able to start."""
        self._fresh: list[Bucket] = []
        """Otherwise only the newest of these buckets may: enqueued since the last decision."""

    # -- events ----------------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Sequence[NodeShape]) -> None:
        """These are the nodes now. What is placed stays placed, even where it is now more than there is."""
        if tuple(sorted(nodes, key=lambda node: node.name)) != self._ledger.shapes():
            self._ledger.set_nodes(nodes)
            self._stale = True

    def enqueue(self, request: Request) -> None:
        """Wait for a start. Known and equal: nothing happens. Known with another priority or other asks: the
        new one takes its place. One that holds something is not queued before it is released."""
        if self._ledger.holds(request.id):
            return
        known = self._queue.get(request.id)
        if known == request:
            return
        if known is not None:
            self.withdraw(request.id)
        self._fresh.append(self._queue.add(request))

    def adopt(self, request: Request, places: Sequence[Place]) -> None:
        """It already holds this (after a restart): recorded as it is, whether or not it fits."""
        _check_number(request, places)
        self.withdraw(request.id)
        self.release(request.id)
        self._hold(request, tuple(places))

    def move(self, id: str, places: Sequence[Place]) -> tuple[Place, ...]:
        """What it holds is really here, whatever was decided: another scheduler chose. Believed as it is, whether
        or not it fits. A place that names no GPUs for a task that has some keeps those it had there, or is given
        free ones (none on a node that is not known yet: repeat it then). Returns what it holds now; nothing when
        it is not known to hold anything."""
        request = self._requests.get(id)
        if request is None:
            return ()
        _check_number(request, places)
        before = self._ledger.places(id)
        now = [old if new == Place(old.node) else new for old, new in zip(before, places, strict=True)]
        counted = all(len(place.gpus) == ask.gpu for ask, place in zip(request.asks, now, strict=True))
        if counted and before == tuple(now):
            return before
        self._ledger.release(id)
        self._hold(request, self._ledger.name_gpus(amounts(request.asks), now))
        self._stale = True
        return self._ledger.places(id)

    def withdraw(self, id: str) -> None:
        """Out of the queue. Unknown is fine."""
        if self._queue.remove(id) is not None:
            self._stale = True  # what was kept for it is free for others

    def release(self, id: str) -> None:
        """Give back what it holds. Unknown is fine."""
        if self._ledger.release(id):
            del self._requests[id]
            self._stale = True

    # -- decisions -------------------------------------------------------------------------------------------

    def decide(self) -> list[Start]:
        """Everything that starts now, in order; it counts as held from here on."""
        fresh, self._fresh = self._fresh, []
        if not self._stale and not any(self._fits_free(bucket) for bucket in fresh):
            return []
        self._stale = False
        starts: list[Start] = []
        reserve = Reserve(self._ledger)
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
        return starts

    def can_ever_fit(self, asks: Sequence[Ask], domains: tuple[str, ...] = ()) -> Verdict:
        """Whether such a request could start if it were alone. Nodes that are not ready count: they return."""
        return ever_fits(asks, domains, self._ledger.shapes())

    def explain(self, id: str) -> Explanation:
        """Why it waits, as things stand after the last decision. Raises NotFound when it is not known."""
        return explaining.explain(id, self._queue, self._ledger)

    def holds(self, id: str) -> bool:
        """Whether it was started and not released yet."""
        return self._ledger.holds(id)

    def position(self, id: str) -> int | None:
        """Its place in the queue, from 1; None when it does not wait. Cheap: asked for whole pages of runs."""
        request = self._queue.get(id)
        return None if request is None else self._queue.position(request)

    # -- the whole state -------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            nodes=self._ledger.shapes(),
            queued=tuple(self._queue),
            held=tuple(
                Held(request, self._ledger.places(id)) for id, request in sorted(self._requests.items())
            ),
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Scheduler:
        scheduler = cls()
        scheduler.set_nodes(snapshot.nodes)
        for held in snapshot.held:
            scheduler.adopt(held.request, held.places)
        for request in snapshot.queued:
            scheduler.enqueue(request)
        return scheduler

    # -- how -------------------------------------------------------------------------------------------------

    def _any_room(self) -> bool:
        """Whether any node has room for the least that anyone waits for."""
        least = self._queue.least()
        return any(
            node.cpu >= least.cpu and node.memory >= least.memory and node.gpu >= least.gpu
            for node in self._ledger.open
        )

    def _fits_free(self, bucket: Bucket) -> bool:
        return bool(bucket.keys) and self._nodes_in_free(bucket) is not None

    def _nodes_for(self, bucket: Bucket, key: Key, reserve: Reserve) -> list[str] | None:
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
        places = self._ledger.choose(bucket.shape.tasks, nodes)
        self._hold(request, places)
        return Start(request.id, places)

    def _hold(self, request: Request, places: tuple[Place, ...]) -> None:
        self._ledger.hold(request.id, amounts(request.asks), places)
        self._requests[request.id] = request


def _check_number(request: Request, places: Sequence[Place]) -> None:
    if len(places) != len(request.asks):
        raise Conflict(
            f"{request.id} has {len(request.asks)} tasks and holds {len(places)} places",
            hint="Give one place for each task.",
        )
