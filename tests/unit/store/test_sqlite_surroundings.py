"""The directory of a database, and the errors of its file system."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import DiskFull, DiskReadOnly, NotFound, StoreBusy, StoreError
from stoker.store import Store
from stoker.store.dialects import sqlite_errors
from stoker.store.rows import AddEvent, EventRow, RunFilter
from stoker.testing.store_case import new_run

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that an unprivileged user can reach."""
    root = Path(tempfile.mkdtemp(prefix="stoker-store-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write anywhere, so become another user for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["with spaces", "ünïcødé 数字", "percent%20 # ? & '\"", "-dash", "file:x"])
def test_any_path_works(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / f"{name}.db"
    for _ in range(2):
        with Store.open(path) as store:
            store.submit(new_run("k"), now=1.0)
            store.backup(tmp_path / f"{name} copy.db")
    assert path.exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "jobs may contain private names"
    with Store.open(tmp_path / f"{name} copy.db", create=False) as copy:
        assert copy.counts()["queued"] == 1


def test_a_url_names_the_same_file(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/stoker.db") as store:
        assert store.where == f"{tmp_path}/stoker.db" and store.kind == "sqlite"
    with pytest.raises(StoreError, match="oracle"):
        Store.open("oracle://host/db")


def test_no_database_is_created_unless_requested(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"stoker\.db"):
        Store.open(tmp_path / "stoker.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_file(place: Path) -> None:
    path = place / "stoker.db"
    with Store.open(path) as store:
        store.submit(new_run("k"), now=1.0)
    path.chmod(0o444)
    os.chmod(place, 0o777)
    with unprivileged(), pytest.raises(StoreError, match=r"stoker\.db: Permission denied") as caught:
        Store.open(path)
    assert caught.value.hint


def test_a_directory_without_permission(place: Path) -> None:
    inside = place / "home"
    inside.mkdir()
    with Store.open(inside / "stoker.db") as store:
        store.submit(new_run("k"), now=1.0)
    (inside / "stoker.db").chmod(0o666)
    inside.chmod(0o555)
    with unprivileged():
        with pytest.raises(StoreError, match=r"stoker\.db") as caught:
            Store.open(inside / "stoker.db")
        assert str(inside) in (caught.value.hint or "")
        with pytest.raises(StoreError, match="Permission denied"):
            Store.open(inside / "new.db")
        with pytest.raises(StoreError, match="Permission denied"):
            Store.open(inside / "deeper" / "new.db")
    inside.chmod(0o000)
    with unprivileged(), pytest.raises(StoreError, match="Permission denied"):
        Store.open(inside / "stoker.db")
    inside.chmod(0o755)


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "stoker.db").mkdir()
    with pytest.raises(StoreError, match=r"stoker\.db"):
        Store.open(tmp_path / "stoker.db")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small file system can only be mounted as root")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield mount
    subprocess.run(
        ["umount", "--lazy", str(mount)], check=True
    )  # works also when a failed test holds a file open


def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    ballast = small_disk / "ballast"
    with Store.open(small_disk / "stoker.db") as store:
        run, _ = store.submit(new_run("first"), now=1.0)
        ballast.write_bytes(bytes(1 << 20))
        acknowledged = []
        with pytest.raises(DiskFull) as caught:
            for number in range(10_000):
                acknowledged.append(
                    store.submit(new_run(f"k{number}", record={"x": "y" * 5000}), now=1.0)[0].id
                )
        assert str(small_disk) in caught.value.message
        assert caught.value.details["file_system"] == str(small_disk)
        assert isinstance(caught.value.details["free"], int)
        assert store.damaged is None
        for _ in range(3):
            with pytest.raises(DiskFull):
                store.apply([AddEvent(EventRow(run.id, 1.0, "warning", "x" * 2_000_000))])
        assert {row.id for row in store.runs(RunFilter(limit=10**6))} == {run.id, *acknowledged}
        with pytest.raises(DiskFull):
            store.backup(small_disk / "copy.db")
        assert not list(small_disk.glob("*copy*"))
        ballast.unlink()
        store.submit(new_run("there is room again"), now=2.0)
        assert store.check() == []
    with Store.open(small_disk / "stoker.db") as store:
        assert len(store.runs(RunFilter(limit=10**6))) == len(acknowledged) + 2


def test_creating_on_a_full_disk_leaves_nothing_behind(small_disk: Path) -> None:
    with contextlib.suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(DiskFull, match="small disk"):
        Store.open(small_disk / "stoker.db")
    assert [found.name for found in small_disk.iterdir()] == ["ballast"]
    (small_disk / "ballast").unlink()
    Store.open(small_disk / "stoker.db").close()


def test_locked_by_another(tmp_path: Path) -> None:
    path = tmp_path / "stoker.db"
    with Store.open(path, busy_timeout=0.02) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="locked"):
            store.submit(new_run("k2"), now=1.0)
        assert store.run(run.id) == run, "reading goes on"
        with pytest.raises(StoreBusy):
            Store.open(path, busy_timeout=0.02)
        other.execute("ROLLBACK")
        other.close()
        assert store.submit(new_run("k2"), now=1.0)[1]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system with a database, mounted read-only."""
    mount = tmp_path / "read only"
    mount.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a file system can only be mounted as root")
    with Store.open(mount / "stoker.db") as store:
        store.submit(new_run("k"), now=1.0)
    for command in (["--bind", str(mount), str(mount)], ["-o", "remount,ro,bind", str(mount)]):
        done = subprocess.run(["mount", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_a_read_only_file_system_is_not_damage(read_only: Path) -> None:
    path = read_only / "stoker.db"
    wrong = [*_errors_of_sqlite("IOERR_WRITE", "IOERR_FSYNC", "IOERR_READ", "READONLY", "CANTOPEN")]
    with pytest.raises(DiskReadOnly) as caught:
        Store.open(path)
    for error in [caught.value, *(sqlite_errors.translate(one, path) for one in wrong)]:
        assert isinstance(error, DiskReadOnly), error
        assert str(read_only) in error.message and "damaged" not in error.message
        assert error.details["file_system"] == str(read_only)
        assert "Nothing was damaged" in (error.hint or "") and "backup restore" not in (error.hint or "")


def test_a_write_that_the_system_refuses_is_not_damage(tmp_path: Path) -> None:
    """A real error of a real write: a limit on the size of files."""
    with Store.open(tmp_path / "stoker.db") as store:
        run, _ = store.submit(new_run("first"), now=1.0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
        try:
            with pytest.raises(StoreError, match="SQLITE_IOERR_WRITE") as caught:
                store.apply([AddEvent(EventRow(run.id, 1.0, "warning", "x" * 2_000_000))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.code == "store" and "dmesg" in (caught.value.hint or "")
        assert store.damaged is None
        store.apply([AddEvent(EventRow(run.id, 1.0, "warning", "x" * 2_000_000))])
        assert store.check() == []


def test_which_errors_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "stoker.db"
    path.touch()
    damage = _errors_of_sqlite("IOERR", "IOERR_READ", "IOERR_SHORT_READ", "CORRUPT", "NOTADB")
    undecodable = sqlite3.OperationalError("Could not decode to UTF-8 column")
    assert {sqlite_errors.translate(one, path).code for one in [*damage, undecodable]} == {"store-damaged"}
    disk = _errors_of_sqlite("IOERR_WRITE", "IOERR_FSYNC", "IOERR_SHMMAP", "IOERR_LOCK")
    assert {sqlite_errors.translate(one, path).code for one in disk} == {"store"}
    assert sqlite_errors.of_system(OSError(errno.EIO, "Input/output error"), path).code == "store"
    assert sqlite_errors.of_system(OSError(errno.ENOSPC, "no space"), path).code == "disk-full"
    (full,) = _errors_of_sqlite("FULL")
    assert sqlite_errors.translate(full, path).code == "disk-full"


def _errors_of_sqlite(*names: str) -> Iterator[sqlite3.Error]:
    for name in names:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = f"SQLITE_{name}"
        error.sqlite_errorcode = getattr(sqlite3, error.sqlite_errorname)
        yield error


_AT_THE_LOG = """
import fcntl, sys
with open(sys.argv[1] + "-shm", "r+b") as shared:
    fcntl.lockf(shared, fcntl.LOCK_EX, 1, 121)  # where SQLite says that it moves pages out of the log
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_log_locked_by_another_process_is_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "stoker.db"
    with Store.open(path) as store:
        for number in range(3):
            store.submit(new_run(f"k{number}"), now=1.0)
        other = subprocess.Popen(
            [sys.executable, "-c", _AT_THE_LOG, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with other:
            assert other.stdout is not None and other.stdout.readline() == b"held\n"
            with Store.open(path) as again:
                assert [row.key for row in again.live()] == ["k0", "k1", "k2"]
            other.communicate()
