"""Frequent queries use an index, and stay short for any number of runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, event

from stoker.store import Store
from stoker.store.rows import AddMetrics, Point
from stoker.testing.store_case import new_run, submit_all
from support.store.queries import ASKED_OFTEN


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("plans") / "stoker.db") as store:
        runs = submit_all(store, [new_run(str(number), tags=("a", "b")) for number in range(20)])
        store.apply([AddMetrics(runs[0].id, 1, [Point("loss", step, 1.0, 1.0) for step in range(20)])])
        yield store


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
