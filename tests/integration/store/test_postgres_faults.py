"""Lost connections, foreign locks, unavailable or unsuitable servers; and no password in any message."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from stoker.errors import Conflict, DiskFull, NotFound, StoreBusy, StoreDamaged, StoreError
from stoker.store import Store
from stoker.store.dialects import base, postgres
from stoker.store.rows import AddEvent, AddMetrics, EventRow, Point, RunFilter, UpdateRun
from stoker.testing.store_case import new_run, submit_all
from stoker.testing.store_postgres import PostgresServer
from support.store.cutting import Cutter


@pytest.fixture
def cutter(postgres: PostgresServer) -> Iterator[Cutter]:
    with Cutter(postgres.root) as cutter:
        yield cutter


@pytest.mark.parametrize("mode", ["before", "after"])
def test_cut_off_while_committing_it_is_done_once(
    postgres: PostgresServer, cutter: Cutter, url: str, mode: str
) -> None:
    with Store.open(url.replace(str(postgres.root), str(cutter.root))) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
        for number in range(3):
            cutter.cut(mode)
            store.apply(
                [
                    AddEvent(EventRow(run.id, 2.0, "warning", str(number))),
                    AddMetrics(run.id, 1, [Point(f"m{number}", 1, 1.0, 1.0)]),
                ]
            )
        cutter.cut(mode)
        other, is_new = store.submit(new_run("other"), now=2.0)
        assert is_new and store.run(other.id) == other
        assert cutter.cuts == 4
        assert [event.text for event in store.events(run.id)][1:] == ["0", "1", "2"]
        assert sorted(store.latest_metrics(run.id)) == ["m0", "m1", "m2"]


def test_a_commit_cut_off_before_another_write_is_reported(
    postgres: PostgresServer, cutter: Cutter, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two writers and no leader, the row no longer shows whether the commit happened."""
    with Store.open(url) as other, Store.open(url.replace(str(postgres.root), str(cutter.root))) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
        asked = store._database.dialect.committed

        def late(mark: object) -> bool:
            other.submit(new_run("meanwhile"), now=2.0)
            return asked(mark)

        monkeypatch.setattr(store._database.dialect, "committed", late)
        cutter.cut("after")
        with pytest.raises(StoreError, match="others have written since"):
            store.apply([AddEvent(EventRow(run.id, 2.0, "warning", "once"))])


def test_readers_and_writers_connect_again(postgres: PostgresServer, url: str) -> None:
    with Store.open(url) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
        postgres.crash()
        assert store.run(run.id) == run
        assert store.submit(new_run("k"), now=2.0) == (run, False)


def test_an_outage_is_reported_and_nothing_is_half_done(postgres: PostgresServer, url: str) -> None:
    with Store.open(url, busy_timeout=0.1) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
        postgres.stop()
        try:
            for ask in (
                lambda: store.run(run.id),
                lambda: store.submit(new_run("later"), now=1.0),
                lambda: Store.open(url, busy_timeout=0.1),
            ):
                with pytest.raises(StoreBusy, match="lost or refused"):
                    ask()
            assert store.damaged is None
        finally:
            postgres.resume()
        assert [found.id for found in store.runs()] == [run.id]
        assert store.submit(new_run("later"), now=1.0)[1]


def test_locked_by_another(url: str) -> None:
    with Store.open(url, busy_timeout=0.1) as store, psycopg.connect(url) as other:
        run, _ = store.submit(new_run("k"), now=1.0)
        other.execute("SELECT * FROM leadership FOR UPDATE")
        with pytest.raises(StoreBusy, match="lock timeout"):
            store.submit(new_run("k2"), now=1.0)
        assert store.run(run.id) == run, "reading goes on"
        other.rollback()
        assert store.submit(new_run("k2"), now=1.0)[1]


