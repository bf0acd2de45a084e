"""A whole store, from a file to PostgreSQL and back: everything that can be read is the same."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stoker.errors import Conflict, NotFound, StoreDamaged, StoreError
from stoker.store import Store, put_in_place, relocation, row_copy
from stoker.store.leadership import LeaderLease
from stoker.store.rows import (
    AddAttempt,
    AddCheckpoint,
    AddEvent,
    AddMetrics,
    AttemptRow,
    EventRow,
    MoveCursor,
    Point,
    PutPart,
    PutTask,
    RunFilter,
    TaskRow,
    UpdateRun,
)
from stoker.testing.store_case import checkpoint, new_run, part
from stoker.testing.store_postgres import PostgresServer
from support.store.contents import everything


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with rows of every kind, including any text that user code may write."""
    path = tmp_path / "stoker.db"
    with Store.open(path) as store:
        fill(store)
    return path


def fill(store: Store, runs: int = 60) -> None:
    chance = random.Random(5)
    names = ["digits", "Größe 数字", "nul\0 \ud800", "%s :x '\""]
    states = ["queued", "running", "succeeded", "failed", "suspended", "stopped"]
    for number in range(runs):
        name = chance.choice(names)
        tags = tuple(chance.sample(["a", "B", "ü"], chance.randint(0, 3)))
        new = new_run(
            f"k{number}", name=name, tags=tags, code=f"c{number % 7}", record={"diff": "+" * number}
        )
        run, _ = store.submit(new, now=number + 0.1)
        if number % 3 == 0:
            continue
        points = [
            Point(chance.choice(names), step, chance.choice([math.nan, math.inf, -0.0, 1e-300]), 1.0)
            for step in range(40)
        ]
        store.apply(
            [
                UpdateRun(run.id, {"state": chance.choice(states), "attempt": 2, "outputs": {"digest": f"o{number}"}}),
                *(AddAttempt(AttemptRow(run.id, attempt, evidence={"lines": [name]})) for attempt in (1, 2)),
                PutTask(TaskRow(run.id, 2, "worker-0", usage={"cpu": 1.5})),
                AddCheckpoint(checkpoint(run, number, name=name, step=2**60, metrics={"loss": math.nan})),
                PutPart(part(run, "worker-1", number, name=name, metrics={"loss": math.inf})),
                AddEvent(EventRow(run.id, 1.5, "warning", name, {"odd": name})),
                AddMetrics(run.id, 1, points),
                AddMetrics(run.id, 2, points[20:]),
                MoveCursor(run.id, 2, "worker-0", name, 2**50),
            ]
        )  # fmt: skip
    store.resume(next(run.id for run in store.runs(RunFilter(states=("failed",)))), key="again", now=9.0)
    store.put_cluster("gpu-prod", {"context": name}, 3.0)


