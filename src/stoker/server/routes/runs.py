"""Submitting, listing, showing, stopping, resuming."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from stoker.errors import SpecError
from stoker.server.log_redaction import redactor
from stoker.server.log_stream import OVER
from stoker.server.requests import Drill, Nothing, Resize, Resume, Scale, Shell, Stop, Submission
from stoker.server.responses import JsonAnswer
from stoker.server.routes import run_of, services_of
from stoker.server.views import runs as views
from stoker.spec import quantities
from stoker.spec.states import RunState
from stoker.store.rows import RunFilter

router = APIRouter(prefix="/api/v1/runs")

MAX_PAGE = 1000
MAX_WAIT = 60.0
_STATES = tuple(str(state) for state in RunState)


@router.post("")
def submit(request: Request, body: Submission) -> JsonAnswer:
    services = services_of(request)
    redactor.hide(body.secrets.values())
    if body.code is not None:
        # Marks it as fresh, so that nothing of it is collected before the run refers to it.
        services.blobs.touch(body.code)
    row, created = services.controller.submit(
        key=body.key,
        job=body.job,
        code=body.code,
        secrets=body.secrets,
        record=body.recorded(),
        user=services.user,
    )
    return JsonAnswer(views.show(services, row), 201 if created else 200)


@router.post("/check")
def check(request: Request, body: Submission) -> JsonAnswer:
    redactor.hide(body.secrets.values())
    answer = services_of(request).controller.check(
        job=body.job, code=body.code, secrets=body.secrets, record=body.recorded()
    )
    return JsonAnswer(answer)


@router.get("")
def list_runs(
    request: Request,
    state: str = "",
    tag: str = "",
    name: str | None = None,
    name_like: str | None = None,
    project: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    trash: Annotated[int, Query(ge=0, le=1)] = 0,
) -> JsonAnswer:
    services = services_of(request)
    wanted = RunFilter(
        states=_states(state),
        tags=tuple(part for part in tag.split(",") if part),
        name=name,
        name_like=name_like,
        project=project,
        before=before,
        limit=limit + 1,
        trash=bool(trash),
    )
    rows = services.store.runs(wanted, records=False)
    page = rows[:limit]
    following = page[-1].seq if len(rows) > limit else None
    return JsonAnswer({"runs": views.rows(services, page), "next": following})


@router.get("/{run}")
def show(request: Request, run: str) -> JsonAnswer:
    return JsonAnswer(views.show(services_of(request), run_of(request, run), report=True))


@router.post("/{run}/stop")
def stop(request: Request, run: str, body: Stop) -> JsonAnswer:
    services = services_of(request)
    row = services.controller.stop_run(run_of(request, run).id, kill=body.kill, by=services.user)
    return JsonAnswer(views.show(services, row))


@router.post("/{run}/resume")
def resume(request: Request, run: str, body: Resume) -> JsonAnswer:
    services = services_of(request)
    redactor.hide(body.secrets.values())
    row, _ = services.controller.resume(
        run_of(request, run).id, key=body.key, secrets=body.secrets, changes=body.changes
    )
    return JsonAnswer(views.show(services, row))


@router.post("/{run}/suspend")
def suspend(request: Request, run: str, body: Nothing) -> JsonAnswer:
    services = services_of(request)
    row = services.controller.suspend(run_of(request, run).id, by=services.user)
    return JsonAnswer(views.show(services, row))


@router.post("/{run}/drill")
def drill(request: Request, run: str, body: Drill) -> JsonAnswer:
    did = services_of(request).controller.drill(run_of(request, run).id, body.how, body.task)
    return JsonAnswer({"did": did})


@router.post("/{run}/resize")
def resize(request: Request, run: str, body: Resize) -> JsonAnswer:
    try:
        cpu = quantities.cpu(body.cpu) if body.cpu is not None else None
        memory = quantities.memory(body.memory) if body.memory is not None else None
    except quantities.Bad as exc:
        raise SpecError(exc.message, hint=exc.hint) from exc
    found = services_of(request).controller.resize(run_of(request, run).id, cpu=cpu, memory=memory)
    return JsonAnswer(found)


@router.post("/{run}/shell")
def shell(request: Request, run: str, body: Shell) -> JsonAnswer:
    return JsonAnswer(services_of(request).controller.shell(run_of(request, run).id, body.task))


@router.post("/{run}/scale")
def scale(request: Request, run: str, body: Scale) -> JsonAnswer:
    return JsonAnswer(services_of(request).controller.scale(run_of(request, run).id, body.workers))


@router.get("/{run}/events")
def events(request: Request, run: str) -> JsonAnswer:
    found = services_of(request).store.events(run_of(request, run).id)
    return JsonAnswer({"events": [views.event_view(row) for row in found]})


@router.get("/{run}/why")
def why(request: Request, run: str) -> JsonAnswer:
    return JsonAnswer(services_of(request).controller.why(run_of(request, run).id))


@router.get("/{run}/wait")
async def wait(
    request: Request, run: str, timeout: Annotated[float, Query(ge=0, le=86400)] = 30.0
) -> JsonAnswer:
    services = services_of(request)
    row = await run_in_threadpool(run_of, request, run)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(timeout, MAX_WAIT)
    while True:
        seen = services.controller.version(row.id)
        row = await run_in_threadpool(services.store.run, row.id)
        left = deadline - loop.time()
        if row.state in OVER or left <= 0 or services.closing.is_set():
            return JsonAnswer(await run_in_threadpool(views.show, services, row))
        await services.closing.wait_changed(services.controller, row.id, seen, left)


def _states(text: str) -> tuple[str, ...]:
    states = tuple(part for part in text.split(",") if part)
    for state in states:
        if state not in _STATES:
            raise SpecError(f"no such state: {state[:40]!r}", hint=f"States: {', '.join(_STATES)}.")
    return states
