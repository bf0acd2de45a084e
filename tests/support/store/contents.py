"""The contents of a store, for comparing two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.store import Store
from stoker.store.rows import RunFilter


def everything(store: Store) -> dict[str, Any]:
    """All readable rows, as text, so that NaN equals itself."""
    runs = store.runs(RunFilter(limit=10**6))
    found: dict[str, Any] = {
        "runs": runs,
        "live": store.live(),
        "counts": store.counts(),
        "unfinished": store.unfinished_attempts(),
        "latest": sorted(store.latest_attempts([run.id for run in runs]).items()),
        "roots": sorted(store.blob_roots()),
        "clusters": store.clusters(),
    }
    reads: dict[str, Callable[[str], Any]] = {
        "attempts": store.attempts,
        "checkpoints": store.checkpoints,
        "events": store.events,
        "metric keys": store.metric_keys,
        "latest metrics": store.latest_metrics,
    }
    for run in runs:
        for name, read in reads.items():
            found[f"{name} of {run.id}"] = read(run.id)
        for key in store.metric_keys(run.id):
            found[f"{key['key']} of {run.id}"] = store.metric_points(run.id, key["key"])
        for number in (1, 2):
            found[f"tasks {number} of {run.id}"] = store.tasks(run.id, number)
            found[f"parts {number} of {run.id}"] = store.checkpoint_parts(run.id, number)
            found[f"cursors {number} of {run.id}"] = sorted(store.cursors(run.id, number).items())
    return {name: repr(value) for name, value in found.items()}
