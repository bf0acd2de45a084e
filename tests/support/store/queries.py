"""Frequent queries of servers, on both databases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from stoker.errors import Conflict
from stoker.store import Store
from stoker.store.rows import RunFilter, RunRow
from stoker.testing.store_case import new_run


def resolve_prefix(store: Store, run: RunRow) -> None:
    with contextlib.suppress(Conflict):  # ids are random: another may begin alike
        store.resolve(run.id[:-1])


ASKED_OFTEN: dict[str, Callable[[Store, RunRow], object]] = {
    "run": lambda store, run: store.run(run.id),
    "resolve an id": lambda store, run: store.resolve(run.id),
    "resolve a name": lambda store, run: store.resolve("digits"),
    "resolve a prefix": resolve_prefix,
    "newest": lambda store, run: store.runs(RunFilter()),
    "page after": lambda store, run: store.runs(RunFilter(before=10)),
    "by state": lambda store, run: store.runs(RunFilter(states=("queued",))),
    "by states": lambda store, run: store.runs(RunFilter(states=("queued", "failed", "running"))),
    "by name": lambda store, run: store.runs(RunFilter(name="digits", states=("queued",))),
    "by tag": lambda store, run: store.runs(RunFilter(tags=("a",))),
    "by tags": lambda store, run: store.runs(RunFilter(tags=("a", "b"))),
    "attempts": lambda store, run: store.attempts(run.id),
    "latest attempts": lambda store, run: store.latest_attempts([run.id]),
    "unfinished attempts": lambda store, run: store.unfinished_attempts(),
    "tasks": lambda store, run: store.tasks(run.id, 1),
    "checkpoints": lambda store, run: store.checkpoints(run.id),
    "events": lambda store, run: store.events(run.id),
    "cursors": lambda store, run: store.cursors(run.id, 1),
    "latest metrics": lambda store, run: store.latest_metrics(run.id),
    "recent metrics": lambda store, run: store.recent_metrics(run.id, ["loss"], 60),
    "metric names": lambda store, run: store.metric_names(run.id),
    "metric points": lambda store, run: store.metric_points(run.id, "loss"),
    "in the trash": lambda store, run: store.resolve(run.id) and store.expired(1.0),
    "counts": lambda store, run: store.counts(),
    "desired": lambda store, run: store.set_desired(run.id, "run", 1.0, by=""),
    "submit again": lambda store, run: store.submit(new_run(run.key), now=1.0),
}
