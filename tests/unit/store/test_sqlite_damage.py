"""A damaged database is detected, named and not written to; no exception of the driver is raised."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from stoker.errors import StokerError, StoreDamaged, StoreError
from stoker.store import Store, put_in_place
from stoker.store.rows import AddMetrics, Point, RunFilter, UpdateRun
from stoker.testing.store_case import new_run, submit_all

PAGE = 4096


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of a few hundred pages, closed properly."""
    path = tmp_path_factory.mktemp("template") / "stoker.db"
    with Store.open(path) as store:
        runs = submit_all(
            store, [new_run(f"k{n}", tags=("a", "b"), record={"filler": "x" * 2000}) for n in range(200)]
        )
        store.apply(
            [
                AddMetrics(run.id, 1, [Point("loss", n, float(n), 1.0) for n in range(100)])
                for run in runs[:20]
            ]
        )
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(template, tmp_path / "stoker.db"))


def use_everything(path: Path, every: int = 1) -> None:
    with Store.open(path) as store:
        for run in store.runs(RunFilter(limit=1000))[::every]:
            store.run(run.id)
            store.events(run.id)
            store.metric_keys(run.id)
            store.metric_points(run.id, "loss")
            store.runs(RunFilter(tags=("a",)))
        store.submit(new_run("one more"), now=2.0)
        problems = store.check()
        if problems:
            raise StoreDamaged(problems[0], hint="stoker backup restore")


def assert_damaged(path: Path) -> None:
    with pytest.raises(StoreDamaged) as caught:
        use_everything(path)
    assert "stoker backup restore" in (caught.value.hint or "")


def test_an_intact_database_is_not_called_damaged(path: Path) -> None:
    use_everything(path)


