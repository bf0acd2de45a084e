"""Places of tasks: their node, resources and ports; follows an engine's own choice of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stoker.control.context import Context
from stoker.control.state import LiveRun, LiveTask, numbers_of
from stoker.engine.base import Observation
from stoker.frameworks.roles import has_world, ports
from stoker.scheduling import Place
from stoker.store.placement import TaskPlacement
from stoker.store.rows import AttemptRow, UpdateAttempt


def place_tasks(
    ctx: Context, live: LiveRun, engine: str, places: Mapping[int, Place]
) -> dict[str, TaskPlacement]:
    """By task: its node, its resources there, and its ports for the other tasks. `places`: by number."""
    asks = list(ctx.fleet.asks(live.job).items())
    shared = has_world(live.job, live.parts) and not ctx.fleet.engine(engine).surroundings(live.job).port
    found: dict[str, TaskPlacement] = {}
    for number, place in places.items():
        task, ask = asks[number]
        wanted = ports(live.job, task.rpartition("-")[0]) if shared else 0
        found[task] = TaskPlacement(
            node=place.node,
            gpus=place.gpus,
            cpu=ask.cpu,
            memory=ask.memory,
            isolation=ctx.fleet.isolation(engine, place.node),
            number=0 if live.alone else number,
            ports=tuple(ctx.ports.take(wanted)) if shared else (),
            ordered=0,
        )
    return found


def new_ports(ctx: Context, old: Sequence[int]) -> tuple[int, ...]:
    """Other ports in place of these: a process outside the allocator listens on one of them."""
    fresh = tuple(ctx.ports.take(len(old)))
    ctx.ports.give(old)
    return fresh


def ports_of(attempt: AttemptRow) -> list[int]:
    return [port for place in attempt.placement.values() for port in place.ports]


def grow_later(ctx: Context, live: LiveRun) -> None:
    """Let an elastic run grow again, but only after `grow_after` seconds: each time costs the work since a checkpoint."""
    if not live.job.workers.elastic:
        return
    ctx.scheduler.may_grow(live.id, False)
    asyncio.get_running_loop().call_later(ctx.settings.control.grow_after, _may_grow, ctx, live.id)


def _may_grow(ctx: Context, run: str) -> None:
    if ctx.scheduler.holds(run):
        ctx.scheduler.may_grow(run, True)
        ctx.wakeups.schedule_soon()


def follow_engine(ctx: Context, live: LiveRun, task: LiveTask, seen: Observation) -> None:
    """Update the scheduler and the placement after the engine chose another node for a task."""
    assert live.attempt is not None
    node = ctx.fleet.full(live.engine, seen.node)
    if not seen.node or task.place.node == node or task.name not in live.attempt.placement:
        return
    found = live.attempt.placement
    wanted = tuple(
        Place(node) if name == task.name else Place(place.node or "", place.gpus)
        for name, place in found.items()
    )
    moved = ctx.scheduler.move(live.id, wanted, numbers_of(live.attempt))
    if not moved:
        return
    placement = {
        name: replace(before, node=place.node, gpus=place.gpus)
        for (name, before), place in zip(found.items(), moved, strict=True)
    }
    live.attempt = replace(live.attempt, placement=placement)
    for name in placement.keys() & live.tasks.keys():
        live.tasks[name].place = placement[name]
    change = UpdateAttempt(live.id, live.attempt.number, {"placement": placement})
    ctx.wakeups.spawn(ctx.committer.commit([change]))
