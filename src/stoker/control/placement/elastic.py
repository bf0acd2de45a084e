"""Elastic runs: more tasks when there is room, fewer when places are reclaimed, from checkpoint to checkpoint.

Joining tasks come up while the world goes on. When all are up, the world stops, preferably just after a checkpoint, and
starts again with them as its next generation. Leaving tasks are released at the same moment. A released task keeps its
place until the engine reports that it has ended: no two tasks ever share a place or a name.

The placement records joining and leaving tasks, so that the next server can continue.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from stoker.control.context import Context
from stoker.control.placement import places
from stoker.control.policy.outcome import Outcome
from stoker.control.policy.task_phases import TaskEvent, TaskPhase
from stoker.control.state import LiveRun, LiveTask, tasks_of
from stoker.errors import Conflict, Refused
from stoker.scheduling import Grow, Shrink
from stoker.spec.roles import WORKER
from stoker.spec.states import Cause, RunState
from stoker.store.placement import TaskPlacement
from stoker.store.rows import AddEvent, EventRow, UpdateAttempt, UpdateRun

WANTED = "workers_wanted"
"""In a run's record: the number of workers that a user asked for with `scale`."""


async def scale(ctx: Context, run: str, workers: int) -> dict[str, Any]:
    """Record the wanted number of workers. Returns {"from", "to", "text"}. The run grows or shrinks later."""
    live = ctx.runs.get(run)
    if live is None or live.state is RunState.STOPPING:
        raise Conflict(f"{run} is not waiting or running", hint="Only a run that is not over can be scaled.")
    limits = live.job.workers
    if not limits.elastic:
        raise Refused(
            f"{run} is not elastic: it has {limits} {'worker' if limits.max == 1 else 'workers'}, neither more nor fewer",
            hint=f"An elastic run says a range: `stoker rerun {run} --set workers={limits}..{max(workers, 2 * limits.max)}`.",
        )
    if not limits.min <= workers <= limits.max:
        raise Refused(
            f"{workers} is outside of the run's workers, {limits}",
            hint=f"Choose from {limits.min} to {limits.max}.",
        )
    now = sum(task.part.role == WORKER for task in live.tasks.values())
    text = f"wants {workers} workers" + (f", has {now}" if now else "")
    record = {**live.row.record, WANTED: workers}
    await ctx.committer.commit(
        [
            UpdateRun(live.id, {"record": record}),
            AddEvent(EventRow(live.id, time.time(), "scaled", text, {"workers": workers})),
        ]
    )
    live.update(record=record)
    if live.attempt is None:
        ctx.wakeups.kick(live)
    else:
        ctx.scheduler.resize_gang(live.id, ctx.fleet.size(live.row, live.job) or 0)
        ctx.scheduler.may_grow(live.id, True)
        ctx.wakeups.schedule_soon()
    ctx.notifier.publish(live.id)
    return {"from": now, "to": workers, "text": text}


async def grow(ctx: Context, live: LiveRun, decision: Grow) -> None:
    """Place joining tasks. The world goes on without them until they are up."""
    assert live.attempt is not None
    placement = dict(live.attempt.placement)
    names = ctx.fleet.task_names(live.job)
    fresh = places.place_tasks(
        ctx, live, live.engine, dict(zip(decision.indexes, decision.places, strict=True))
    )
    for name, place in fresh.items():
        # Each replacement of a task made a new generation, so the engine does not know this incarnation yet.
        left = live.left.pop(name, None)
        before = max(live.attempt.generation, left.incarnation if left is not None else 0)
        placement[name] = replace(
            place,
            joining=True,
            incarnation=before + 1,
            given_up=left is not None and left.given_up,
        )
    text = f"{', '.join(names[index] for index in decision.indexes)} may join: there is room"
    number = live.attempt.number
    await _record(ctx, live, placement, "growing", text)
    if live.attempt is None or live.attempt.number != number:
        return  # it ended meanwhile, and released all its places
    for name, task in tasks_of(live.parts, live.attempt).items():
        if name in fresh:
            live.tasks[name] = task
    _sort_by_rank(live)
    live.submitted = False
    ctx.wakeups.kick(live)


