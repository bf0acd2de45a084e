"""Adopts what the engine shows and a restored database does not know.

A database that was restored from a backup is older than the tasks, and the tasks are right. Unknown attempts,
incarnations and generations are adopted if possible, and ended otherwise. Else the same number would be used again, for
a second body beside the first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from stoker.control.context import Context
from stoker.control.policy.task_phases import TaskEvent
from stoker.control.state import LiveRun
from stoker.engine.base import Observation, Presence
from stoker.errors import EngineError, NotFound
from stoker.spec import Job
from stoker.spec.run_transitions import TABLE, RunEvent
from stoker.spec.states import Cause, RunState
from stoker.store.placement import TaskPlacement
from stoker.store.rows import (
    AddAttempt,
    AddEvent,
    AttemptRow,
    Change,
    EventRow,
    RunRow,
    UpdateAttempt,
    UpdateRun,
)

log = logging.getLogger(__name__)

_GRACE = timedelta(seconds=10)
_MAX_BEHIND = 1000
"""Generations by which a restored database may be behind. User code can write to an order, so more is ignored."""
_AS_RESUMED = {"desired": "run", "ended_at": None, "exit_code": None, "cause": None, "reason": ""}
_BEHIND = "the database was restored from an older copy"


async def adopt_newer(ctx: Context, row: RunRow, job: Job, seen: Sequence[Observation]) -> RunRow:
    """Adopt or end attempts of the run that the database does not know. Returns its row. `seen`: its tasks."""
    newer = [one for one in seen if one.attempt > row.attempt]
    if not newer:
        return row
    over = RunState(row.state).terminal or row.state == RunState.SUSPENDED
    number = max(one.attempt for one in newer)
    newest = [one for one in newer if one.attempt == number]
    changes: list[Change] = []
    if RunState(row.state).holds:
        ended = {
            "state": "ended",
            "cause": Cause.LOST,
            "evidence": {"message": _BEHIND},
            "ended_at": time.time(),
        }
        changes.append(UpdateAttempt(row.id, row.attempt, ended))
    alive = [one for one in newer if one.presence is not Presence.GONE]
    if alive == newest and len(newest) == 1 and len(ctx.fleet.task_names(job)) == 1:
        changes.append(AddAttempt(_attempt_of(ctx, job, newest[0])))
        values: dict[str, Any] = {"state": _after(row, RunEvent.ATTEMPT_FOUND), "attempt": number}
        text = f"{_BEHIND}: attempt {number}, which it does not know, is running and was taken over"
    else:
        await _end(ctx, alive)
        values = {"state": _after(row, RunEvent.ATTEMPT_LOST), "attempt": number}
        text = f"{_BEHIND}: attempts up to {number}, which it does not know, have ended"
    if over:
        values |= _AS_RESUMED
    log.warning("run %s: %s", row.id, text)
    changes += [UpdateRun(row.id, values), AddEvent(EventRow(row.id, time.time(), "warning", text))]
    await ctx.committer.commit(changes)
    return replace(row, **values)


def _after(row: RunRow, event: RunEvent) -> RunState:
    return TABLE.after(RunState(row.state), event, run=row.id)


async def resumed(
    ctx: Context, live: Collection[str], seen: Mapping[str, Sequence[Observation]]
) -> list[RunRow]:
    """Runs that are over in the restored database, but were resumed after the backup: a later attempt runs."""
    found = []
    for run in seen.keys() - live:
        try:
            row = await asyncio.to_thread(ctx.store.run, run)
        except NotFound:
            continue  # the whole run is unknown: it is left alone, see placement.unknown_tasks
        if any(one.attempt > row.attempt and one.presence is not Presence.GONE for one in seen[run]):
            found.append(row)
    return found


def at_newest_incarnations(attempt: AttemptRow, seen: Sequence[Observation]) -> AttemptRow:
    """The attempt with the incarnations that the engine shows. They were all asked for, so newer ones are right."""
    placement = dict(attempt.placement)
    for one in seen:
        place = placement.get(one.task)
        if place is not None and one.attempt == attempt.number and one.incarnation > place.incarnation:
            placement[one.task] = replace(place, incarnation=one.incarnation, ordered=one.incarnation)
    return replace(attempt, placement=placement)


async def catch_up(ctx: Context, live: LiveRun) -> None:
    """Raise the recorded generations to those in the orders of the tasks."""
    assert live.attempt is not None
    newest = live.newest_order
    if not live.attempt.generation < newest < live.attempt.generation + _MAX_BEHIND:
        return
    for task in live.tasks.values():
        order = task.directory.order() if task.directory is not None else None
        own = order.generation if order is not None else 0
        task.generation = newest if task.part.on_loss == "world" else max(task.generation, own)
        if own < task.generation and task.phase.ordered and not task.over:
            task.happened(TaskEvent.OUTDATED)
        task.place = replace(task.place, generation=task.generation)
    values = {
        "generation": newest,
        "placement": {**live.attempt.placement, **{task.name: task.place for task in live.tasks.values()}},
    }
    text = f"{_BEHIND}: it knows generation {live.attempt.generation}, and generation {newest} is running"
    live.attempt = replace(live.attempt, **values)  # type: ignore[arg-type]
    event = AddEvent(EventRow(live.id, time.time(), "warning", text))
    await ctx.committer.commit([UpdateAttempt(live.id, live.attempt.number, values), event])


def _attempt_of(ctx: Context, job: Job, seen: Observation) -> AttemptRow:
    """A row for an unknown attempt, as far as the engine shows it."""
    home = ctx.fleet.home
    ask = ctx.fleet.asks(job)[seen.task]
    node = ctx.fleet.full(home, seen.node or home)
    place = TaskPlacement(
        node=node,
        gpus=tuple(seen.gpus),
        cpu=ask.cpu,
        memory=ask.memory,
        isolation=ctx.fleet.isolation(home, node),
        incarnation=seen.incarnation,
        ordered=seen.incarnation,
    )
    return AttemptRow(
        run=seen.run,
        number=seen.attempt,
        created_at=time.time(),
        engine=home,
        handle=dict(seen.handle),
        placement={seen.task: place},
    )


async def _end(ctx: Context, alive: Sequence[Observation]) -> None:
    """End attempts and wait for it: the next attempt must not run beside them."""
    engine = ctx.fleet.engine(ctx.fleet.home)
    for number in sorted({one.attempt for one in alive}):
        handle = next(one.handle for one in alive if one.attempt == number)
        try:
            await engine.stop(handle, grace=_GRACE)
        except EngineError as exc:
            log.warning("attempt %d of %s: %s", number, alive[0].run, exc)
