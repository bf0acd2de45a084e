"""Rows as docs/api.md shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.control.trash import TRASH_FOR
from stoker.server.services import Services
from stoker.server.views import performance
from stoker.server.views.attempts import tasks_view, world_view
from stoker.spec.states import HOLDING, RunState
from stoker.store.rows import AttemptRow, CheckpointRow, EventRow, RunRow, TaskRow

Json = dict[str, Any]


def show(services: Services, run: RunRow, *, report: bool = False) -> Json:
    """One run in full. `report`: includes how well its tasks work together, which reads its metrics."""
    store = services.store
    attempts = store.attempts(run.id)
    view = _run(run, _places(services, [run]).get(run.id))
    view["record"] = run.record
    elastic = isinstance(run.job.get("workers"), str)
    view["attempts"] = [
        attempt_view(row, store.tasks(run.id, row.number), elastic=elastic) for row in attempts
    ]
    view["scaling"] = None
    if attempts and report:
        newest = view["attempts"][-1]
        newest["straggler"] = performance.straggler_view(
            store, services.archive, run, newest["number"], newest["tasks"]
        )
        view["scaling"] = performance.scaling_view(store, run, newest["tasks"])
    if attempts and run.state in HOLDING:
        _add_readiness(services, [view])
    view["checkpoints"] = [checkpoint_view(row) for row in store.checkpoints(run.id)]
    return view


def rows(services: Services, runs: Sequence[RunRow]) -> list[Json]:
    """Many runs, each with its newest attempt only."""
    newest: Mapping[str, AttemptRow] = services.store.latest_attempts([run.id for run in runs])
    places = _places(services, runs)
    views = []
    for run in runs:
        view = _run(run, places.get(run.id))
        view["attempts"] = [attempt_view(newest[run.id], None)] if run.id in newest else []
        views.append(view)
    _add_readiness(services, [view for view in views if view["state"] in HOLDING])
    return views


def event_view(row: EventRow) -> Json:
    return {"t": row.t, "kind": row.kind, "text": row.text, "data": row.data, "seq": row.seq}


def attempt_view(row: AttemptRow, tasks: Sequence[TaskRow] | None, *, elastic: bool = False) -> Json:
    places = list(row.placement.values())
    view: Json = {
        "number": row.number,
        "generation": row.generation,
        "state": row.state,
        "cause": row.cause,
        "evidence": row.evidence,
        "exit_code": row.exit_code,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "resumed_from": row.resumed_from,
        "nodes": list(dict.fromkeys(place.node for place in places if place.node)),
        "node": places[0].node if places else None,
        "gpus": [gpu for place in places for gpu in place.gpus],
        "isolation": dict(places[0].isolation) if places else {},
        "usage": row.usage,
        "placed": len(places),
    }
    if tasks is not None:
        view["tasks"] = tasks_view(row, tasks)
        view["world"] = world_view(row, view["tasks"], elastic=elastic)
    return view


def checkpoint_view(row: CheckpointRow) -> Json:
    return {
        "id": row.id,
        "attempt": row.attempt,
        "generation": row.generation,
        "name": row.name,
        "step": row.step,
        "size": row.size,
        "created_at": row.created_at,
        "how": row.how,
        "kept": row.kept,
        "world_size": row.world_size,
        "metrics": row.metrics,
    }


def _run(run: RunRow, place: int | None) -> Json:
    return {
        "id": run.id,
        "name": run.name,
        "project": run.project,
        "state": run.state,
        "priority": run.priority,
        "tags": list(run.tags),
        "seq": run.seq,
        "created_at": run.created_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "user": run.user,
        "exit_code": run.exit_code,
        "cause": run.cause,
        "reason": run.reason,
        "job": run.job,
        "command": run.command,
        "code": run.code,
        "outputs": run.outputs,
        "folder": run.folder,
        "warnings": list(run.warnings),
        "place": place,
        **_removed(run),
    }


def _removed(run: RunRow) -> Json:
    """Only of runs in the trash."""
    if run.removed_at is None:
        return {}
    return {"removed_at": run.removed_at, "until": run.removed_at + TRASH_FOR}


def _add_readiness(services: Services, views: Sequence[Json]) -> None:
    """Adds how many tasks of the newest attempt are up, where it has several. One question for all runs."""
    several = [view for view in views if view["attempts"] and view["attempts"][-1]["placed"] > 1]
    found = services.controller.readiness_of([view["id"] for view in several])
    for view in several:
        if (ready := found.get(view["id"])) is not None:
            view["attempts"][-1] |= {"placed": ready.size, "up": ready.up}


def _places(services: Services, runs: Sequence[RunRow]) -> dict[str, int]:
    """Places in the queue. One question for all runs: each question waits for the control loop."""
    return services.controller.places([run.id for run in runs if run.state == RunState.QUEUED])
