"""`keep_on_failure`: an attempt that failed for good is left as it is for a while, with all it holds, for a person to
look into with `stoker shell`. `stoker stop` lets it go early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoker.control.policy.outcome import Next, Outcome
from stoker.control.state import numbers_of, places_of
from stoker.engine.base import ASIDE_FOR, Shows
from stoker.errors import Conflict, Refused
from stoker.spec import Job
from stoker.spec.states import RunState
from stoker.store.rows import AttemptRow, RunRow

if TYPE_CHECKING:
    from stoker.control.loop import ControlLoop

_LONGEST = 7 * 86400.0
"""Seconds. A clock that jumped must not keep a GPU for ever."""


def until(job: Job, verdict: Outcome, following: Next, now: float) -> float:
    """The time until which the attempt is kept; 0: it is not."""
    wanted = job.keep_on_failure > 0 and following.state is RunState.FAILED and verdict.cause.users_fault
    return now + min(job.keep_on_failure, _LONGEST) if wanted else 0.0


def say(run: str, job: Job) -> str:
    return f"left as it is for {job.keep_on_failure:.0f} s: `stoker shell {run}` looks into it, `stoker stop {run}` lets it go"


def left(attempt: AttemptRow) -> float:
    """Seconds it is still kept."""
    value = attempt.evidence.get("kept_until")
    return min(value - time.time(), _LONGEST) if isinstance(value, int | float) else 0.0


def is_kept(attempt: AttemptRow) -> bool:
    return attempt.state == "ended" and left(attempt) > 0


def files_of(attempt: AttemptRow) -> str:
    """Where its files are left for a while when all else of it is removed; empty: nowhere. See `Recording.refusals`."""
    late = time.time() - (attempt.ended_at or 0.0) > ASIDE_FOR
    return "" if late else str(attempt.evidence.get("files") or "")


def name(attempt: AttemptRow) -> str:
    """By which the queue knows what it holds. No run's id has a tilde."""
    return f"{attempt.run}~{attempt.number}"


def keep(loop: ControlLoop, row: RunRow, job: Job, attempt: AttemptRow) -> None:
    """Hold its places, and clean up when the time is over."""
    request = loop.fleet.request(row, job)
    held = [request.tasks[number] for number in numbers_of(attempt)]
    # As much as it holds and no more: nothing of it is on loan, and it does not grow.
    loop.scheduler.adopt(replace(request, id=name(attempt), asks=tuple(held), extra=()), places_of(attempt))
    loop.kept[attempt.run] = attempt
    asyncio.get_running_loop().call_later(max(0.0, left(attempt)), _over, loop, attempt)


def _over(loop: ControlLoop, attempt: AttemptRow) -> None:
    if loop.kept.get(attempt.run) is attempt:
        del loop.kept[attempt.run]
        loop.clean(attempt)


async def let_go(loop: ControlLoop, run: str) -> None:
    attempt = loop.kept.get(run)
    if attempt is not None:
        _over(loop, attempt)


def one_of(tasks: Mapping[str, Any], task: str | None, run: str) -> str:
    """The task that is meant; the first where none is named."""
    if task is None:
        return next(iter(tasks))
    if task not in tasks:
        raise Refused(f"{run} has no task {task!r}", hint=f"There are: {', '.join(tasks)}.")
    return task


async def shell(loop: ControlLoop, run: str, task: str | None = None) -> dict[str, Any]:
    live = loop.runs.get(run)
    attempt = live.attempt if live is not None and live.launched else loop.kept.get(run)
    if attempt is None:
        raise Conflict(
            f"{run} has no task to look into now",
            hint="Runs can be entered while they run, and after a failure with `--keep-on-failure 30m`.",
        )
    engine = loop.fleet.engine(attempt.engine)
    if not isinstance(engine, Shows):
        raise Refused(f"the tasks of the {engine.name} engine cannot be entered")
    handle = attempt.handle or {"run": attempt.run, "attempt": attempt.number}
    return dict(await engine.shell(handle, one_of(attempt.placement, task, run)))
