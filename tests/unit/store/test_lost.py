"""A home that has lost its database, and the copies that bring it back."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.errors import StoreDamaged, StoreLost
from stoker.settings import Home
from stoker.store import Store
from stoker.store.dialects import sqlite_copies as copies
from stoker.testing.store_case import new_run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home that a server has used."""
    made = Home(tmp_path / "home")
    for path in (made.tasks, made.runs, made.blobs / "objects", made.blobs / "tmp", made.backups / "auto"):
        path.mkdir(parents=True)
    made.token.write_text("token")
    made.config.write_text("[local]\ncpu = 1\n")
    return made


def submit(home: Home, key: str) -> str:
    """A run as the server acknowledges it."""
    with Store.of_home(home, home.database) as store:
        row, _ = store.submit(new_run(key), now=1.0)
    with home.ledger.open("a") as ledger:
        ledger.write(json.dumps({"id": row.id, "name": row.name, "t": 1.0}) + "\n")
    return row.id


def lose(home: Home) -> None:
    for path in home.root.glob("stoker.db*"):
        path.unlink()


def copy(home: Home, name: str) -> Path:
    with Store.open(home.database, create=False) as store:
        store.backup(home.backups / name)
    return home.backups / name


def test_a_new_home_gets_a_database(home: Home) -> None:
    for _ in range(2):
        with Store.of_home(home, home.database) as store:
            assert not any(store.counts().values())
            store.backup(home.backups / "auto/stoker-20260101-000000.db")
            BlobStore(home.blobs).put_stream([b"code of a run that was refused"])


LEFT: dict[str, Callable[[Home], object]] = {
    "ledger": lambda home: home.ledger.write_text('{"id": "a-1", "name": "a", "t": 1.0}\n{"torn'),
    "tasks": lambda home: (home.tasks / "a-1/1/worker-0").mkdir(parents=True),
    "blobs": lambda home: BlobStore(home.blobs).put_stream([b"weights"]),
    "copy": lambda home: (submit(home, "a"), copy(home, "auto/stoker-20260101-000000.db"), home.ledger.unlink()),
    "whole copy": lambda home: (
        submit(home, "a"), (home.backups / "mine").mkdir(), copy(home, "mine/stoker.db"), home.ledger.unlink()
    ),
}  # fmt: skip


DATABASES = ("gone", "empty file", "without tables", "without runs")


