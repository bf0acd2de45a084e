"""The server itself: health, what it is, backups, its end."""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter, Request

from stoker.errors import StoreError
from stoker.server import backup
from stoker.server.answers import JsonAnswer
from stoker.server.bodies import Backup, Nothing
from stoker.server.routes import services_of

router = APIRouter()


@router.get("/healthz")
async def health(request: Request) -> JsonAnswer:
    services = services_of(request)
    return JsonAnswer({"status": "damaged" if services.damaged else "ok", "home_id": services.home_id})


@router.get("/api/v1/server")
def server(request: Request) -> JsonAnswer:
    services = services_of(request)
    store: dict[str, Any] = {"kind": "sqlite", "schema": None, "status": services.damaged or "ok"}
    counts: dict[str, int] = {}
    try:
        counts = services.store.counts()
        store = {"kind": services.store.kind, "schema": services.store.schema_version(), "status": "ok"}
    except StoreError as exc:
        # This route is how people find out what is wrong: it answers with whatever can be known.
        store["status"] = exc.message
    store["status"] = services.damaged or store["status"]
    return JsonAnswer(
        {
            "version": services.version,
            "pid": os.getpid(),
            "url": services.url,
            "home": str(services.settings.home.root),
            "started_at": services.started_at,
            "store": store,
            "counts": counts,
        }
    )


@router.post("/api/v1/backups")
def backups(request: Request, body: Backup) -> JsonAnswer:
    services = services_of(request)
    return JsonAnswer(backup.create(services.settings.home, services.store, services.blobs, body.path))


@router.post("/api/v1/shutdown")
def shutdown(request: Request, body: Nothing) -> JsonAnswer:
    # Before the answer: whoever has it must not be sent to this server again. Requests under way, this one
    # included, are finished first.
    services_of(request).stop()
    return JsonAnswer({"stopping": True})
