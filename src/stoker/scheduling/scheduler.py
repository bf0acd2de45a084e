"""The machine: events in, decisions out. No clock, no randomness, no I/O.

The policy. Requests start in order of priority, then of submission; all tasks of one or none. One that does
not fit is blocked, and those behind it may overtake as long as they take nothing that could delay it (see
`reserve`). All tasks of one request go into one domain, the first it prefers that has room for all of them; where
a task goes there is best fit (see `placement`).

Some would like more tasks than they need (`Request.extra`). These are on loan, out of what is left when everybody who
could start has started and everybody who waits has his reserve (see `elastic`); and they come back when somebody
waits who could start with them (see `reclaim`).

One that holds may give back some of its tasks (`release_part`) or ask for a new place for one (`replace`). A gang
that misses a task holds the rest for nothing, so it comes before all who wait, and what it could use is kept for it.

What makes it incremental: a pass is needed only after something changed, and looks at one head per bucket of
equal shapes. While nothing was given back, only what was enqueued since the last pass can start. None of what
is remembered for speed changes a decision: a scheduler rebuilt from a snapshot decides the same.
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
    """Who waits, who holds what, and who starts next.

    Not thread-safe: one owner calls it. Events may be delivered more than once: to repeat one does no harm.
    Decisions are told once. A request is queued or held or neither, never both.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._queue = Queue()
        self._holders = Allocations(self._ledger)
        self._unsettled = False
        """Something among those who hold may have to change."""
        self._hungry: list[str] = []
        """Those that start in this decision and would like more than they need."""
        self._stale = False
        """Anything in the queue may have become able to start."""
        self._fresh: list[Bucket] = []
        """Otherwise only the newest of these buckets may: enqueued since the last decision."""

    # -- events ----------------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Sequence[NodeShape]) -> None:
        """These are the nodes now. What is placed stays placed, even where it is now more than there is."""
        if tuple(sorted(nodes, key=lambda node: node.name)) != self._ledger.shapes():
            self._ledger.set_nodes(nodes)
            self._stale = self._unsettled = True

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
        self._unsettled = True

    def adopt(
        self,
        request: Request,
        places: Sequence[Place],
        indexes: Sequence[int] | None = None,
        leaving: Iterable[int] = (),
    ) -> None:
        """It already holds this (after a restart): recorded as it is, whether or not it fits. `indexes`: the tasks
        these places are for, where they are not the first ones. `leaving`: those of them that it was told to give
        back, and that it need not be told again."""
        holding = Allocation(request, tuple(range(len(places)) if indexes is None else sorted(indexes)))
        holding.check(places, whole=indexes is None)
        holding.giving = dict.fromkeys(sorted(set(leaving).intersection(holding.indexes)), "")
        self.withdraw(request.id)
        self.release(request.id)
        self._holders.hold(holding, tuple(_in_order(places, indexes)))
        self._unsettled = True

    def move(
        self, id: str, places: Sequence[Place], indexes: Sequence[int] | None = None
    ) -> tuple[Place, ...]:
        """What it holds is really here, whatever was decided: another scheduler chose. Believed as it is, whether
        or not it fits. A place that names no GPUs for a task that has some keeps those it had there, or is given
        free ones (none on a node that is not known yet: repeat it then). `indexes`: the tasks these places are for,
        where they are not all of them in order. Returns what they hold now; nothing when it is not known to hold
        anything."""
        holding = self._holders.get(id)
        if holding is None:
            return ()
        chosen = holding.indexes if indexes is None else tuple(indexes)
        holding.check_some(places, chosen)
        before, moved = self._ledger.places(id), dict(zip(chosen, places, strict=True))
        given = [(old, moved.get(at, old)) for at, old in zip(holding.indexes, before, strict=True)]
        now = [old if new == Place(old.node) else new for old, new in given]
        counted = all(len(place.gpus) == ask.gpu for ask, place in zip(holding.asks, now, strict=True))
        if not counted or before != tuple(now):
            self._ledger.release(id)
            self._holders.hold(holding, self._ledger.name_gpus(amounts(holding.asks), now))
            self._stale = self._unsettled = True
        found = dict(zip(holding.indexes, self._ledger.places(id), strict=True))
        return tuple(found[index] for index in chosen)

    def withdraw(self, id: str) -> None:
        """Out of the queue. Unknown is fine."""
        if self._queue.remove(id) is not None:
            self._stale = self._unsettled = True  # what was kept for it is free for others

    def release(self, id: str) -> None:
        """Give back what it holds. Unknown is fine."""
        if self._holders.release(id):
            self._stale = self._unsettled = True

    def release_part(self, id: str, indexes: Iterable[int], *, for_good: bool = False) -> None:
        """Give back the places of these tasks; the others keep theirs and their numbers. `for_good`: these tasks have
        ended, and are not to be given places again. What is not held is fine."""
        holding = self._holders.get(id)
        if holding is not None:
            self._holders.give_back(holding, frozenset(indexes), for_good=for_good)
            self._stale = self._unsettled = True

    def replace(self, id: str, index: int, avoid: frozenset[str] = frozenset()) -> Place | None:
        """A new place for a task that lost its own, which is given back first. Nodes by name and GPUs by `gpu_name` in
        `avoid` are used only where there is no room elsewhere.

        Without a task it needs, the rest of the gang is idle: that one comes before all who wait. None: there is no
        room; what it could use is kept for it. Ask again after each `decide`, or let it go with `release_part` (a
        smaller gang) or `release` (all of it). An extra comes after all who wait. None: it is given back, and
        `adjust` may bring it again."""
        holding = self._holders.get(id)
        if holding is None or not 0 <= index < len(holding.request.tasks):
            return None
        self._stale = self._unsettled = True
        return self._holders.replace(holding, index, holding.request.avoid | avoid, self._queue)

    def may_grow(self, id: str, yes: bool = True) -> None:
        """Whether it may be given more tasks at the next `adjust`. No one may until this is said, and each time it
        was told to grow or shrink it has to be said again: when it has settled. Unknown is fine."""
        holding = self._holders.get(id)
        if holding is not None and holding.may_grow != yes:
            holding.may_grow = yes
            self._unsettled = True

    def resize_gang(self, id: str, count: int) -> None:
        """It wants so many tasks from now on, among those it needs and those it may have. Unknown is fine."""
        holding, queued = self._holders.get(id), self._queue.get(id)
        request = holding.request if holding is not None else queued
        if request is None:
            return
        if not len(request.asks) <= count <= len(request.tasks):
            raise Conflict(
                f"{id} may have {len(request.asks)} to {len(request.tasks)} tasks, not {count}",
                hint="Submit it again with other numbers of workers.",
            )
        if holding is not None:
            holding.request = changed(request, size=count)
            self._unsettled = True
        else:
            self.enqueue(changed(request, size=count))

    # -- decisions -------------------------------------------------------------------------------------------

    def decide(self) -> list[Start]:
        """Everything that starts now, in order; it counts as held from here on."""
        fresh, self._fresh = self._fresh, []
        if not self._stale and not any(self._fits_free(bucket) for bucket in fresh):
            return []
        self._stale = False
        starts: list[Start] = []
        reserve = self._holders.reserve(()) if self._holders.short else Reservations(self._ledger)
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
        if not self._hungry:
            return starts
        for _, bucket in heads:
            reserve.block(bucket)
        return self._with_extras(starts, reserve)

    def adjust(self) -> list[Grow | Shrink]:
        """What changes among those who hold, as things stand after `decide`. What somebody gets counts as held from
        here on. What it is to give back is its own until `release_part`; it is not told twice, and grows no more
        until then."""
        if not self._unsettled:
            return []
        self._unsettled = False
        if not self._holders.elastic():
            return []
        told = reclaim.shrink(self._holders, self._queue, self._ledger)
        return [*told, *elastic.grow(self._holders, self._queue)]

    def can_ever_fit(self, asks: Sequence[Ask], domains: tuple[str, ...] = ()) -> Feasibility:
        """Whether such a request could start if it were alone. Nodes that are not ready count: they return."""
        return ever_fits(asks, domains, self._ledger.shapes())

    def explain(self, id: str) -> Explanation:
        """Why it waits, as things stand after the last decision. Raises NotFound when it is not known."""
        return explaining.explain(id, self._queue, self._ledger, self._holders)

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
            held=self._holders.snapshot(),
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Scheduler:
        scheduler = cls()
        scheduler.set_nodes(snapshot.nodes)
        for held in snapshot.held:
            scheduler.adopt(held.request, held.places, held.indexes or range(len(held.places)))
            scheduler._holders.restore(held)
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
        self._holders.start(request, bucket.shape, places)
        if request.extra:
            self._hungry.append(request.id)
        return Start(request.id, places)

    def _with_extras(self, starts: list[Start], reserve: Reservations) -> list[Start]:
        """The same with what they get beyond what they need. Those who hold and may grow have their share too, though
        they are told only in `adjust`: nobody gets more by coming later."""
        hungry, self._hungry = self._hungry, []
        holdings = [holding for holding in map(self._holders.get, hungry) if holding is not None]
        wishes = [elastic.Wish(found, self._holders.domains(found), in_order=True) for found in holdings]
        elastic.share_out([*wishes, *elastic.wishes_of(self._holders)], reserve)
        for wish in wishes:
            wish.fulfil(self._holders)
        return [Start(start.id, self._ledger.places(start.id)) for start in starts]


def _in_order(places: Sequence[Place], indexes: Sequence[int] | None) -> Sequence[Place]:
    """By the number of the task."""
    if indexes is None:
        return places
    return [place for _, place in sorted(zip(indexes, places, strict=True), key=lambda pair: pair[0])]