@pytest.mark.parametrize(
    ("left", "database"),
    [("ledger", database) for database in DATABASES]
    + [
        (left, database)
        for left in ("tasks", "blobs", "copy", "whole copy")
        for database in ("gone", "without runs")
    ],
)
def test_none_is_made_beside_what_is_left_of_another(home: Home, left: str, database: str) -> None:
    LEFT[left](home)
    lose(home)
    if database == "empty file":
        home.database.touch()
    elif database == "without tables":
        with contextlib.closing(sqlite3.connect(home.database)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    elif database == "without runs":
        Store.open(home.database).close()
    before = {path: path.read_bytes() for path in home.root.glob("stoker.db")}
    if left == "blobs" and database.startswith("without"):
        Store.of_home(home, home.database).close()  # code that was uploaded before its run
        return
    with pytest.raises((StoreLost, StoreDamaged)) as caught:
        Store.of_home(home, home.database)
    assert "stoker backup restore" in (caught.value.hint or "")
    assert {path: path.read_bytes() for path in home.root.glob("stoker.db")}.keys() == before.keys()
    if isinstance(caught.value, StoreLost):
        assert "nothing was ended or deleted" in caught.value.message
        assert "stoker server start --anew" in (caught.value.hint or "")
        assert bool(caught.value.details["copies"]) == ("copy" in left)


def test_existing_copies_and_the_best_way_back_are_named(home: Home) -> None:
    runs = [submit(home, str(number)) for number in range(3)]
    best = copy(home, "auto/stoker-20260101-000000.db")
    (home.tasks / runs[0]).mkdir()
    lose(home)
    Store.open(home.database).close()
    copy(home, "auto/stoker-20260102-000000.db")
    (home.backups / "auto/stoker-20260103-000000.db").write_bytes(b"SQLite format 3\0" + b"junk" * 1000)
    with pytest.raises(StoreLost) as caught:
        Store.of_home(home, home.database)
    assert "3 in its ledger" in caught.value.message and f"of 1 ({runs[0]})" in caught.value.message
    assert f"({best}) has 3 runs and was made on " in (caught.value.hint or "")


def test_a_home_with_its_database_on_a_server(home: Home) -> None:
    submit(home, "a")
    copy(home, "before-migration-20260101-000000.db")
    lose(home)
    with pytest.raises(StoreLost) as caught:
        Store.of_home(home, home.database)  # its config.toml has lost the setting
    assert "[server] database" in (caught.value.hint or "")
    assert not home.database.exists()


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_database_deleted_under_its_server_is_copied_from_what_is_open(home: Home, how: str) -> None:
    submit(home, "a")
    with Store.open(home.database) as store:
        store.submit(new_run("b"), now=2.0)
        lose(home)
        if how == "replaced":
            Store.open(home.database).close()
        with pytest.raises(StoreDamaged, match="gone" if how == "deleted" else "replaced"):
            store.submit(new_run("c"), now=1.0)
        if how == "deleted":
            with contextlib.suppress(StoreDamaged):
                store.live()
            assert not home.database.exists(), "it does not come back empty"
        store.backup(home.backups / "rescued.db")
    assert copies.contents(home.backups / "rescued.db") == copies.Contents(2, 2.0)


def test_a_copy_is_never_pushed_out_by_one_that_has_lost_its_runs(home: Home) -> None:
    auto = home.backups / "auto"
    day = iter(range(1, 29))
    for number in range(3):
        submit(home, str(number))
        copy(home, f"auto/stoker-202601{next(day):02}-000000.db")
        assert copies.rotate(auto) is None
    assert _runs(auto) == {"stoker-20260102-000000.db": 2, "stoker-20260103-000000.db": 3}
    lose(home)
    Store.open(home.database).close()
    for _ in range(4):
        copy(home, f"auto/stoker-202601{next(day):02}-000000.db")
        copies.rotate(auto)
    assert _runs(auto) == {
        "kept-20260103-000000.db": 3, "stoker-20260106-000000.db": 0, "stoker-20260107-000000.db": 0
    }  # fmt: skip
    with Store.open(home.database) as store:
        for number in range(9):
            store.submit(new_run(f"other {number}"), now=1.0)
    for _ in range(3):
        copy(home, f"auto/stoker-202601{next(day):02}-000000.db")
        assert copies.rotate(auto) == auto / "kept-20260103-000000.db", "more runs, but not these"
    shutil.copy(auto / "kept-20260103-000000.db", home.database)
    submit(home, "after it was restored")
    copy(home, f"auto/stoker-202601{next(day):02}-000000.db")
    kept = copies.rotate(auto)
    assert kept is not None and copies.contents(kept) == copies.Contents(9, 1.0), "the others are kept now"
    assert len(_runs(auto)) == 3


def test_no_copy_goes_while_the_newest_cannot_be_read(home: Home) -> None:
    """A server without free descriptors can read no copy, and each looks empty to it."""
    auto = home.backups / "auto"
    submit(home, "a")
    for day in (1, 2, 3):
        copy(home, f"auto/stoker-2026010{day}-000000.db")
    (auto / "stoker-20260104-000000.db").touch()
    before = sorted(auto.iterdir())
    assert copies.rotate(auto) is None
    assert sorted(auto.iterdir()) == before


def _runs(auto: Path) -> dict[str, int]:
    return {path.name: inside.runs for path in auto.iterdir() if (inside := copies.contents(path))}


def test_unreadable_copies_do_not_count(tmp_path: Path) -> None:
    for name, content in (
        ("empty", b""),
        ("junk", b"junk" * 100),
        ("torn", b"SQLite format 3\0" + b"x" * 5000),
    ):
        (tmp_path / name).write_bytes(content)
        assert copies.contents(tmp_path / name) is None
    with contextlib.closing(sqlite3.connect(tmp_path / "other")) as connection:
        connection.execute("CREATE TABLE runs (id TEXT)")
    assert copies.contents(tmp_path / "other") is None
    assert copies.contents(tmp_path / "absent") is None and not (tmp_path / "absent").exists()
    assert copies.best_first(list(tmp_path.iterdir())) == []
