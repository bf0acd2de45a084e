"""How well the tasks of a run work together: which one is the straggler, how fast the run is, what more workers gain.

Only for `show`: it reads metrics, which lists of runs and long polls do not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.control.diagnosis.speedup import Speed, compare, speed, useful
from stoker.control.diagnosis.straggler import Signs, straggler
from stoker.control.logs.reader import LogArchive
from stoker.spec.states import RunState
from stoker.store import Store
from stoker.store.metrics import MetricPoint
from stoker.store.rows import RunFilter, RunRow

Json = dict[str, Any]
_POINTS = 60
"""Newest points of a metric that count: the current speed, not that of the start."""
_KEYS = 400
"""Metrics read for it: of a run with thousands the first ones suffice."""
_BACK = 100
"""Earlier runs among which a run of one worker is searched."""
_COMPUTE = ("compute_seconds", "compute_time")
"""Names that scripts give to the time they compute in a step."""
_TRAINS = ("worker", "chief", "master")
"""Roles whose tasks do the same work, so that one can be slower than the others."""


def straggler_view(
    store: Store, archive: LogArchive, run: RunRow, attempt: int, tasks: Sequence[Json]
) -> Json | None:
    """The straggler among the training tasks, or among all where no role is known to train."""
    known = [task for task in tasks if task["role"] in _TRAINS] or list(tasks)
    if len(known) < 2:
        return None
    live = run.state == RunState.RUNNING and all(task["phase"] == "running" for task in known)
    computes = _computes(store, run.id, [task["name"] for task in known])
    lines = archive.newest(run.id, attempt) if live else {}
    now = time.time()
    found = straggler(
        [
            Signs(
                task=task["name"],
                compute=computes.get(task["name"]),
                step_seconds=task["usage"].get("step_seconds"),
                step=task["usage"].get("step") if live else None,
                cpu=task["usage"].get("cpu") if live else None,
                gpu=task["usage"].get("gpu") if live else None,
                quiet=now - lines[task["name"]] if task["name"] in lines else None,
            )
            for task in known
        ]
    )
    return found.to_json() if found is not None else None


def _computes(store: Store, run: str, names: Sequence[str]) -> dict[str, float]:
    """The median of what each task reported lately. The first task's metrics have no suffix: it speaks for the run."""
    for key in _COMPUTE:
        whose = {key if index == 0 else f"{key}@{name}": name for index, name in enumerate(names[:_KEYS])}
        series = store.recent_metrics(run, list(whose), _POINTS)
        if series:
            return {
                whose[one]: middle
                for one, points in series.items()
                if (middle := _median(points)) is not None
            }
    return {}


def _median(points: Sequence[MetricPoint]) -> float | None:
    values = [value for _, value, _, _ in points if math.isfinite(value)]
    return statistics.median(values) if values else None


def scaling_view(store: Store, run: RunRow, tasks: Sequence[Json]) -> Json | None:
    """The run's speed and its gain from more workers. None: it has reported no steps."""
    here = _speed(store, run.id)
    if not here.known:
        return None
    workers = _workers(run.job, tasks)
    view: Json = {
        "workers": workers,
        "step_seconds": here.step_seconds,
        "rate": here.rate,
        "unit": here.unit or None,
        "pace": here.text(),
        "against": None,
        "efficiency": None,
        "basis": None,
        "text": "",
    }
    if workers < 2:
        return view
    for one in _single_worker_runs(store, run):
        found = compare(here, workers, _speed(store, one.id), one.id)
        if found is not None:
            other = "" if one.command == run.command else "; that run had another command"
            return view | {
                "against": found.against,
                "efficiency": round(found.efficiency, 4),
                "basis": found.basis,
                "text": found.text + other,
            }
    view["text"] = f"no run of one worker to compare with; `stoker rerun {run.id} --set workers=1` makes one"
    return view


def _speed(store: Store, run: str) -> Speed:
    keys = useful(store.metric_names(run))[:_KEYS]
    series = store.recent_metrics(run, keys, _POINTS) if keys else {}
    return speed({key: [point[:3] for point in points] for key, points in series.items()})


def _workers(job: Mapping[str, Any], tasks: Sequence[Json]) -> int:
    """The number of training processes."""
    training = [task for task in tasks if task["role"] in _TRAINS] or list(tasks)
    return len(training) * int(job.get("processes") or 1)


def _single_worker_runs(store: Store, run: RunRow) -> list[RunRow]:
    """Earlier runs of one worker that succeeded, best match first: the same command, then the same name."""
    states = (str(RunState.SUCCEEDED),)
    named = store.runs(
        RunFilter(name=run.name, states=states, project=run.project, before=run.seq, limit=_BACK),
        records=False,
    )
    recent = store.runs(
        RunFilter(states=states, project=run.project, before=run.seq, limit=_BACK), records=False
    )
    alike = [
        row for row in recent if row.code == run.code and row.command == run.command and row.name != run.name
    ]
    found = [row for row in (*named, *alike) if _alone(row.job)]
    return sorted(found, key=lambda row: (row.command != run.command, -row.seq))[:3]


def _alone(job: Mapping[str, Any]) -> bool:
    return job.get("workers", 1) == 1 and not job.get("roles") and int(job.get("processes") or 1) == 1
