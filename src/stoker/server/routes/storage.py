"""Removed runs, and what takes the room."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from stoker.control import disk_usage
from stoker.control.trash import TRASH_FOR
from stoker.server.requests import Nothing, Sizes
from stoker.server.responses import JsonAnswer
from stoker.server.routes import run_of, services_of
from stoker.server.views import runs as views

router = APIRouter(prefix="/api/v1")


@router.delete("/runs/{run}")
def remove(request: Request, run: str) -> JsonAnswer:
    services = services_of(request)
    row = services.controller.remove(run_of(request, run).id, by=services.user)
    assert row.removed_at is not None
    sizes = disk_usage.sizes(services.store, services.settings.home, [row.id])
    view = {"id": row.id, "name": row.name, "state": row.state, "removed_at": row.removed_at}
    return JsonAnswer({**view, "until": row.removed_at + TRASH_FOR, "bytes": sizes[row.id]})


@router.post("/runs/{run}/restore")
def restore(request: Request, run: str, body: Nothing) -> JsonAnswer:
    services = services_of(request)
    removed = services.store.resolve(run, trash=True)
    row = services.store.restore(removed.id, now=time.time(), by=services.user)
    return JsonAnswer(views.show(services, row))


@router.post("/runs/sizes")
def sizes(request: Request, body: Sizes) -> JsonAnswer:
    """Of runs in the trash too. Unknown ids are left out."""
    services = services_of(request)
    found = disk_usage.sizes(services.store, services.settings.home, body.runs)
    answer: dict[str, Any] = {"runs": {run: {"bytes": size} for run, size in found.items()}}
    if body.metric is not None:
        for run, value in services.store.last_values(list(found), body.metric).items():
            answer["runs"][run]["metric"] = value
    return JsonAnswer(answer)


@router.post("/trash/empty")
def empty(request: Request, body: Nothing) -> JsonAnswer:
    emptied = services_of(request).controller.empty_trash()
    answer = {"runs": emptied.runs, "held": emptied.held, "bytes": emptied.bytes}
    return JsonAnswer({**answer, "later": bool(emptied.later)})


@router.get("/disk")
def disk(request: Request) -> JsonAnswer:
    services = services_of(request)
    return JsonAnswer(disk_usage.report(services.store, services.blobs, services.settings.home))