@pytest.mark.parametrize("filler", ["garbage", "zeros"])
def test_pages_overwritten_in_the_middle(path: Path, filler: str) -> None:
    seed = 99
    print(f"seed {seed}")
    chance = random.Random(seed)
    size = path.stat().st_size
    for start in [PAGE * number for number in chance.sample(range(2, size // PAGE - 12), 6)]:
        broken = path.with_name(f"broken-{start}.db")
        data = bytearray(path.read_bytes())
        data[start : start + 10 * PAGE] = (
            chance.randbytes(10 * PAGE) if filler == "garbage" else bytes(10 * PAGE)
        )
        broken.write_bytes(data)
        assert_damaged(broken)


@pytest.mark.parametrize("keep", [0, 50, 100, PAGE, PAGE + 100, 0.5, 0.95])
def test_truncated(path: Path, keep: float) -> None:
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(int(size * keep) if isinstance(keep, float) else keep)
    assert_damaged(path)


@pytest.mark.parametrize("length", [16, 100, PAGE])
def test_header_zeroed(path: Path, length: int) -> None:
    with open(path, "r+b") as file:
        file.write(bytes(length))
    assert_damaged(path)


def test_not_a_database_at_all(tmp_path: Path) -> None:
    path = tmp_path / "stoker.db"
    path.write_text("dear diary, " * 1000)
    assert_damaged(path)
    assert path.read_text().startswith("dear diary"), "it is not ours to overwrite"


def crashed(path: Path, transactions: int = 40) -> Path:
    """A copy as after a crash: its log has not been applied to the main file."""
    with Store.open(path) as store:
        for number in range(transactions):
            store.submit(new_run(f"in the log {number}"), now=1.0)
        copy = path.with_name("crashed.db")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


def wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def test_after_a_crash_the_log_is_applied(path: Path) -> None:
    copy = crashed(path)
    with Store.open(copy) as store:
        assert store.counts()["queued"] == 240
        assert store.check() == []


def test_a_log_cut_short_by_a_crash_is_not_damage(path: Path) -> None:
    """The last transaction was being written, and was not acknowledged."""
    copy = crashed(path)
    with open(wal(copy), "r+b") as file:
        file.truncate(wal(copy).stat().st_size - 100)
    with Store.open(copy) as store:
        assert store.counts()["queued"] == 239


@pytest.mark.parametrize("where", ["header", "early", "middle", "one page", "all"])
def test_garbage_in_the_log(path: Path, where: str) -> None:
    copy = crashed(path)
    data = bytearray(wal(copy).read_bytes())
    chance = random.Random(5)
    start, length = {
        "header": (0, 32),
        "early": (32, len(data) // 2),
        "middle": (len(data) // 2, len(data) // 2),
        "one page": (32 + 24 + (24 + PAGE) * 3, 1000),
        "all": (0, len(data)),
    }[where]
    data[start : start + length] = chance.randbytes(length)
    wal(copy).write_bytes(data)
    assert_damaged(copy)


def test_only_the_log_is_left(path: Path) -> None:
    copy = crashed(path)
    copy.unlink()
    assert_damaged(copy)
    assert not copy.exists()


def test_once_damaged_nothing_is_written(path: Path) -> None:
    with Store.open(path) as store:
        newest = store.runs(RunFilter(limit=1))[0]
        path.rename(path.with_name("moved.db"))
        with pytest.raises(StoreDamaged, match="gone"):
            store.submit(new_run("x"), now=1.0)
        path.with_name("moved.db").rename(path)
        assert "gone" in (store.damaged or "")
        with pytest.raises(StoreDamaged, match="nothing more is written") as caught:
            store.apply([UpdateRun(newest.id, {"state": "failed"})])
        assert "stoker backup restore" in (caught.value.hint or "")
        assert store.run(newest.id) == newest, "reads go on"


def test_another_file_in_its_place_is_noticed(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        shutil.copy(path, tmp_path / "other")
        (tmp_path / "other").rename(path)
        with pytest.raises(StoreDamaged, match="replaced"):
            store.submit(new_run("x"), now=1.0)


def test_damage_done_while_it_is_open(path: Path) -> None:
    with Store.open(path) as store:
        with open(path, "r+b") as file:
            file.seek(PAGE)
            file.write(random.Random(1).randbytes(path.stat().st_size - PAGE))
        problems = store.check()
        assert problems and store.damaged
        with pytest.raises(StoreDamaged):
            store.submit(new_run("x"), now=1.0)


def test_a_damaged_database_does_not_replace_a_good_copy(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        store.backup(tmp_path / "copy.db")
        good = (tmp_path / "copy.db").read_bytes()
        with open(path, "r+b") as file:
            file.seek(20 * PAGE)
            file.write(random.Random(1).randbytes(30 * PAGE))
        with pytest.raises(StoreDamaged):
            store.backup(tmp_path / "copy.db")
        assert store.damaged
    assert (tmp_path / "copy.db").read_bytes() == good
    assert sorted(found.name for found in tmp_path.iterdir()) == ["copy.db", "stoker.db"], (
        "nothing is left lying about"
    )


def test_restoring_a_copy_and_naming_what_is_missing(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        store.backup(tmp_path / "copy.db")
        late, _ = store.submit(new_run("after the copy", name="late"), now=2.0)
        shutil.copy(wal(path), tmp_path / "log")
    (tmp_path / "log").rename(wal(path))
    path.write_bytes(b"ruined")
    assert_damaged(path)
    aside = put_in_place(tmp_path / "copy.db", path)
    assert (
        aside is not None
        and (aside / "stoker.db").read_bytes() == b"ruined"
        and (aside / "stoker.db-wal").exists()
    )
    with Store.open(path, create=False) as store:
        assert store.counts()["queued"] == 200
        assert store.missing_runs(
            [{"id": late.id, "name": "late", "t": 2.0}, {"id": store.runs()[0].id}]
        ) == [{"id": late.id, "name": "late", "t": 2.0}]
    (tmp_path / "bad.db").write_bytes((tmp_path / "copy.db").read_bytes()[: 5 * PAGE])
    with pytest.raises(StoreDamaged, match=r"bad\.db|copy"):
        put_in_place(tmp_path / "bad.db", path)
    with Store.open(path, create=False) as store:
        assert store.counts()["queued"] == 200
    with pytest.raises(StoreError):
        put_in_place(tmp_path / "none.db", path)


def test_flipped_bytes_never_raise_anything_but_ours(path: Path, template: Path) -> None:
    """Without checksums no database detects a flipped bit inside a text, but only errors of Stoker may be
    raised."""
    seed = 12
    print(f"seed {seed}")
    chance = random.Random(seed)
    sound = template.read_bytes()
    for _ in range(40):
        data = bytearray(sound)
        for _ in range(chance.choice([1, 20, 400])):
            data[chance.randrange(100, len(data))] = chance.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(StokerError):
            use_everything(path, every=40)
        for left in path.parent.iterdir():
            left.unlink()


@pytest.mark.parametrize("table", ["runs", "metrics"])
def test_a_huge_database_is_checked_only_in_part(
    path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    connection.close()
    with open(path, "r+b") as file:
        file.seek((root - 1) * PAGE)
        file.write(bytes(PAGE))
    monkeypatch.setattr("stoker.store.dialects.sqlite.WHOLE_CHECK", 0)
    if table == "runs":
        with pytest.raises(StoreDamaged):
            Store.open(path)
    with contextlib.suppress(StoreDamaged):
        monkeypatch.setattr("stoker.store.dialects.sqlite.VERIFY_SECONDS", -1.0)
        Store.open(path).close()
    assert_damaged(path)


def test_what_a_killed_backup_left_is_cleared_away(path: Path, tmp_path: Path) -> None:
    old, young = tmp_path / ".copy.db.0000.tmp", tmp_path / ".copy.db.1111.tmp"
    for left in (old, young):
        left.write_bytes(b"half a copy")
    os.utime(old, (1.0, 1.0))
    with Store.open(path) as store:
        store.backup(tmp_path / "copy.db")
    assert not old.exists() and young.exists()