def test_a_transaction_that_stands_still_is_ended_and_done_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks of a stopped server must be released."""
    monkeypatch.setattr(postgres, "IDLE_SECONDS", 1)
    with Store.open(url) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
        stopped = threading.Event()
        resumed = threading.Event()

        def work(connection: object) -> None:
            store._changes.apply(connection, [AddEvent(EventRow(run.id, 2.0, "warning", "once"))])  # type: ignore[arg-type]
            if not stopped.is_set():
                stopped.set()
                resumed.wait(60)

        slow = threading.Thread(target=store._database.write, args=(work,))
        slow.start()
        assert stopped.wait(60)
        with Store.open(url) as other:
            assert other.submit(new_run("other"), now=2.0)[1]
        resumed.set()
        slow.join(60)
        assert [event.text for event in store.events(run.id)][1:] == ["once"]


def test_a_statement_that_takes_too_long_is_ended(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "STATEMENT_SECONDS", 1)
    with Store.open(url) as store, pytest.raises(StoreBusy, match="statement timeout"):
        store._database.read(lambda connection: connection.execute(text("SELECT pg_sleep(60)")))


def test_two_writers_take_turns(url: str) -> None:
    """Each reads its own count before it writes: without serialization some increments would be lost."""
    with Store.open(url) as one, Store.open(url) as two:
        run, _ = one.submit(new_run("k"), now=1.0)

        def add(connection: object) -> None:
            found = connection.execute(text("SELECT faults FROM runs"))  # type: ignore[attr-defined]
            one._changes.apply(connection, [UpdateRun(run.id, {"faults": found.scalar_one() + 1})])  # type: ignore[arg-type]

        def work(store: Store) -> None:
            for _ in range(50):
                store._database.write(add)

        threads = [threading.Thread(target=work, args=(store,)) for store in (one, two, one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert one.run(run.id).faults == 200


def test_an_unsuitable_server_is_reported_at_once(postgres: PostgresServer, url: str) -> None:
    with pytest.raises(StoreError, match="does not exist") as caught:
        Store.open(postgres.url("nowhere"), busy_timeout=60)
    assert caught.value.hint and not isinstance(caught.value, StoreBusy)
    with pytest.raises(NotFound, match=r"no database at postgresql://stoker@/test"):
        Store.open(url, create=False)
    postgres.execute("CREATE TABLE bookmarks (url text)", url)
    with pytest.raises(StoreError, match="bookmarks"):
        Store.open(url)
    postgres.execute(
        "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0 LOCALE_PROVIDER libc"
    )
    with pytest.raises(StoreError, match="SQL_ASCII") as caught:
        Store.open(postgres.url("ascii"))
    assert "UTF8" in (caught.value.hint or "")


SECRET = "hunter2secret"


@pytest.mark.parametrize(
    "bad",
    [
        f"postgresql://ada:{SECRET}@127.0.0.1:1/db",
        f"postgresql://ada:{SECRET}@no.such.host.invalid/db",
        f"postgresql://ada:{SECRET}@127.0.0.1:port/db",
        f"postgresql://ada:{SECRET}@[::1/db",
        f"postgresql://ada:{SECRET}@host/db?nonsense=1",
        f"postgresql://ada:%zz{SECRET}@host/db",
        f"oracle://ada:{SECRET}@host/db",
    ],
)
def test_no_message_has_a_password(bad: str) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open(bad, busy_timeout=0.1)
    logged = "".join(traceback.format_exception(caught.value))
    assert SECRET not in logged and SECRET not in repr(caught.value.to_json())
    assert caught.value.hint


def test_a_url_is_shown_without_credentials(postgres: PostgresServer, url: str) -> None:
    given = url.replace("stoker@", f"stoker:{SECRET}@")
    with Store.open(given) as store:
        assert store.kind == "postgresql" and SECRET not in store.where and "stoker@" in store.where
        run, _ = store.submit(new_run("k"), now=1.0)
        with pytest.raises(Conflict) as caught:
            store._database.write(
                lambda connection: connection.execute(text("INSERT INTO runs SELECT * FROM runs"))
            )
        assert run.id not in caught.value.message, "the details quote rows"
    assert base.is_shared(given) and not base.is_shared("/var/lib/postgresql://x")


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted as root")
def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_room(postgres: PostgresServer) -> None:
    mount = Path(tempfile.mkdtemp(prefix="stoker-pg-small-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=777", "tmpfs", str(mount)], check=True)
    try:
        shutil.chown(mount, postgres.root.owner(), postgres.root.group())
        postgres.execute(f"CREATE TABLESPACE small LOCATION '{mount}'")
        postgres.execute("CREATE DATABASE small TABLESPACE small")
        ballast = mount / "ballast"
        with Store.open(postgres.url("small")) as store:
            run, _ = store.submit(new_run("first"), now=1.0)
            ballast.write_bytes(bytes(8 << 20))
            acknowledged = [run.id]
            with pytest.raises(DiskFull) as caught:
                for number in range(10_000):
                    record = {"x": os.urandom(4000).hex()}
                    acknowledged.append(store.submit(new_run(f"k{number}", record=record), now=1.0)[0].id)
            assert "/small" in caught.value.message and store.damaged is None
            ballast.unlink()
            acknowledged.append(store.submit(new_run("there is room again"), now=2.0)[0].id)
            assert {row.id for row in store.runs(RunFilter(limit=10**6))} == set(acknowledged)
            assert store.check() == []
        postgres.execute("DROP DATABASE small WITH (FORCE)")
        postgres.execute("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
        mount.rmdir()


def test_damage_is_noticed_and_stops_writing(postgres: PostgresServer, url: str) -> None:
    """A page of the table is overwritten on disk, as by a broken disk."""
    with Store.open(url) as store:
        runs = submit_all(store, [new_run(f"k{number}", record={"x": "y" * 500}) for number in range(200)])
        (path,) = postgres.execute("SELECT pg_relation_filepath('run_records')", url)[0]
    postgres.stop()
    file = postgres.root / "data" / str(path)
    data = bytearray(file.read_bytes())
    data[8192 : 2 * 8192] = os.urandom(8192)
    file.write_bytes(data)
    postgres.resume()
    with Store.open(url) as store:
        problems = store.check()
        assert problems and "damaged" in problems[0]
        with pytest.raises(StoreDamaged, match="nothing more is written") as caught:
            store.apply([UpdateRun(runs[0].id, {"state": "failed"})])
        assert "stoker backup restore" in (caught.value.hint or "")
        assert store.counts()["queued"] == 200, "reads go on as far as they can"


def test_a_missing_row_is_damage(postgres: PostgresServer, url: str) -> None:
    with Store.open(url) as store:
        postgres.execute("DELETE FROM leadership", url)
        with pytest.raises(StoreDamaged, match="orders its writers"):
            store.submit(new_run("k"), now=1.0)


def test_waiting_is_bounded_whatever_is_wrong(url: str) -> None:
    """Not a measure of speed: the wait only has to end."""
    began = time.monotonic()
    with pytest.raises(StoreBusy):
        Store.open(url.replace("host=", "host=/nowhere"), busy_timeout=0.05)
    assert time.monotonic() - began < 60
