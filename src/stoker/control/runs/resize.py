"""Changes a run's CPU and memory: in place if the engine can, else by checkpoint and restart."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from stoker.control.context import Context
from stoker.control.state import LiveRun, numbers_of
from stoker.engine.base import Resizes
from stoker.errors import Conflict, Refused
from stoker.frameworks.roles import parts_of
from stoker.scheduling import Feasibility
from stoker.spec import Job
from stoker.spec.states import RunState
from stoker.store.rows import AddEvent, Change, EventRow, UpdateAttempt, UpdateRun


async def resize(ctx: Context, run: str, *, cpu: float | None, memory: int | None) -> dict[str, Any]:
    """Returns {"how": "in place" | "restart" | "queued", "text": why, for people}."""
    live = ctx.runs.get(run)
    if live is None or live.state is RunState.STOPPING:
        raise Conflict(
            f"{run} is not waiting or running", hint="`stoker rerun --set resources...` starts it anew."
        )
    job = resized(live.job, cpu=cpu, memory=memory)
    verdict = ctx.scheduler.can_ever_fit(tuple(ctx.fleet.asks(job).values()))
    if not verdict.ok:
        raise Refused(
            f"this can never fit: {impossible(verdict)}", hint="`stoker nodes` shows what there is."
        )
    if live.state is RunState.QUEUED or live.attempt is None:
        await _record(ctx, live, job, "queued", "it had not started; it starts with the new size")
        ctx.wakeups.kick(live)
        return {"how": "queued", "text": "it had not started; it starts with the new size"}
    reason = await _in_place(ctx, live, cpu=cpu, memory=memory)
    if reason is None:
        await _record(ctx, live, job, "in place", "resized while it runs")
        if live.attempt is not None:  # it may have ended meanwhile
            ctx.scheduler.adopt(ctx.fleet.request(live.row, job), live.places, numbers_of(live.attempt))
        ctx.wakeups.schedule_soon()
        return {"how": "in place", "text": "resized while it runs"}
    text = f"{reason}; it checkpoints and starts again with the new size"
    await _record(ctx, live, job, "restart", text)
    live.preempt = True
    ctx.wakeups.kick(live)
    return {"how": "restart", "text": text}


def impossible(verdict: Feasibility) -> str:
    """Why a request can never fit, as the end of a sentence."""
    return f"it {verdict.reason}" if verdict.reason.startswith("asks") else verdict.reason


def resized(job: Job, *, cpu: float | None, memory: int | None) -> Job:
    values = {key: value for key, value in {"cpu": cpu, "memory": memory}.items() if value is not None}
    if not values:
        raise Refused("nothing to change", hint="Give --cpu or --memory.")
    return job.model_copy(update={"resources": job.resources.model_copy(update=values)})


async def _in_place(ctx: Context, live: LiveRun, *, cpu: float | None, memory: int | None) -> str | None:
    engine = ctx.fleet.engine(live.engine)
    if not live.launched:
        return "it is not up yet"
    if not isinstance(engine, Resizes):
        return f"the {engine.name} engine cannot change a task while it runs"
    if not live.alone:
        return "it has several tasks"
    return await engine.resize(live.handle, next(iter(live.tasks)), cpu=cpu, memory=memory)


async def _record(ctx: Context, live: LiveRun, job: Job, how: str, text: str) -> None:
    """Record the job with the new size; later attempts use it too."""
    asks = ctx.fleet.asks(job)
    changes: list[Change] = [
        UpdateRun(live.id, {"job": job.to_json()}),
        AddEvent(EventRow(live.id, time.time(), "resized", text, {"how": how, **_sizes(job)})),
    ]
    if live.attempt is not None and how == "in place":
        placement = {
            task: replace(place, cpu=asks[task].cpu, memory=asks[task].memory)
            for task, place in live.attempt.placement.items()
        }
        changes.append(UpdateAttempt(live.id, live.attempt.number, {"placement": placement}))
        live.attempt = replace(live.attempt, placement=placement)
    await ctx.committer.commit(changes)
    live.job, live.parts = job, parts_of(job)
    for part in live.parts:
        for task in live.tasks.values():
            if task.part.role == part.role:
                task.part = part
    live.update(job=job.to_json())
    ctx.notifier.publish(live.id)


def _sizes(job: Job) -> dict[str, Any]:
    return {"cpu": job.resources.cpu, "memory": job.resources.memory}
