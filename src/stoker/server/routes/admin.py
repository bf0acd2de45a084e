"""The server itself: health, state, backups, shutdown."""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter, Request

from stoker import disks
from stoker.errors import StoreDamaged, StoreError, StoreLost
from stoker.server import backup
from stoker.server.requests import Backup, Forget, Nothing
from stoker.server.responses import JsonAnswer, error
from stoker.server.routes import services_of

router = APIRouter()

MOST_UNKNOWN = 1000


@router.get("/healthz")
async def health(request: Request) -> JsonAnswer:
    """Whether the server lives. A server that waits to lead does."""
    services = services_of(request)
    lost = isinstance(services.trouble, StoreLost)
    status = (
        "lost" if lost else "damaged" if services.damaged else "standby" if services.not_leading else "ok"
    )
    return JsonAnswer({"status": status, "home_id": services.home_id})


@router.get("/readyz")
async def ready(request: Request) -> JsonAnswer:
    """Whether to send requests here: 503 with the reason while another server leads or the database is damaged."""
    services = services_of(request)
    if services.not_leading is not None:
        return error(services.not_leading)
    if services.damaged:
        return error(services.trouble or StoreDamaged(services.damaged))
    return JsonAnswer({"status": "ready"})


@router.get("/api/v1/server")
def server(request: Request) -> JsonAnswer:
    services = services_of(request)
    kind = "sqlite" if services.leading is None else "postgresql"
    store: dict[str, Any] = {"kind": kind, "schema": None, "status": services.damaged or "ok"}
    counts: dict[str, int] = {}
    unknown: list[dict[str, Any]] = []
    try:
        counts = services.store.counts()
        unknown = services.controller.unknown()[:MOST_UNKNOWN]
        store = {"kind": services.store.kind, "schema": services.store.schema_version(), "status": "ok"}
    except StoreError as exc:
        # Users ask this route what is wrong, so it answers with everything that can be known.
        store["status"] = exc.message
    store["status"] = services.damaged or store["status"]
    database = services.settings.home.database
    if store["status"] == "ok" and kind == "sqlite" and disks.is_read_only(database):
        refused = disks.read_only(database)
        store |= {"status": refused.message, "hint": refused.hint}
    if services.trouble is not None:
        store["hint"] = services.trouble.hint
    return JsonAnswer(
        {
            "version": services.version,
            "pid": os.getpid(),
            "url": services.url,
            "home": str(services.settings.home.root),
            "started_at": services.started_at,
            "leading": services.not_leading is None,
            "store": store,
            "counts": counts,
            "unknown": unknown,
        }
    )


@router.post("/api/v1/backups")
def backups(request: Request, body: Backup) -> JsonAnswer:
    services = services_of(request)
    return JsonAnswer(backup.create(services.settings.home, services.store, services.blobs, body.path))


@router.post("/api/v1/forget")
def forget(request: Request, body: Forget) -> JsonAnswer:
    """Ends and forgets runs that the database does not know; all of them where none is named."""
    return JsonAnswer({"forgotten": services_of(request).controller.forget(body.runs)})


@router.post("/api/v1/shutdown")
def shutdown(request: Request, body: Nothing) -> JsonAnswer:
    # Before the answer: a client that has the answer must not be sent to this server again. Requests under way,
    # this one included, are finished first.
    services_of(request).stop()
    return JsonAnswer({"stopping": True})
