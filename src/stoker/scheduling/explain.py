"""Why a request waits: the facts that decisions use, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stoker.errors import NotFound
from stoker.scheduling.allocation import Allocation
from stoker.scheduling.allocations import Allocations
from stoker.scheduling.feasibility import ever_fits, fits_whole, scope
from stoker.scheduling.ledger import Ledger, NodeAccount
from stoker.scheduling.model import (
    RESOURCES,
    Amount,
    Explanation,
    Group,
    Holder,
    Place,
    Request,
    Shape,
    Shortage,
    amount_text,
    in_units,
    may_use,
    task_name,
    task_names,
)
from stoker.scheduling.placement import Room, place_in_one, times, within
from stoker.scheduling.queue import Bucket, Queue, Term, key_of
from stoker.scheduling.reservations import claim, fitting_fields


def explain(id: str, queue: Queue, ledger: Ledger, allocations: Allocations) -> Explanation:
    allocation = allocations.get(id)
    if allocation is not None:
        places = ledger.places(id)
        return Explanation(id, "held", _holds(allocation, places), places=places)
    request = queue.get(id)
    if request is None:
        raise NotFound(f"{id} is neither queued nor running")
    found = _queued(request, queue, ledger)
    if found.state == "waiting":
        found = replace(found, reason=found.reason + _given_back_for(id, allocations))
    return replace(found, position=queue.position(request), queued=len(queue))


def _holds(allocation: Allocation, places: Sequence[Place]) -> str:
    request = allocation.request
    nodes = ", ".join(sorted({place.node for place in places})) or "no node"
    text = f"has its resources on {nodes}"
    if request.extra:
        text = f"has {len(places)} of up to {request.most} tasks on {nodes}"
    if allocation.giving:
        askers = ", ".join(sorted({asker for asker in allocation.giving.values() if asker}))
        given = task_names(request.tasks, sorted(allocation.giving))
        text += f"; gives back {given}" + (f" for {askers}" if askers else "")
    return text


def _given_back_for(id: str, allocations: Allocations) -> str:
    """Which requests give back tasks for it."""
    given = {
        allocation.request.id: list(allocation.giving.values()).count(id)
        for allocation in allocations.elastic()
        if id in allocation.giving.values()
    }
    return "".join(
        f"; {gang} gives back {count} task{'s' if count > 1 else ''} for it" for gang, count in given.items()
    )


def _queued(request: Request, queue: Queue, ledger: Ledger) -> Explanation:
    bucket = queue.bucket(request)
    if not claim(bucket, ledger):
        return Explanation(request.id, "impossible", _impossible(request, ledger))
    behind = _behind(request, bucket, queue, ledger)
    if place_in_one(bucket.shape, ledger.fields(bucket.shape.domains)) is None:
        shortfall = _nearest_shortfall(bucket.shape, ledger)
        short = () if shortfall is None else shortfall.short
        holders = _holders(claim(bucket, ledger), {shortage.resource for shortage in short}, ledger)
        reason = _waiting(request, shortfall, holders, behind)
        return Explanation(request.id, "waiting", reason, short=short, holders=holders, behind=behind)
    if behind is not None:
        reason = f"what it asks for is reserved for {behind}, which comes first"
        return Explanation(request.id, "waiting", reason, behind=behind)
    return Explanation(request.id, "starting", "starts at the next decision")


def _impossible(request: Request, ledger: Ledger) -> str:
    shapes = ledger.shapes()
    ever = ever_fits(request.asks, request.domains, shapes)
    if not ever.ok:
        return ever.reason
    away = sorted(
        shape.name
        for shape in shapes
        if not shape.ready
        and (not request.domains or shape.domain in request.domains)
        and any(may_use(ask.among, shape.tags) for ask in request.asks)
    )
    return f"would fit if all nodes were ready; not ready: {', '.join(away)}"


def _behind(request: Request, bucket: Bucket, queue: Queue, ledger: Ledger) -> str | None:
    """The first request before it in the queue that could use the same resource on the same node."""
    seen: set[int] = set()
    mine = _wanted(claim(bucket, ledger))
    for other in queue:
        if key_of(other) >= key_of(request):
            return None
        theirs = queue.bucket(other)
        if theirs is bucket or (id(theirs) not in seen and _overlap(mine, claim(theirs, ledger))):
            return other.id
        seen.add(id(theirs))
    return None


def _wanted(terms: Sequence[Term]) -> set[tuple[str, int]]:
    """Node and resource (by number) of everything it could use."""
    return {(term.node, resource) for term in terms for resource, value in enumerate(term.task) if value}


def _overlap(wanted: set[tuple[str, int]], terms: Sequence[Term]) -> bool:
    return any(
        value and (term.node, resource) in wanted
        for term in terms
        for resource, value in enumerate(term.task)
    )


class _Shortfall(NamedTuple):
    """What one task misses on the node where it misses least."""

    distance: tuple[int, float]
    short: tuple[Shortage, ...]
    where: str
    """Pool and cluster of that node, where there are others."""
    task: int
    """Number of the task."""
    fitting: int
    """How many tasks fit there now."""


def _nearest_shortfall(shape: Shape, ledger: Ledger) -> _Shortfall | None:
    """In the domain where least is missing. None: each task fits alone, and only all together do not."""
    known = {node.domain for node in ledger.shapes()}
    shortfalls = [_shortfall(shape, field, known) for field in fitting_fields(shape, ledger)]
    return min(
        (shortfall for shortfall in shortfalls if shortfall is not None),
        key=lambda shortfall: shortfall.distance,
        default=None,
    )


def _shortfall(shape: Shape, nodes: Sequence[NodeAccount], known: set[str]) -> _Shortfall | None:
    """Places the tasks that fit, then examines the first one that does not."""
    rooms = [Room.of(node) for node in nodes]
    fitting = 0
    first: tuple[Group, int, Sequence[Room]] | None = None
    for group in shape.groups:
        eligible = within(group.among, rooms)
        for index in group.indexes:
            room = next((room for room in eligible if times(group.task, room, 1)), None)
            if room is None:
                first = first or (group, index, [Room.of(space) for space in eligible])
                break
            room.take(group.task)
            fitting += 1
    if first is None:
        return None
    group, index, eligible = first
    totals = {node.name: node.total for node in nodes}
    domain = nodes[0].shape.domain if nodes[0].shape is not None else ""
    distance, short = _nearest(group, eligible, totals)
    return _Shortfall(distance, short, scope(group.among, [domain], known), index, fitting)


def _nearest(
    group: Group, rooms: Sequence[Room], totals: Mapping[str, Amount]
) -> tuple[tuple[int, float], tuple[Shortage, ...]]:
    distance, name, room = min(
        (_missing(group.task, room, totals[room.name]), room.name, room)
        for room in rooms
        if fits_whole(group.task, totals[room.name])
    )
    short = tuple(
        Shortage(resource, in_units(resource, asked), in_units(resource, free), name)
        for resource, asked, free in zip(
            RESOURCES, group.task, (room.cpu, room.memory, room.gpu), strict=True
        )
        if asked > free
    )
    return distance, short


def _missing(task: Amount, room: Room, total: Amount) -> tuple[int, float]:
    """How many resources are short, and by what share of the node."""
    shares = [
        (asked - free) / has
        for asked, free, has in zip(task, (room.cpu, room.memory, room.gpu), total, strict=True)
        if asked > free
    ]
    return len(shares), sum(shares)


def _holders(terms: Sequence[Term], resources: set[str], ledger: Ledger) -> tuple[Holder, ...]:
    held: dict[tuple[str, str], int] = {}
    for name in sorted({term.node for term in terms}):
        for holder, amount in ledger.on_node(name):
            for resource, value in zip(RESOURCES, amount, strict=True):
                if value and resource in resources:
                    held[holder, resource] = held.get((holder, resource), 0) + value
    found = [Holder(id, resource, in_units(resource, value)) for (id, resource), value in held.items()]
    return tuple(sorted(found, key=lambda holder: (holder.resource, -holder.amount, holder.id)))


def _waiting(
    request: Request, shortfall: _Shortfall | None, holders: Sequence[Holder], behind: str | None
) -> str:
    if shortfall is None:
        return "its tasks fit one by one, but not together, into what is free"
    missing = " and ".join(amount_text(shortage.resource, shortage.short) for shortage in shortfall.short)
    text = f"short of {missing}"
    if len(request.asks) > 1:
        name = task_name(request.asks, shortfall.task)
        text = f"{shortfall.fitting} of {len(request.asks)} tasks fit now; {name} lacks {missing}"
    text += f" on {shortfall.short[0].node}" + (f" of {shortfall.where}" if shortfall.where else "")
    names = list(dict.fromkeys(holder.id for holder in holders))
    if names:
        text += f", held by {', '.join(names[:3])}" + (
            f" and {len(names) - 3} more" if len(names) > 3 else ""
        )
    return text + (f"; {behind} comes first" if behind else "")
