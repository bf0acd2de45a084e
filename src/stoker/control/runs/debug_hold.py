"""`keep_on_failure`: a failed attempt keeps its places and its files for a while, so that the user can inspect it with
`stoker shell`. `stoker stop` releases it early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stoker.control.context import Context
from stoker.control.policy import hold
from stoker.control.state import numbers_of, places_of
from stoker.engine.base import Shows
from stoker.errors import Conflict, Refused
from stoker.spec import Job
from stoker.store.rows import AttemptRow, RunRow

Clean = Callable[[AttemptRow], None]
"""Removes what the engine holds of an ended attempt."""


def keep(ctx: Context, row: RunRow, job: Job, attempt: AttemptRow, clean: Clean) -> None:
    """Hold the attempt's places, and clean it up when the time is over."""
    request = ctx.fleet.request(row, job)
    held = [request.tasks[number] for number in numbers_of(attempt)]
    # Exactly what it holds, without extra tasks: it does not grow, and nothing of it can be reclaimed.
    ctx.scheduler.adopt(
        replace(request, id=hold.name(attempt), asks=tuple(held), extra=()), places_of(attempt)
    )
    ctx.held[attempt.run] = attempt
    asyncio.get_running_loop().call_later(max(0.0, hold.left(attempt)), _release, ctx, attempt, clean)


def _release(ctx: Context, attempt: AttemptRow, clean: Clean) -> None:
    if ctx.held.get(attempt.run) is attempt:
        del ctx.held[attempt.run]
        clean(attempt)


async def let_go(ctx: Context, run: str, clean: Clean) -> None:
    attempt = ctx.held.get(run)
    if attempt is not None:
        _release(ctx, attempt, clean)


def one_of(tasks: Mapping[str, Any], task: str | None, run: str) -> str:
    """The named task; None: the first. Refused: the run has no such task."""
    if task is None:
        return next(iter(tasks))
    if task not in tasks:
        raise Refused(f"{run} has no task {task!r}", hint=f"There are: {', '.join(tasks)}.")
    return task


async def shell(ctx: Context, run: str, task: str | None = None) -> dict[str, Any]:
    live = ctx.runs.get(run)
    attempt = live.attempt if live is not None and live.launched else ctx.held.get(run)
    if attempt is None:
        raise Conflict(
            f"{run} has no task to look into now",
            hint="Runs can be entered while they run, and after a failure with `--keep-on-failure 30m`.",
        )
    engine = ctx.fleet.engine(attempt.engine)
    if not isinstance(engine, Shows):
        raise Refused(f"the tasks of the {engine.name} engine cannot be entered")
    handle = attempt.handle or {"run": attempt.run, "attempt": attempt.number}
    return dict(await engine.shell(handle, one_of(attempt.placement, task, run)))
