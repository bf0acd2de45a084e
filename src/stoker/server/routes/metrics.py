"""What a run reported."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from stoker.errors import NotFound
from stoker.server.answers import JsonAnswer, number
from stoker.server.routes import run_of, services_of

router = APIRouter(prefix="/api/v1/runs/{run}/metrics")


@router.get("")
def keys(request: Request, run: str) -> JsonAnswer:
    return JsonAnswer({"keys": services_of(request).store.metric_keys(run_of(request, run).id)})


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
