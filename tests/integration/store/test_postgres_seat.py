"""The lease of the leader: taken once, fenced by its epoch, given up in order or by silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import NotLeading, StoreError
from stoker.store import Store, schema
from stoker.store.leadership import LeaderLease
from stoker.store.rows import AddEvent, EventRow
from stoker.testing.store_case import new_run
from stoker.testing.store_postgres import PostgresServer
from support.store.cutting import Cutter


@pytest.fixture
def seat(url: str) -> Iterator[LeaderLease]:
    seat = LeaderLease.open(url)
    yield seat
    seat.close()


def test_it_is_taken_once(seat: LeaderLease) -> None:
    free = seat.read()
    assert (free.epoch, free.holder) == (0, "")
    assert seat.take(free, "ada", "http://ada") == 1
    assert seat.take(free, "bob", "http://bob") is None
    ada = seat.read()
    assert (ada.epoch, ada.holder, ada.url) == (1, "ada", "http://ada")
    seat.renew(1)
    assert seat.read() != ada, "a sign of life"
    assert seat.take(ada, "bob", "http://bob") is None, "it has moved since"
    assert seat.take(seat.read(), "bob", "http://bob") == 2
    with pytest.raises(NotLeading):
        seat.renew(1)
    seat.release(1)
    assert seat.read().holder == "bob", "a server that does not lead cannot give the lead up"
    seat.release(2)
    assert seat.read().holder == ""


def test_one_of_many_concurrent_candidates_leads(url: str) -> None:
    seats = [LeaderLease.open(url) for _ in range(6)]
    seen = seats[0].read()
    start = threading.Barrier(len(seats))
    taken: list[int | None] = []

    def work(seat: LeaderLease, name: str) -> None:
        start.wait(30)
        taken.append(seat.take(seen, name, ""))

    threads = [
        threading.Thread(target=work, args=(seat, f"server {number}")) for number, seat in enumerate(seats)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken, key=str) == [1, None, None, None, None, None]
    for seat in seats:
        seat.close()


def test_the_old_leader_writes_nothing_more(url: str, seat: LeaderLease) -> None:
    epoch = seat.take(seat.read(), "ada", "")
    told: list[str] = []
    with Store.open(url, epoch=epoch) as old:
        old.when_fenced(lambda: told.append("fenced"))
        run, _ = old.submit(new_run("k"), now=1.0)
        newer = seat.take(seat.read(), "bob", "")
        with Store.open(url, epoch=newer) as new:
            for write in (
                lambda: old.submit(new_run("late"), now=2.0),
                lambda: old.apply([AddEvent(EventRow(run.id, 2.0, "warning", "late"))]),
                lambda: old.set_desired(run.id, "stop", 2.0, by="ada"),
                lambda: old.put_cluster("late", {}, 2.0),
            ):
                with pytest.raises(NotLeading) as caught:
                    write()
                assert caught.value.http_status == 503
            assert told == ["fenced"] * 4
            assert new.runs() == [run] == old.runs(), "reading goes on"
            assert len(new.events(run.id)) == 1 and new.clusters() == []
            assert new.submit(new_run("on it goes"), now=3.0)[1]


def test_a_transaction_under_way_is_a_sign_of_life(url: str, seat: LeaderLease) -> None:
    """Another candidate waits for the transaction, and then sees that the lease was renewed."""
    epoch = seat.take(seat.read(), "ada", "")
    assert epoch is not None
    with Store.open(url, epoch=epoch) as store:
        run, _ = store.submit(new_run("k"), now=1.0)
        inside, go_on = threading.Event(), threading.Event()

        def slow(connection: object) -> None:
            store._changes.apply(connection, [AddEvent(EventRow(run.id, 2.0, "warning", "slow"))])  # type: ignore[arg-type]
            inside.set()
            go_on.wait(60)

        writer = threading.Thread(target=store._database.write, args=(slow,))
        writer.start()
        assert inside.wait(60)
        seen = seat.read()
        seat.renew(epoch)
        taken: list[int | None] = []
        other = LeaderLease.open(url, busy_timeout=20.0)
        taker = threading.Thread(target=lambda: taken.append(other.take(seen, "bob", "")))
        taker.start()
        go_on.set()
        writer.join(60)
        taker.join(60)
        other.close()
        assert taken == [None]
        assert [event.text for event in store.events(run.id)][1:] == ["slow"]


def test_taken_although_the_answer_was_lost(postgres: PostgresServer, url: str) -> None:
    with Cutter(postgres.root) as cutter:
        seat = LeaderLease.open(url.replace(str(postgres.root), str(cutter.root)))
        seen = seat.read()
        cutter.cut("after")
        assert seat.take(seen, "ada", "") == 1
        assert cutter.cuts == 1
        seat.close()


def test_a_database_of_a_newer_version_is_not_taken(
    url: str, seat: LeaderLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an upgrade an older server must not take a database that it cannot use."""
    monkeypatch.setattr(schema, "VERSION", schema.VERSION - 1)
    with pytest.raises(StoreError, match="knows up to"):
        seat.take(seat.read(), "old", "")
    assert seat.read().holder == ""


def test_waiting_changes_no_older_schema(
    postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(url).close()
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    seat = LeaderLease.open(url)
    assert seat.read().epoch == 0
    assert postgres.execute("SELECT version_num FROM alembic_version", url) == [
        (f"{schema.VERSION - 1:04d}",)
    ]
    seat.close()


def test_a_database_in_a_file_has_no_leader_lease(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not shared"):
        LeaderLease.open(str(tmp_path / "stoker.db"))
    assert list(tmp_path.iterdir()) == []
