"""Elastic runs: more tasks when there is room, fewer when it is wanted back, from checkpoint to checkpoint.

Who joins comes up beside the world, which goes on meanwhile; when all of them are there the world stops, best just
after a checkpoint, and starts again with them as its next generation. Who leaves is let go at the same moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoker.control import orders
from stoker.control.ending import Verdict
from stoker.control.live import LiveRun, LiveTask, tasks_of
from stoker.errors import Conflict, Refused
from stoker.scheduling import Grow, Shrink
from stoker.spec.parts import WORKER
from stoker.spec.words import Cause, RunState
from stoker.store.rows import AddEvent, EventRow, UpdateAttempt, UpdateRun

if TYPE_CHECKING:
    from stoker.control.loop import Loop

log = logging.getLogger(__name__)

WANTED = "workers_wanted"
"""In a run's record: how many workers a person asked for with `scale`."""


async def scale(loop: Loop, run: str, workers: int) -> dict[str, Any]:
    """{"from", "to", "text"}. The run itself follows when there is room, and at a checkpoint."""
    live = loop.runs.get(run)
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
    await loop.committer.commit(
        [
            UpdateRun(live.id, {"record": record}),
            AddEvent(EventRow(live.id, time.time(), "scaled", text, {"workers": workers})),
        ]
    )
    live.update(record=record)
    if live.attempt is None:
        loop.kick(live)
    else:
        loop.scheduler.resize_gang(live.id, loop.fleet.size(live.row, live.job) or 0)
        loop.scheduler.may_grow(live.id, True)
        loop.schedule_soon()
    loop.hub.publish(live.id)
    return {"from": now, "to": workers, "text": text}


async def grow(loop: Loop, live: LiveRun, decision: Grow) -> None:
    """Ask for the tasks that join. The world goes on without them until they are up."""
    assert live.attempt is not None
    placement = dict(live.attempt.placement)
    names = loop.fleet.task_names(live.job)
    fresh = loop.seating.placement(
        live, live.engine, dict(zip(decision.indexes, decision.places, strict=True))
    )
    for name, place in fresh.items():
        # No task was ever replaced more often than its world began anew: this number is new to the engine.
        before = max(live.attempt.generation, live.joined.get(name, 0))
        placement[name] = {**place, "joining": True, "incarnation": before + 1}
    text = f"{', '.join(names[index] for index in decision.indexes)} may join: there is room"
    await _place(loop, live, placement, "growing", text)
    for name, task in tasks_of(live.parts, live.attempt).items():
        if name in fresh:
            live.tasks[name] = task
    _sort(live)
    live.submitted = False
    loop.kick(live)


async def shrink(loop: Loop, live: LiveRun, decision: Shrink) -> None:
    """Some tasks are wanted back: the world goes on without them from its next checkpoint."""
    assert live.attempt is not None
    numbers = set(decision.indexes)
    leaving = [task for task in live.tasks.values() if task.place.get("number") in numbers]
    for_whom = f" to {decision.asked_by}" if decision.asked_by else ""
    text = f"{', '.join(task.name for task in leaving)} is given back{for_whom}"
    early = [task for task in leaving if task.joining]
    if early:
        await drop(loop, live, early, text)
    late = [task for task in leaving if not task.joining]
    if not late:
        return
    placement = dict(live.attempt.placement)
    for task in late:
        task.leaving = True
        task.place = {**task.place, "leaving": True}
        placement[task.name] = task.place
    await _place(loop, live, placement, "shrinking", text)
    live.reforming = live.reforming or Verdict(Cause.PREEMPTED, None, text, {})
    live.regroup = True
    loop.kick(live)


def regroup(loop: Loop, live: LiveRun) -> None:
    """When all who join are up, the world starts again with them: right after a checkpoint, or when none comes."""
    joining = [task for task in live.tasks.values() if task.joining]
    if not joining or live.reforming is not None or live.closing is not None:
        return
    if lost := [task for task in joining if task.gone is not None]:
        text = f"{', '.join(task.name for task in lost)} was lost before it could join"
        loop.spawn(drop(loop, live, lost, text))
        return
    if any(not task.up for task in joining):
        return
    now = time.monotonic()
    if live.waits_since is None:
        live.waits_since, live.fresh_checkpoint = now, False
    patience = loop.settings.control.grow_patience
    if not live.fresh_checkpoint and now - live.waits_since < patience:
        loop.kick_later(live, patience - (now - live.waits_since) + 0.01)
        return
    workers = sum(task.part.role == WORKER for task in live.tasks.values())
    live.reforming = Verdict(Cause.PREEMPTED, None, f"grows to {workers} workers", {})
    live.regroup = True
    live.dirty = True


async def drop(loop: Loop, live: LiveRun, tasks: Sequence[LiveTask], text: str) -> None:
    """Let go of tasks that have no body, and give back their places."""
    tasks = [task for task in tasks if live.tasks.get(task.name) is task]
    if live.attempt is None or not tasks:
        return
    gone = {task.name for task in tasks}
    placement = {name: place for name, place in live.attempt.placement.items() if name not in gone}
    await _place(loop, live, placement, "shrinking", text)
    forget(loop, live, tasks)


def forget(loop: Loop, live: LiveRun, tasks: Iterable[LiveTask]) -> None:
    """After it was recorded: these are not the run's any more."""
    numbers = []
    for task in tasks:
        live.tasks.pop(task.name, None)
        live.joined[task.name] = task.incarnation
        numbers.append(task.place.get("number", 0))
        if task.directory is not None and task.gone is None:
            loop.spawn(_release(task))
        loop.seating.give_back_ports(task.place.get("ports") or ())
    loop.scheduler.release_part(live.id, numbers)
    loop.schedule_soon()


async def _release(task: LiveTask) -> None:
    directory = task.directory
    assert directory is not None
    try:
        order = await asyncio.to_thread(directory.order)
        seq = order.seq + 1 if order else 1
        release = orders.release_order(seq=seq, generation=task.generation)
        await asyncio.to_thread(directory.write_order, release)
    except OSError as exc:
        # Its end is the attempt's, then: whoever cleans up ends everything.
        log.info("%s cannot be let go: %s", task.name, exc)


async def _place(loop: Loop, live: LiveRun, placement: dict[str, Any], kind: str, text: str) -> None:
    """In memory first: whoever changes a place while this is being recorded builds on it."""
    assert live.attempt is not None
    live.attempt = replace(live.attempt, placement=placement)
    await loop.committer.commit(
        [
            UpdateAttempt(live.id, live.attempt.number, {"placement": placement}),
            AddEvent(EventRow(live.id, time.time(), kind, text)),
        ]
    )
    loop.hub.publish(live.id)


def _sort(live: LiveRun) -> None:
    """By rank again."""
    order = [name for part in live.parts for name in part.names]
    live.tasks = {name: live.tasks[name] for name in order if name in live.tasks}
