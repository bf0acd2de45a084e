"""Schemas on PostgreSQL: created directly, migrated by one server at a time, indexed for frequent queries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from stoker.errors import StoreError
from stoker.store import Store, migrate, schema
from stoker.store.dialects.base import dialect_for
from stoker.store.rows import AddMetrics, Point, RunRow
from stoker.testing.store_case import new_run, submit_all
from stoker.testing.store_postgres import PostgresServer
from support.store.next_schema import NEXT
from support.store.queries import ASKED_OFTEN

LAYOUT = """
SELECT 'column', table_name, column_name, data_type, is_nullable, coalesce(column_default, ''), coalesce(collation_name, '')
    FROM information_schema.columns WHERE table_schema = 'public'
UNION ALL SELECT 'index', tablename, indexname, indexdef, '', '', '' FROM pg_indexes WHERE schemaname = 'public'
UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid), '', '', ''
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
ORDER BY 1, 2, 3
"""


def test_the_migrations_lead_to_the_tables(postgres: PostgresServer, url: str) -> None:
    Store.open(url).close()
    migrated = postgres.fresh()
    dialect_for(migrated).create(migrate.upgrade)
    assert postgres.execute(LAYOUT, migrated) == postgres.execute(LAYOUT, url)
    with Store.open(migrated) as store:
        assert store.schema_version() == schema.VERSION
        assert store.submit(new_run("k"), now=1.0)[1]


def test_numbers_are_long_and_text_is_ordered_by_bytes(postgres: PostgresServer, url: str) -> None:
    Store.open(url).close()
    columns = [row for row in postgres.execute(LAYOUT, url) if row[0] == "column"]
    assert {row[3] for row in columns} == {
        "bigint", "text", "double precision", "boolean", "character varying"
    }  # fmt: skip
    assert {row[6] for row in columns if row[3] == "text"} == {"C"}


@pytest.mark.parametrize("fails", [False, True])
def test_an_older_schema_is_migrated_in_one_step_by_one(
    postgres: PostgresServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Three servers of a new version start at once on a database of the old one."""
    with Store.open(url) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
    before = postgres.execute(LAYOUT, url)
    old, new = schema.VERSION, schema.VERSION + 1
    more = "raise RuntimeError('half way')" if fails else "pass"
    (tmp_path / "next.py").write_text(NEXT.format(old=old, new=new, more=more))
    upgrade = migrate.upgrade
    upgrades: list[None] = []

    def counted(connection: Connection) -> None:
        upgrade(connection, versions=tmp_path)
        upgrades.append(None)

    monkeypatch.setattr(schema, "VERSION", new)
    monkeypatch.setattr(migrate, "upgrade", counted)
    failures = together(3, lambda: Store.open(url).close())
    if fails:
        assert len(failures) == 3 and all("half way" in str(failure) for failure in failures)
        assert postgres.execute(LAYOUT, url) == before and upgrades == []
        monkeypatch.setattr(schema, "VERSION", old)
    else:
        assert failures == [] and len(upgrades) == 1
    with Store.open(url) as store:
        assert store.schema_version() == (old if fails else new)
        assert store.run(run.id) == run


def together(count: int, work: Any) -> list[BaseException]:
    start = threading.Barrier(count)
    failures: list[BaseException] = []

    def one() -> None:
        try:
            start.wait(timeout=30)
            work()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return failures


def test_a_newer_schema_is_refused_and_left_alone(postgres: PostgresServer, url: str) -> None:
    Store.open(url).close()
    postgres.execute("UPDATE alembic_version SET version_num = '9999'", url)
    before = postgres.execute(LAYOUT, url)
    with pytest.raises(StoreError, match=f"schema 9999.*up to {schema.VERSION}"):
        Store.open(url)
    assert postgres.execute(LAYOUT, url) == before


@pytest.fixture(scope="module")
def crowded(postgres: PostgresServer) -> Iterator[Store]:
    """Enough rows that a sequential scan is no longer the cheapest plan."""
    url = postgres.fresh()
    with Store.open(url) as store:
        runs = submit_all(store, [new_run(str(number), tags=("a", "b")) for number in range(3000)])
        points = [Point("loss", step, 1.0, 1.0) for step in range(3000)]
        store.apply([AddMetrics(runs[0].id, 1, points), AddMetrics(runs[1].id, 1, points)])
        postgres.execute("ANALYZE", url)
        yield store


@pytest.mark.parametrize("name", [name for name in ASKED_OFTEN if name != "counts"])
def test_no_table_is_scanned_whole(crowded: Store, name: str) -> None:
    run: RunRow = crowded.runs()[0]
    plans: list[str] = []

    def explain(connection: Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith(("SELECT", "UPDATE")):
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.execute("SET LOCAL enable_seqscan = off")
            rows = driver.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(row[0] for row in rows) + f"\n<- {statement}")

    engines = (crowded._database.readers, crowded._database.writer)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", explain)
    try:
        ASKED_OFTEN[name](crowded, run)
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", explain)
    assert plans
    for plan in plans:
        assert "Seq Scan" not in plan, plan
