"""What is asked often must stay a short walk of an index, however many runs there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, event

from stoker.errors import Conflict
from stoker.store import Store
from stoker.store.rows import AddMetrics, Point, RunFilter, RunRow
from stoker.testing.store_case import new_run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("plans") / "stoker.db") as store:
        runs = store.submit_many([new_run(str(number), tags=("a", "b")) for number in range(20)], now=1.0)
        store.apply([AddMetrics(runs[0][0].id, 1, [Point("loss", step, 1.0, 1.0) for step in range(20)])])
        yield store


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
    "metrics at": lambda store, run: store.metrics_at(run.id, 10),
    "recent metrics": lambda store, run: store.recent_metrics(run.id, ["loss"], 60),
    "metric names": lambda store, run: store.metric_names(run.id),
    "metric points": lambda store, run: store.metric_points(run.id, "loss"),
    "counts": lambda store, run: store.counts(),
    "desired": lambda store, run: store.set_desired(run.id, "run", 1.0, by=""),
    "submit again": lambda store, run: store.submit(new_run(run.key), now=1.0),
}


@pytest.mark.parametrize("name", ASKED_OFTEN)
def test_no_table_is_scanned_or_sorted(store: Store, name: str) -> None:
    run = store.runs()[0]
    plans: list[str] = []

    def explain(connection: Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith(("SELECT", "UPDATE")):
            driver = connection.connection.driver_connection
            assert driver is not None
            rows = driver.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.extend(f"{row[3]}  <-  {statement}" for row in rows)

    engines = (store._database.readers, store._database.writer)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", explain)
    try:
        ASKED_OFTEN[name](store, run)
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", explain)
    assert plans
    for plan in plans:
        step = plan.split("  <-  ")[0]
        walk = step.startswith("SCAN") and "INDEX" not in step and "CONSTANT ROW" not in step
        in_order = walk and "ORDER BY runs.seq DESC" in plan and "TEMP B-TREE" not in " ".join(plans)
        assert not walk or in_order, plan
        assert "TEMP B-TREE" not in step, plan
