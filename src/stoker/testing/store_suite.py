"""Requirements of every store, as tests. A database is supported when both classes pass on it:

    class TestMyStore(StoreSuite):          # and StoreCrashSuite, which starts and kills processes
        @pytest.fixture
        def url(self, tmp_path):
            return f"mydatabase://.../{unique_name}"

`url` names a database that does not exist yet (or is empty) and belongs to this test alone.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from stoker.errors import StoreError
from stoker.store import Store
from stoker.store.rows import (
    RunFilter,
    RunRow,
)
from stoker.testing.store_case import StoreCase, new_run, submit_all
from stoker.testing.store_reads import MetricTests, QueryTests
from stoker.testing.store_trash import TrashTests
from stoker.testing.store_writes import ClusterTests, MutationTests, SubmissionTests


class DatabaseTests(StoreCase):
    """Reopening, copies, checks."""

    def test_everything_is_there_after_reopening(self, url: str) -> None:
        with Store.open(url) as store:
            run, _ = store.submit(new_run("k"), now=1.0)
        with Store.open(url, create=False) as store:
            assert store.run(run.id) == run
            assert store.submit(new_run("k"), now=2.0) == (run, False)
            assert store.schema_version() >= 1
            assert store.check() == [] and store.damaged is None
        with pytest.raises(StoreError, match="closed"):
            store.run(run.id)
        with pytest.raises(StoreError, match="closed"):
            store.submit(new_run("k2"), now=1.0)

    def test_a_copy_taken_while_writing_is_of_one_moment(self, store: Store, tmp_path: Path) -> None:
        stop = threading.Event()
        failures: list[BaseException] = []

        def write() -> None:
            try:
                number = 0
                while not stop.is_set():
                    submit_all(store, [new_run(f"{number}-{half}") for half in "ab"])
                    number += 1
            except BaseException as exc:  # noqa: BLE001 - handed to the main thread, which raises it
                failures.append(exc)

        submit_all(store, [new_run(f"before-{number}") for number in range(2000)])
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for number in range(3):
                before = sum(store.counts().values())
                store.backup(tmp_path / f"copy-{number}")
                with Store.open(tmp_path / f"copy-{number}", create=False) as copy:
                    count = sum(copy.counts().values())
                    assert count >= before and count % 2 == 0
                    assert copy.check() == []
        finally:
            stop.set()
            writer.join(timeout=60)
        assert not failures, failures

    def test_several_create_at_once(self, url: str) -> None:
        """Each gets the same database, and the second creation does not replace what the first one wrote."""
        start = threading.Barrier(4)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                start.wait(timeout=30)
                with Store.open(url) as store:
                    store.submit(new_run(f"k{number}"), now=1.0)
            except BaseException as exc:  # noqa: BLE001 - handed to the main thread, which raises it
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not failures, failures
        with Store.open(url) as store:
            assert store.counts()["queued"] == 4

    def test_reading_sees_one_moment_while_others_write(self, store: Store) -> None:
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                submit_all(store, [new_run(f"{number}{half}") for half in "ab"])
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(40):
                assert len(store.runs(RunFilter(limit=10**6), records=False)) % 2 == 0
        finally:
            stop.set()
            writer.join(timeout=60)


class StoreSuite(
    SubmissionTests, MutationTests, TrashTests, ClusterTests, QueryTests, MetricTests, DatabaseTests
):
    """Everything that one process can test."""


WRITER = """
import sys
from stoker.store import Store
from stoker.store.rows import AddEvent, AddMetrics, EventRow, NewRun, Point, UpdateRun
url, start = sys.argv[1], sys.argv[2]
print("opening", "-", "-", flush=True)
with Store.open(url) as store:
    number = 0
    while True:
        key = f"{start}-{number}"
        new = NewRun(key, "digits", {"run": "x"}, ["x"], tags=("t",), record={"filler": "x" * 3000})
        run, _ = store.submit(new, now=1.0)
        print("submitted", key, run.id, flush=True)
        points = [Point(f"m{n % 7}", n, float(n), 1.0) for n in range(300)]
        store.apply([UpdateRun(run.id, {"state": "running"}), AddMetrics(run.id, 1, points),
                     AddEvent(EventRow(run.id, 2.0, "running", "r"))])
        print("applied", key, run.id, flush=True)
        number += 1
"""


class StoreCrashSuite(StoreCase):
    """Killed writers lose nothing and leave nothing half done."""

    kills = 8

    def test_killed_writers_lose_nothing_and_leave_nothing_half_done(self, url: str) -> None:
        seed = int(os.environ.get("STOKER_TEST_SEED", "4711"))
        print(f"seed {seed}")
        chance = random.Random(seed)
        acknowledged: dict[str, str] = {}
        for round_ in range(self.kills):
            printed = self.write_and_kill(url, round_, chance.uniform(0.0, 0.2))
            acknowledged = self.check_all(url, round_, printed, acknowledged)
        assert len(acknowledged) > self.kills

    def write_and_kill(self, url: str, round_: int, wait: float, *, after: str = "submitted") -> list[str]:
        """The output of a writer that is killed some time after it first printed `after`."""
        return self.write_during(url, round_, lambda: time.sleep(wait), after=after)

    def write_during(
        self, url: str, round_: int, happening: Callable[[], None], *, after: str = "submitted"
    ) -> list[str]:
        """The output of a writer that writes while something happens to it or to its database, from the moment it
        first printed `after`. It must not end by itself, and is killed in the end."""
        arguments = [sys.executable, "-c", WRITER, url, str(round_)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, bufsize=1) as writer:
            assert writer.stdout is not None
            lines: list[str] = []
            began = threading.Event()
            reader = threading.Thread(target=_read_lines, args=(writer.stdout, lines, after, began))
            reader.start()
            try:
                assert began.wait(60), "the writer makes no progress"
                happening()
                assert writer.poll() is None, "the writer ended by itself"
            finally:
                writer.kill()
                reader.join()
        return [line for line in lines if line.endswith("\n") and not line.startswith("opening")]

    def check_all(self, url: str, round_: int, printed: list[str], before: dict[str, str]) -> dict[str, str]:
        """Nothing acknowledged is lost, nothing is there in part or twice. Returns all that was ever acknowledged."""
        lines = [line.split() for line in printed]
        acknowledged = {**before, **{key: run_id for _, key, run_id in lines}}
        with Store.open(url, create=False) as store:
            assert store.check() == []
            found = {run.key: run for run in store.runs(RunFilter(limit=10**6), records=False)}
            assert {key: found[key].id for key in acknowledged} == acknowledged
            applied = {key for verb, key, _ in lines if verb == "applied"}
            mine = [run for key, run in found.items() if key.startswith(f"{round_}-")]
            self._check_whole(store, mine, applied)
            tagged = store.runs(RunFilter(tags=("t",), limit=10**6), records=False)
            assert len(tagged) == len(found)
        return acknowledged

    def _check_whole(self, store: Store, runs: list[RunRow], applied: set[str]) -> None:
        for run in runs:
            kinds = [event.kind for event in store.events(run.id)]
            count = sum(entry["count"] for entry in store.metric_keys(run.id))
            whole = (run.state, kinds, count, len(store.run(run.id).record.get("filler", "")))
            assert whole in (("queued", ["queued"], 0, 3000), ("running", ["queued", "running"], 300, 3000))
            assert run.state == "running" or run.key not in applied


def _read_lines(stream: Iterable[str], lines: list[str], after: str, began: threading.Event) -> None:
    for line in stream:
        lines.append(line)
        if line.startswith(after):
            began.set()
