"""The nodes and their tasks, for users."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from stoker.control.context import Context
from stoker.control.fleet import FleetMember
from stoker.control.placement.node_health import NodeHealth
from stoker.control.state import LiveRun, LiveTask
from stoker.engine.base import Node
from stoker.scheduling import Aside
from stoker.spec.states import HOLDING


def nodes(ctx: Context, health: NodeHealth) -> list[dict[str, Any]]:
    """One pass over the runs for all nodes: there may be thousands of both."""
    tasks: dict[str, list[tuple[LiveRun, LiveTask]]] = defaultdict(list)
    for live in ctx.runs.values():
        if live.state in HOLDING and live.attempt is not None:
            for task in live.tasks.values():
                tasks[task.place.node or ""].append((live, task))
    asides: dict[str, list[Aside]] = defaultdict(list)
    for aside in health.asides():
        asides[aside.node].append(aside)
    found = []
    for member in ctx.fleet:
        for node in member.nodes:
            name = ctx.fleet.full(member.name, node.name)
            found.append(_node(member, node, name, tasks.get(name, []), asides.get(name, [])))
    return found


def _node(
    member: FleetMember, node: Node, name: str, tasks: list[tuple[LiveRun, LiveTask]], asides: list[Aside]
) -> dict[str, Any]:
    places = [task.place for _, task in tasks]
    view = asdict(node)
    view.update(
        name=name,
        cluster=member.name,
        tags=sorted(node.tags),
        used={
            "cpu": sum((place.cpu or 0.0 for place in places), 0.0),
            "memory": sum(place.memory or 0 for place in places),
            "gpus": sum(len(place.gpus) for place in places),
        },
        runs=[_task(live, task) for live, task in tasks],
        set_aside=[
            {"gpu": aside.gpu, "reason": aside.reason, "until": aside.until, "spared": aside.spared}
            for aside in asides
        ],
    )
    return view


def _task(live: LiveRun, task: LiveTask) -> dict[str, Any]:
    return {
        "id": live.id,
        "task": task.name,
        "name": live.row.name,
        "user": live.row.user,
        "state": live.row.state,
        "usage": task.usage,
        "cpu": task.place.cpu,
        "memory": task.place.memory,
        "gpus": list(task.place.gpus),
    }
