"""The log of a run, as a whole or as it is written."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from stoker.server.log_stream import LogQuery, lines
from stoker.server.routes import run_of, services_of

router = APIRouter(prefix="/api/v1/runs/{run}/logs")


@router.get("")
async def logs(
    request: Request,
    run: str,
    task: str | None = None,
    attempt: Annotated[int | None, Query(ge=1, le=10**9)] = None,
    stream: Literal["stdout", "stderr", "stoker"] | None = None,
    since: Annotated[float | None, Query(ge=0, le=1e12)] = None,
    tail: Annotated[int | None, Query(ge=0, le=10_000_000)] = None,
    follow: bool = False,
) -> StreamingResponse:
    services = services_of(request)
    row = await run_in_threadpool(run_of, request, run)
    wanted = LogQuery(task=task, attempt=attempt, stream=stream, since=since, tail=tail)
    return StreamingResponse(
        lines(services, row.id, wanted, follow=follow), media_type="application/x-ndjson"
    )
