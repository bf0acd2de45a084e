"""The metrics of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from stoker.errors import NotFound
from stoker.server.responses import JsonAnswer, number
from stoker.server.routes import run_of, services_of

router = APIRouter(prefix="/api/v1/runs/{run}/metrics")


@router.get("")
def keys(request: Request, run: str) -> JsonAnswer:
    """`task`: the task that reported it, where that is not the first one, which speaks for the run."""
    store = services_of(request).store
    row = run_of(request, run)
    found = store.metric_keys(row.id)
    tasks = {task for attempt in store.attempts(row.id) for task in attempt.placement}
    if len(tasks) > 1:
        for entry in found:
            name = str(entry["key"]).rpartition("@")[2].partition(".")[0]
            if "@" in entry["key"] and name in tasks:
                entry["task"] = name
    return JsonAnswer({"keys": found})


@router.get("/{key:path}")
def points(
    request: Request,
    run: str,
    key: str,
    max_points: Annotated[int | None, Query(ge=2, le=1_000_000)] = None,
) -> JsonAnswer:
    store = services_of(request).store
    row = run_of(request, run)
    found = store.metric_points(row.id, key, max_points)
    if not found:
        known = [entry["key"] for entry in store.metric_keys(row.id)]
        raise NotFound(
            f"{row.id} has no metric {key[:200]!r}",
            hint=f"It has: {', '.join(known[:20])}." if known else "It has reported nothing yet.",
        )
    return JsonAnswer(
        {"key": key, "points": [[step, number(value), t, attempt] for step, value, t, attempt in found]}
    )
