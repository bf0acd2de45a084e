"""Whether a request could ever start. If not, the reason in words, with the restriction that causes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.scheduling.model import (
    ANYWHERE,
    RESOURCES,
    Amount,
    Ask,
    Feasibility,
    Group,
    NodeShape,
    Shape,
    amount_text,
    form_of,
    in_units,
    may_use,
)
from stoker.scheduling.placement import Room, place, times, within


def ever_fits(asks: Sequence[Ask], domains: tuple[str, ...], nodes: Sequence[NodeShape]) -> Feasibility:
    """Whether all tasks fit into one domain of these nodes when they are empty."""
    if not nodes:
        return Feasibility(False, "there are no nodes")
    shape = Shape(form_of(asks, domains))
    known = {node.domain for node in nodes}
    fields = _fields(domains, nodes)
    everywhere = [room for field in fields.values() for room in field]
    for group in sorted(shape.groups, key=lambda group: group.indexes):
        reason, resource = _too_big(group, scope(group.among, domains, known), everywhere)
        if reason:
            name = asks[group.indexes[0]].name if len(shape.groups) > 1 else ""
            return Feasibility(False, f"{name}: {reason}" if name else reason, group.indexes[0], resource)
    if all(place(shape, field) is None for field in fields.values()):
        return Feasibility(False, _together(shape, fields, known))
    return Feasibility(True)


def scope(among: frozenset[str], domains: Sequence[str], all_domains: Iterable[str]) -> str:
    """`pool a100 in cluster gpu-prod`. Empty where nothing is restricted: naming the only cluster would confuse
    users."""
    tags = [tag.removesuffix(":gpu").partition(":pool:") for tag in sorted(among)]
    pools = " or ".join(dict.fromkeys(f"pool {pool}" for _, _, pool in tags if pool))
    names = dict.fromkeys(domains or [cluster for cluster, _, _ in tags])
    clusters = "" if names.keys() >= set(all_domains) else " or ".join(f"cluster {name}" for name in names)
    return f"{pools} in {clusters}" if pools and clusters else pools or clusters


def fits_whole(task: Amount, total: Amount) -> bool:
    return task.cpu <= total.cpu and task.memory <= total.memory and task.gpu <= total.gpu


def _fields(domains: tuple[str, ...], nodes: Sequence[NodeShape]) -> dict[str, list[Room]]:
    """Empty nodes by domain, of the domains that the request may use."""
    fields: dict[str, list[Room]] = {}
    for node in sorted(nodes, key=lambda node: (node.domain, node.name)):
        if not domains or node.domain in domains:
            total = node.amount()
            room = Room(node.name, total.cpu, total.memory, total.gpu, total.gpu, node.tags)
            fields.setdefault(node.domain, []).append(room)
    return fields


def _too_big(group: Group, where: str, rooms: Sequence[Room]) -> tuple[str, str | None]:
    task = group.task
    totals = [Amount(room.cpu, room.memory, room.gpu) for room in rooms if may_use(group.among, room.tags)]
    if not totals:
        return f"there is no node of {where or 'this kind'} that takes it", None
    for position in (2, 0, 1):  # GPUs first: they are the scarce resource
        resource = RESOURCES[position]
        largest = max(total[position] for total in totals)
        if task[position] > largest:
            asked, has = amount_text(resource, in_units(resource, task[position])), _bare(resource, largest)
            if where:
                return f"no node of {where} has {asked}; the largest has {has}", resource
            return f"asks for {asked}; the largest node has {has}", resource
    if any(fits_whole(task, total) for total in totals):
        return "", None
    if where:
        return f"no node of {where} has {_list(task)} at once", None
    return f"asks for {_list(task)} on one node; no node has all of it", None


def _together(shape: Shape, fields: dict[str, list[Room]], known: set[str]) -> str:
    """The reason when each task fits somewhere and all together nowhere."""
    one_cluster = " in one cluster" if len(fields) > 1 else ""
    if len(shape.groups) > 1:
        total = Amount(*(sum(column) for column in zip(*shape.tasks, strict=True)))
        where = "" if one_cluster else _of(scope(ANYWHERE, shape.domains, known))
        asked = f"asks for {shape.size} tasks with {_list(total)} in all{one_cluster}"
        return f"{asked}; they do not fit the nodes{where} together"
    task, among, _ = shape.groups[0]
    asked = f"asks for {shape.size} tasks of {_list(task)} at once{one_cluster}"
    fits = {
        domain: sum(times(task, room, shape.size) for room in within(among, field))
        for domain, field in fields.items()
    }
    if one_cluster:
        roomiest = max(fits, key=lambda domain: fits[domain])
        return f"{asked}; the roomiest, {roomiest}, holds {fits[roomiest]}"
    (fit,) = fits.values()
    return f"{asked}; all nodes{_of(scope(among, shape.domains, known))} together hold {fit}"


def _of(where: str) -> str:
    return f" of {where}" if where else ""


def _list(amount: Amount) -> str:
    asked = [
        amount_text(name, in_units(name, value))
        for name, value in zip(RESOURCES, amount, strict=True)
        if value
    ]
    return " and ".join(asked) or "nothing"


def _bare(resource: str, amount: int) -> str:
    value = in_units(resource, amount)
    return amount_text(resource, value).removesuffix(" of memory") if resource == "memory" else f"{value:g}"