async def shrink(ctx: Context, live: LiveRun, decision: Shrink) -> None:
    """Places are reclaimed: joining tasks are dropped now, members leave with the next generation."""
    assert live.attempt is not None
    numbers = set(decision.indexes)
    leaving = [task for task in live.tasks.values() if task.place.number in numbers]
    for_whom = f" to {decision.asked_by}" if decision.asked_by else ""
    text = f"{', '.join(task.name for task in leaving)} is given back{for_whom}"
    early = [task for task in leaving if task.joining]
    if early:
        await drop(ctx, live, early, text)
    late = [task for task in leaving if not task.joining and live.tasks.get(task.name) is task]
    if not late or live.attempt is None:
        return  # no members leave, or the attempt ended meanwhile
    placement = dict(live.attempt.placement)
    for task in late:
        task.place = replace(task.place, leaving=True)
        placement[task.name] = task.place
    await _record(ctx, live, placement, "shrinking", text)
    ctx.wakeups.kick(live)


async def regroup(ctx: Context, live: LiveRun) -> None:
    """Start the next generation when a task leaves, or when all joining tasks are up: then after a checkpoint, or after
    `grow_patience` seconds without one."""
    if live.reforming is not None or live.closing is not None:
        return
    if leaving := [task for task in live.tasks.values() if task.leaving]:
        text = f"goes on without {', '.join(task.name for task in leaving)}"
        live.reforming, live.regroup = Outcome(Cause.PREEMPTED, None, text, {}), True
        return
    joining = [task for task in live.tasks.values() if task.joining]
    for task in joining:
        if why := _hopeless(task):
            await drop(ctx, live, [task], f"{task.name} cannot join: {why}")
    joining = [task for task in joining if live.tasks.get(task.name) is task]
    if not joining or any(not task.up for task in joining):
        return
    now = time.monotonic()
    if live.waits_since is None:
        live.waits_since, live.fresh_checkpoint = now, False
    patience = ctx.settings.control.grow_patience
    stands = all(task.over for task in live.tasks.values() if not task.joining)
    if not live.fresh_checkpoint and not stands and now - live.waits_since < patience:
        ctx.wakeups.kick_later(live, patience - (now - live.waits_since) + 0.01)
        return
    workers = sum(task.part.role == WORKER for task in live.tasks.values())
    live.reforming = Outcome(Cause.PREEMPTED, None, f"grows to {workers} workers", {})
    live.regroup = True
    live.dirty = True


def _hopeless(task: LiveTask) -> str:
    """Why the task will never be up; empty: it may."""
    return task.gone or (task.wait.text if task.wait is not None and task.wait.over else "")


async def drop(ctx: Context, live: LiveRun, tasks: Sequence[LiveTask], text: str) -> None:
    """Release tasks that have no body. Others may join later if there is room."""
    tasks = [task for task in tasks if live.tasks.get(task.name) is task]
    if live.attempt is None or not tasks:
        return
    gone = {task.name for task in tasks}
    placement = {name: place for name, place in live.attempt.placement.items() if name not in gone}
    await _record(ctx, live, placement, "shrinking", text)
    forget(ctx, live, tasks)
    places.grow_later(ctx, live)


def forget(ctx: Context, live: LiveRun, tasks: Iterable[LiveTask]) -> None:
    """Release tasks, after that was recorded. They have no body. The engine watcher ends their launchers."""
    for task in [task for task in tasks if live.tasks.get(task.name) is task]:
        del live.tasks[task.name]
        live.left[task.name] = task
        task.happened(TaskEvent.LET_GO)
        ctx.ports.give(task.place.ports)
    give_back(ctx, live)
    ctx.wakeups.observe_soon()


def give_back(ctx: Context, live: LiveRun) -> None:
    """Give back the places of released tasks that have ended."""
    ended = [
        task for task in live.left.values() if task.gone is not None and task.phase is TaskPhase.RELEASED
    ]
    if not ended:
        return
    ctx.scheduler.release_part(live.id, [task.place.number for task in ended])
    for task in ended:
        task.happened(TaskEvent.FREED)
    ctx.wakeups.schedule_soon()


async def _record(
    ctx: Context, live: LiveRun, placement: dict[str, TaskPlacement], kind: str, text: str
) -> None:
    """Record a placement. It changes in memory first: a change of a place meanwhile builds on it."""
    assert live.attempt is not None
    live.attempt = replace(live.attempt, placement=placement)
    await ctx.committer.commit(
        [
            UpdateAttempt(live.id, live.attempt.number, {"placement": placement}),
            AddEvent(EventRow(live.id, time.time(), kind, text)),
        ]
    )
    ctx.notifier.publish(live.id)


def _sort_by_rank(live: LiveRun) -> None:
    """Restore the order of ranks."""
    order = [name for part in live.parts for name in part.names]
    live.tasks = {name: live.tasks[name] for name in order if name in live.tasks}