def test_there_and_back_again(url: str, path: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    moved = relocation.move(path, url, progress=lambda *step: seen.append(step))
    assert moved.rows["runs"] == 60 and not moved.already
    assert {table for table, done, of in seen if done == of} >= {"runs", "metrics", "events"}
    with Store.open(path) as old, Store.open(url) as new:
        assert everything(new) == everything(old)
        # A new row on either side gets the next number.
        numbers = [store.submit(new_run("next"), now=1.0)[0].seq for store in (old, new)]
        assert numbers == [61, 61]
        seqs = []
        for store in (old, new):
            run = store.runs(RunFilter(limit=1))[0]
            points = AddMetrics(run.id, 1, [Point("m", 1, 1.0, 1.0)])
            store.apply([AddEvent(EventRow(run.id, 2.0, "warning", "next")), points])
            seqs.append(store.events(run.id)[-1].seq)
        assert seqs[0] == seqs[1]
    back = relocation.file_from(url, tmp_path / "back.db")
    assert back.rows["runs"] == 61
    assert relocation.file_from(url, tmp_path / "back.db").already
    with Store.open(tmp_path / "back.db") as again, Store.open(url) as new:
        assert everything(again) == everything(new)
        assert again.check() == []


def test_a_second_move_changes_nothing_and_other_data_is_refused(url: str, path: Path) -> None:
    relocation.move(path, url)
    assert relocation.move(path, url).already
    with Store.open(path) as store:
        store.put_cluster("late", {}, 4.0)
    with pytest.raises(Conflict, match="holds other data") as caught:
        relocation.move(path, url)
    assert "empty" in (caught.value.hint or "")
    with Store.open(url) as store:
        assert [row.name for row in store.clusters()] == ["gpu-prod"]


def test_a_damaged_or_missing_source_is_refused(url: str, path: Path) -> None:
    with pytest.raises(NotFound):
        relocation.move(path.with_name("nowhere.db"), url)
    with open(path, "r+b") as file:
        file.seek(4096 * 20)
        file.write(os.urandom(4096 * 20))
    with pytest.raises(StoreDamaged):
        relocation.move(path, url)


def test_a_row_that_arrives_changed_stops_the_move(postgres: PostgresServer, url: str, path: Path) -> None:
    """The database changes a value, as a trigger or a broken disk may do."""
    Store.open(url).close()
    postgres.execute(
        "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.text := 'spoilt'; RETURN NEW; END $$;"
        "CREATE TRIGGER spoil BEFORE INSERT ON events FOR EACH ROW WHEN (NEW.seq = 17) EXECUTE FUNCTION spoil()",
        url,
    )
    with pytest.raises(StoreDamaged, match="the copy of events differs from its source"):
        relocation.move(path, url)
    with Store.open(url) as store:
        assert store._database.read(row_copy.is_empty)


MOVE = "import sys; from stoker.store import relocation; print('go', flush=True); relocation.move(sys.argv[1], sys.argv[2], lease=1.0); print('done')"


def test_killed_on_the_way_it_is_done_again(url: str, path: Path) -> None:
    seed = int(os.environ.get("STOKER_TEST_SEED", "4711"))
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", MOVE, str(path), url], stdout=subprocess.PIPE, text=True
        ) as mover:
            assert mover.stdout is not None and mover.stdout.readline() == "go\n"
            time.sleep(chance.uniform(0.0, 2.0))
            mover.send_signal(signal.SIGKILL)
        with Store.open(path) as old, Store.open(url) as new:
            empty = new._database.read(row_copy.is_empty)
            assert empty or everything(new) == everything(old)
    relocation.move(path, url, lease=1.0)
    with Store.open(path) as old, Store.open(url) as new:
        assert everything(new) == everything(old)


def test_not_while_a_server_leads(url: str, path: Path) -> None:
    seat = LeaderLease.open(url)
    epoch = seat.take(seat.read(), "ada place nonce", "http://ada")
    assert epoch is not None
    alive = True

    def live() -> None:
        while alive:
            seat.renew(epoch)
            time.sleep(0.1)

    server = threading.Thread(target=live)
    server.start()
    try:
        for attempt in (
            lambda: relocation.move(path, url, lease=30.0),
            lambda: relocation.file_from(url, path.with_name("out.db"), lease=30.0),
            lambda: put_in_place(path, url, aside=path.parent, lease=30.0),
        ):
            with pytest.raises(Conflict, match="ada, at http://ada"):
                attempt()
    finally:
        alive = False
        server.join(60)
    assert relocation.move(path, url, lease=0.5).rows["runs"] == 60, "it was killed without a further message"
    with pytest.raises(StoreError):
        seat.renew(epoch)
    seat.close()


def test_a_copy_put_back_into_its_place(url: str, path: Path, tmp_path: Path) -> None:
    with Store.open(url) as store:
        for number in range(3):
            store.submit(new_run(f"other {number}"), now=1.0)
        before = everything(store)
    kept = put_in_place(path, url, aside=tmp_path / "aside")
    with Store.open(path) as wanted, Store.open(url) as store:
        assert everything(store) == everything(wanted)
        assert store.submit(new_run("next"), now=1.0)[0].seq == 61
    assert kept is not None
    with Store.open(kept) as aside:
        assert everything(aside) == before
    spoilt = tmp_path / "spoilt.db"
    data = bytearray(path.read_bytes())
    data[4096 * 20 : 4096 * 40] = os.urandom(4096 * 20)
    spoilt.write_bytes(data)
    with pytest.raises(StoreDamaged):
        put_in_place(spoilt, url, aside=tmp_path / "aside")
    with Store.open(url) as store:
        assert store.counts()["queued"] > 0
