"""Schemas: created directly, migrated, or refused; SQL of one database is only in its files."""

from __future__ import annotations

import ast
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import stoker.store
from stoker.errors import StoreError
from stoker.store import Store, migrate, schema
from stoker.store.rows import RunFilter
from stoker.testing.store_case import new_run
from support.store.next_schema import NEXT

HERE = Path(__file__).parent
PACKAGE = Path(stoker.store.__file__).parent


def layout(path: Path) -> dict[str, list[str]]:
    """The content of a database, independent of the order of columns and constraints."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    # A column added by a migration has no separate line.
    return {
        name: sorted(line.strip() for line in re.split(r"\n|,(?![^(\n]*\))", sql) if line.strip())
        for name, sql in rows
    }


def load(dump: Path, path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(dump.read_text())
    connection.close()


def test_the_migrations_lead_to_the_tables(tmp_path: Path) -> None:
    Store.open(tmp_path / "direct.db").close()
    sqlite3.connect(tmp_path / "migrated.db").execute("VACUUM").connection.close()
    Store.open(tmp_path / "migrated.db").close()
    assert layout(tmp_path / "migrated.db") == layout(tmp_path / "direct.db")


@pytest.mark.parametrize("version", range(1, schema.VERSION + 1))
def test_each_version_is_migrated_with_its_data(tmp_path: Path, version: int) -> None:
    path = tmp_path / "stoker.db"
    load(HERE / f"schema_v{version}.sql", path)
    with Store.open(path) as store:
        assert store.schema_version() == schema.VERSION
        assert store.check() == []
        runs = {run.key: run for run in store.runs(RunFilter(limit=100))}
        assert {key: run.state for key, run in runs.items()} == {"first": "succeeded", "second": "queued"}
        run = runs["first"]
        assert run.id == "digits-7f3k" and run.tags == ("baseline", "ünï") and run.record["python"] == "3.12"
        assert run.outputs == {"files": 2, "bytes": 10, "digest": "out1"}
        kept = {"files": 3, "bytes": 12, "digest": "folder1"}
        assert run.folder == (kept if version >= 5 else None)
        assert ("folder1" in store.blob_roots()) == (version >= 5)
        trash = {run.key: run.removed_at for run in store.runs(RunFilter(trash=True))}
        assert trash == ({"gone": 200.5} if version >= 6 else {})
        assert store.attempt(run.id, 1).cause == "completed"
        assert store.tasks(run.id, 1)[0].phase == "ended"
        assert store.checkpoint("c1").digest == "tree1"
        assert [event.kind for event in store.events(run.id)] == ["queued", "ended"]
        assert [repr(point[1]) for point in store.metric_points(run.id, "loss")] == ["0.5", "nan", "inf"]
        assert store.cursors(run.id, 1) == {("worker-0", "metrics/1.jsonl"): 42}
        assert [row.name for row in store.clusters()] == (["gpu-prod"] if version >= 2 else [])
        parts = store.checkpoint_parts(run.id, 1)
        assert [part.task for part in parts] == (["worker-1"] if version >= 3 else [])
        assert store.checkpoint("c1").world_size == (2 if version >= 3 else None)
        transfers = store.checkpoint_transfers(run.id, 1)
        assert [row.name for row in transfers] == (["last.pt"] if version >= 4 else [])
        assert store.submit(new_run("third"), now=9.0)[1]
    Store.open(tmp_path / "direct.db").close()
    assert layout(path) == layout(tmp_path / "direct.db")


@pytest.mark.parametrize("fails", [False, True])
def test_an_older_schema_is_copied_then_migrated_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    path = tmp_path / "stoker.db"
    with Store.open(path) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
    versions = tmp_path / "versions"
    versions.mkdir()
    old, new = schema.VERSION, schema.VERSION + 1
    more = "raise RuntimeError('half way')" if fails else "pass"
    (versions / "next.py").write_text(NEXT.format(old=old, new=new, more=more))
    upgrade = migrate.upgrade
    monkeypatch.setattr(schema, "VERSION", new)
    monkeypatch.setattr(migrate, "upgrade", lambda connection: upgrade(connection, versions=versions))
    if fails:
        before = layout(path)
        with pytest.raises(RuntimeError, match="half way"):
            Store.open(path)
        assert layout(path) == before
        monkeypatch.setattr(schema, "VERSION", old)
    with Store.open(path) as store:
        assert store.schema_version() == (old if fails else new)
        assert store.run(run.id) == run
    monkeypatch.setattr(schema, "VERSION", old)
    with Store.open(f"{path}.schema-{old}", create=False) as copy:
        assert copy.run(run.id) == run


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "stoker.db"
    Store.open(path).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"schema 9999.*up to {schema.VERSION}") as caught:
        Store.open(path)
    assert "newer" in (caught.value.hint or "")
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite"
    sqlite3.connect(path).execute("CREATE TABLE bookmarks (url)").connection.close()
    with pytest.raises(StoreError, match="bookmarks"):
        Store.open(path)
    assert layout(path) == {"bookmarks": ["CREATE TABLE bookmarks (url)"]}


def test_migrations_are_loaded_only_when_needed(tmp_path: Path) -> None:
    script = "import sys; from stoker.store import Store; [Store.open(sys.argv[1]).close() for _ in '12']; print('alembic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "stoker.db")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


OWN_WORDS = {
    "sqlite": r"pragma|insert or|rowid|autoincrement\b(?!=False)|sqlite|glob\(|strftime|julianday|ifnull",
    "postgres": r"postgres|psycopg|\bpg_|advisory|setval|nextval|\bserial\b|::|ilike|jsonb|for update|isolation level",
}


@pytest.mark.parametrize("database", OWN_WORDS)
@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_sql_of_one_database_is_only_in_its_files(path: Path, database: str) -> None:
    if path.name.startswith(database):
        return
    own_files = re.compile(rf"from stoker\.store\.dialects\.{database}\w* import|{database}Dialect", re.I)
    for number, line in enumerate(_without_docstrings(path).splitlines(), 1):
        found = re.search(OWN_WORDS[database], own_files.sub("", line), re.I)
        assert not found, f"{path.name}:{number}: {line.strip()}"


def _without_docstrings(path: Path) -> str:
    """A docstring may name a database; code may not."""
    tree = ast.parse(path.read_text())
    lines = path.read_text().splitlines()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[line] = ""
    return "\n".join(lines)
