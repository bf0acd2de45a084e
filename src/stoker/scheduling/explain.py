"""Why a request waits, and whether it could ever start: the same facts the decisions use, put into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stoker.errors import NotFound
from stoker.scheduling.ledger import Ledger, Node
from stoker.scheduling.model import (
    RESOURCES,
    Amount,
    Ask,
    Explanation,
    Holder,
    NodeShape,
    Request,
    Shape,
    Shortage,
    Verdict,
    amounts,
    in_units,
    say,
)
from stoker.scheduling.placement import Room, place, times
from stoker.scheduling.queue import Bucket, Queue, key_of
from stoker.scheduling.reserve import feasible


def explain(id: str, queue: Queue, ledger: Ledger) -> Explanation:
    if ledger.holds(id):
        places = ledger.places(id)
        nodes = ", ".join(sorted({place.node for place in places}))
        return Explanation(id, "held", f"has its resources on {nodes}", places=places)
    request = queue.get(id)
    if request is None:
        raise NotFound(f"{id} is neither queued nor running here")
    return replace(_queued(request, queue, ledger), position=queue.position(request), queued=len(queue))


def _queued(request: Request, queue: Queue, ledger: Ledger) -> Explanation:
    bucket = queue.bucket(request)
    if not feasible(bucket, ledger):
        return Explanation(request.id, "impossible", _impossible(request, ledger))
    behind = _behind(request, bucket, queue, ledger)
    if place(bucket.shape, ledger.open) is None:
        short = _shortages(bucket.shape, ledger)
        holders = _holders(bucket.shape, {shortage.resource for shortage in short}, ledger)
        reason = _waiting(short, holders, behind)
        return Explanation(request.id, "waiting", reason, short=short, holders=holders, behind=behind)
    if behind is not None:
        reason = f"what it asks for is kept for {behind}, which is before it"
        return Explanation(request.id, "waiting", reason, behind=behind)
    return Explanation(request.id, "starting", "starts at the next decision")


def verdict(asks: Sequence[Ask], nodes: Sequence[NodeShape]) -> Verdict:
    if not nodes:
        return Verdict(False, "there are no nodes")
    totals = [node.amount() for node in nodes]
    tasks = amounts(asks)
    for index, task in enumerate(tasks):
        reason, resource = _too_big(task, totals)
        if reason:
            return Verdict(False, reason, index, resource)
    rooms = [
        Room(node.name, total.cpu, total.memory, total.gpu, total.gpu)
        for node, total in sorted(zip(nodes, totals, strict=True), key=lambda pair: pair[0].name)
    ]
    if place(Shape(tasks), rooms) is None:
        return Verdict(False, _together(tasks, rooms))
    return Verdict(True)


def _too_big(task: Amount, totals: Sequence[Amount]) -> tuple[str, str | None]:
    for position in (2, 0, 1):  # GPUs first: they are what people look for
        resource = RESOURCES[position]
        largest = max(total[position] for total in totals)
        if task[position] > largest:
            asked, has = in_units(resource, task[position]), in_units(resource, largest)
            return f"asks for {say(resource, asked)}; the largest node has {_bare(resource, has)}", resource
    if not any(_within(task, total) for total in totals):
        return f"asks for {_list(task)} on one node; no node has all of it", None
    return "", None


def _together(tasks: Sequence[Amount], rooms: Sequence[Room]) -> str:
    if len(set(tasks)) == 1:
        fit = sum(times(tasks[0], room, len(tasks)) for room in rooms)
        return f"asks for {len(tasks)} tasks of {_list(tasks[0])} at once; all nodes together hold {fit}"
    total = Amount(*(sum(column) for column in zip(*tasks, strict=True)))
    return f"asks for {len(tasks)} tasks with {_list(total)} in all; they do not fit the nodes together"


def _impossible(request: Request, ledger: Ledger) -> str:
    shapes = ledger.shapes()
    ever = verdict(request.asks, shapes)
    if not ever.ok:
        return ever.reason
    away = sorted(shape.name for shape in shapes if not shape.ready)
    return f"would fit if all nodes were ready; not ready: {', '.join(away)}"


def _behind(request: Request, bucket: Bucket, queue: Queue, ledger: Ledger) -> str | None:
    """The first in the queue before it that could want the same resource on the same node."""
    seen: set[int] = set()
    for other in queue:
        if key_of(other) >= key_of(request):
            return None
        theirs = queue.bucket(other)
        if theirs is bucket:
            return other.id
        if (
            id(theirs) not in seen
            and feasible(theirs, ledger)
            and _compete(bucket.shape, theirs.shape, ledger)
        ):
            return other.id
        seen.add(id(theirs))
    return None


def _compete(one: Shape, other: Shape, ledger: Ledger) -> bool:
    for node in ledger.open:
        mine, theirs = _wanted(one, node), _wanted(other, node)
        if any(a and b for a, b in zip(mine, theirs, strict=True)):
            return True
    return False


def _wanted(shape: Shape, node: Node) -> Amount:
    tasks = [task for task, _ in shape.groups if _within(task, node.total)]
    return Amount(sum(t.cpu for t in tasks), sum(t.memory for t in tasks), sum(t.gpu for t in tasks))


def _shortages(shape: Shape, ledger: Ledger) -> tuple[Shortage, ...]:
    """Place what fits; then, of the first task that does not, what is missing where it is missing least."""
    rooms = [Room.of(node) for node in ledger.open]
    totals = {node.name: node.total for node in ledger.open}
    for task, indexes in shape.groups:
        for _ in indexes:
            fitting = next((room for room in rooms if times(task, room, 1)), None)
            if fitting is None:
                nearest = min(
                    (room for room in rooms if _within(task, totals[room.name])),
                    key=lambda room: (*_missing(task, room, totals[room.name]), room.name),
                )
                return tuple(
                    Shortage(resource, in_units(resource, asked), in_units(resource, free), nearest.name)
                    for resource, asked, free in zip(
                        RESOURCES, task, (nearest.cpu, nearest.memory, nearest.gpu), strict=True
                    )
                    if asked > free
                )
            fitting.take(task)
    return ()


def _missing(task: Amount, room: Room, total: Amount) -> tuple[int, float]:
    """How many resources are short, and by what share of the node."""
    shares = [
        (asked - free) / has
        for asked, free, has in zip(task, (room.cpu, room.memory, room.gpu), total, strict=True)
        if asked > free
    ]
    return len(shares), sum(shares)


def _holders(shape: Shape, resources: set[str], ledger: Ledger) -> tuple[Holder, ...]:
    held: dict[tuple[str, str], int] = {}
    for node in ledger.open:
        if not any(_within(task, node.total) for task, _ in shape.groups):
            continue
        for holder, amount in ledger.on_node(node.name):
            for resource, value in zip(RESOURCES, amount, strict=True):
                if value and resource in resources:
                    held[holder, resource] = held.get((holder, resource), 0) + value
    found = [Holder(id, resource, in_units(resource, value)) for (id, resource), value in held.items()]
    return tuple(sorted(found, key=lambda holder: (holder.resource, -holder.amount, holder.id)))


def _waiting(short: Sequence[Shortage], holders: Sequence[Holder], behind: str | None) -> str:
    if not short:
        return "its tasks do not fit what is free together"
    missing = " and ".join(say(shortage.resource, shortage.short) for shortage in short)
    text = f"short of {missing} on {short[0].node}"
    names = list(dict.fromkeys(holder.id for holder in holders))
    if names:
        text += f", held by {', '.join(names[:3])}" + (
            f" and {len(names) - 3} more" if len(names) > 3 else ""
        )
    return text + (f"; {behind} is before it" if behind else "")


def _within(task: Amount, total: Amount) -> bool:
    return task.cpu <= total.cpu and task.memory <= total.memory and task.gpu <= total.gpu


def _list(amount: Amount) -> str:
    asked = [say(name, in_units(name, value)) for name, value in zip(RESOURCES, amount, strict=True) if value]
    return " and ".join(asked) or "nothing"


def _bare(resource: str, amount: float) -> str:
    return say(resource, amount).removesuffix(" of memory") if resource == "memory" else f"{amount:g}"
