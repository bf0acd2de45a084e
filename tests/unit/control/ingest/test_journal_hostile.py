"""A task directory belongs to user code. Whatever it contains, one look ends, reads a bounded amount and
follows no links."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.control.ingest import journal_reader
from stoker.control.ingest.ingester import TRY_AGAIN, Ingester
from stoker.control.ingest.journal_reader import Intake
from stoker.control.logs import writer
from stoker.settings import Home, LogSettings
from stoker.store import Store
from stoker.store.rows import AddCheckpoint, AddEvent, AddMetrics, NewRun, Point
from stoker.task import layout
from stoker.task.formats import Order, Status, TaskInfo
from stoker.task.local_directory import LocalTaskDir
from support.control.driven import stage
from support.control.ingesting import InlineTransfers, TaskFiles, ingester, take_in

ENDED = {"k": "ended", "seq": 1, "generation": 1, "kind": "exit", "code": 0}


class Task(TaskFiles):
    """A task directory, what a server reads from it, and the database for that."""

    def __init__(self, tmp_path: Path) -> None:
        self.home = Home(tmp_path / "home")
        super().__init__(tmp_path / "task")
        self.store = Store.open(self.home.database)
        new = NewRun(key="key", name="digits", job={}, command=["true"])
        self.run = self.store.submit(new, now=1.0)[0].id
        self.transfers = InlineTransfers()
        self.pump = self.again()

    def again(self, cursors: dict[tuple[str, str], int] | None = None) -> Ingester:
        logs = LogSettings(budget=1 << 20, segment=1 << 18)
        return ingester(self.home, self.root, self.transfers, run=self.run, cursors=cursors or {}, logs=logs)

    def look(self) -> Intake:
        """One look, recorded as the control loop would."""
        found = take_in(self.pump, final=True)
        self.store.apply([c for c in found.changes if isinstance(c, AddEvent | AddMetrics | AddCheckpoint)])
        return found

    def looks(self, most: int = 100) -> list[Intake]:
        """Until nothing is left to read."""
        found = [self.look()]
        while found[-1].more:
            assert len(found) < most, "it never ends"
            found.append(self.look())
        return found


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


@pytest.mark.parametrize("name", [layout.JOURNAL, layout.STATUS, layout.LOG, layout.METRICS, layout.ORDER])
@pytest.mark.parametrize("what", ["link", "pipe", "directory", "file"])
def test_something_else_in_its_place(task: Task, tmp_path: Path, name: str, what: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "000000.log").write_bytes(b"o 1 secret\n")
    (secret / "1-1.jsonl").write_text('{"v": {"secret": 1}, "step": 1, "t": 1}\n')
    path = task.root / name
    if path.is_dir():
        path.rmdir()
    make: dict[str, Callable[[], object]] = {
        "link": lambda: path.symlink_to(secret),
        "pipe": lambda: os.mkfifo(path),
        "directory": lambda: path.mkdir(),
        "file": lambda: path.write_text("no JSON"),
    }
    make[what]()
    found = task.look()
    assert (found.ending, found.points, found.log_bytes) == (None, [], 0)
    assert LocalTaskDir(str(task.root)).order() is None


@pytest.mark.parametrize("what", ["link", "pipe", "directory", "nothing", "file"])
def test_a_journal_that_was_replaced_is_said_once(task: Task, what: str) -> None:
    path = task.root / layout.JOURNAL
    path.write_text(json.dumps(ENDED) + "\n")
    assert task.look().ending is not None
    path.unlink()
    make: dict[str, Callable[[], object]] = {
        "link": lambda: path.symlink_to("/etc/passwd"),
        "pipe": lambda: os.mkfifo(path),
        "directory": lambda: path.mkdir(),
        "nothing": lambda: None,
        "file": lambda: path.write_text(""),
    }
    make[what]()
    texts = [
        change.row.text for _ in range(3) for change in task.look().changes if isinstance(change, AddEvent)
    ]
    assert len(texts) == 1 and layout.JOURNAL in texts[0]
    assert task.pump.reader.spoiled and task.pump.reader.read_before() is None


@pytest.mark.parametrize(
    "entry",
    [
        {"k": "ended"},
        {**ENDED, "code": 10**30},
        {**ENDED, "code": "0"},
        {**ENDED, "seconds": float("inf")},
        {**ENDED, "last_lines": 7},
        {**ENDED, "generation": "1"},
        {**ENDED, "generation": [1]},
        {"k": "checkpoint", "generation": 1},
        {"k": "checkpoint", "generation": 1, "number": -1, "name": "x", "how": "sdk", "files": [{}]},
        {
            "k": "checkpoint",
            "generation": 1,
            "number": 1,
            "name": "../../x",
            "how": "sdk",
            "files": [{"path": "../../../order.json", "size": 1, "sha256": "0" * 64}],
        },
        {"k": "setup", "generation": 1, "seconds": "soon"},
        {"k": "warning", "generation": 1, "message": "\ud800" * 10_000},
        {"k": "rejected", "generation": 1, "name": "\ud800", "reason": ["x"] * 10_000},
        {"k": "folder", "generation": 1, "put_back": [{"path": "\ud800" * 10_000}], "torn": []},
        {"k": "folder", "generation": 1, "put_back": [7], "torn": "x"},
        {"k": ["ended"], "generation": 1},
    ],
)
def test_false_journal_entries_are_skipped(task: Task, entry: dict[str, Any]) -> None:
    task.journal(entry, ENDED)
    found = task.look()
    assert found.ending is not None and found.ending.code == 0
    assert not found.checkpoints


def test_a_file_that_was_put_back_is_told(task: Task) -> None:
    back = {"path": "last.pt", "written_at": 1000.0}
    task.journal({"k": "folder-plan", "generation": 1, "put_back": [back], "torn": ["x.pt"], "at": 1003.0})
    task.journal({"k": "folder", "generation": 1, "put_back": [back], "torn": ["x.pt"], "at": 1003.0}, ENDED)
    events = [change.row for change in task.look().changes if isinstance(change, AddEvent)]
    assert [event.kind for event in events] == ["restored", "restored"]
    assert events[0].text.endswith("put back to the version written 3 s before")
    assert events[1].text.endswith("it is set aside as x.pt.torn")


def test_an_invalid_time(task: Task) -> None:
    task.journal(
        {"k": "started", "generation": 1, "at": "yesterday"}, {"k": "started", "generation": 1, "at": -1e99}
    )
    started = task.look().started_at
    assert started is not None and started > 1e9


@pytest.mark.parametrize(
    "line",
    [
        '{"v": {"\\ud800": 1}, "step": 1, "t": 1}',
        '{"v": {"loss": true}, "step": 1, "t": 1}',
        '{"v": {"loss": 1' + "0" * 400 + '}, "step": 1, "t": 1}',
        '{"v": {"loss": 1}, "step": 1' + "0" * 30 + ', "t": 1}',
        '{"v": {"loss": 1}, "step": 1, "t": NaN}',
        '{"v": [1], "step": 1, "t": 1}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_invalid_metrics(task: Task, line: str) -> None:
    (task.root / layout.METRICS / "1-1.jsonl").write_text(
        line + '\n{"v": {"loss": 2}, "step": 2, "t": 1}\n', encoding="latin-1"
    )
    assert Point("loss", 2, 2.0, 1.0) in task.look().points


def test_a_line_longer_than_one_look(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "LOOK_BYTES", 1 << 17)
    with open(task.root / layout.JOURNAL, "w") as file:
        file.write("x" * (1 << 19) + "\n")
    task.journal(ENDED)
    assert task.looks()[-1].ending is not None


def test_an_entry_longer_than_one_look_is_read_whole(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of a checkpoint of 50,000 files names them all."""
    monkeypatch.setattr(journal_reader, "LOOK_BYTES", 1 << 17)
    warning = {"k": "warning", "generation": 1, "message": "told", "files": ["x" * 100] * 10_000}
    task.journal({"k": "started", "generation": 1, "at": 1.0}, warning, ENDED)
    seen = task.looks()
    assert [
        change.row.text for found in seen for change in found.changes if isinstance(change, AddEvent)
    ] == ["told"]
    assert seen[-1].ending is not None and not task.pump.reader.spoiled
    assert task.again().reader.read_before() is None
    end = task.root.joinpath(layout.JOURNAL).stat().st_size
    assert task.again({("worker-0", layout.JOURNAL): end}).reader.read_before() is not None


@pytest.mark.parametrize(
    "entry",
    [
        {"k": "checkpoint", "generation": 1, "x": "y"},
        {"k": "checkpoint", "generation": 1, "number": 1, "name": "x", "how": "sdk", "at": 1.0, "written_at": 1.0,
         "files": [{"path": "gone", "size": 1, "sha256": "0" * 64}]},
        {"k": "warning", "generation": 1, "message": "again"},
        {"k": "rejected", "generation": 1, "name": "x", "reason": "again"},
        {"k": "folder", "generation": 1, "put_back": [], "torn": ["a", "b"], "at": 1.0},
    ],
)  # fmt: skip
def test_a_journal_that_is_flooded_makes_few_events(task: Task, entry: dict[str, Any]) -> None:
    """Each event is a database row, and the end of the run would wait for all of them."""
    task.journal(*[entry] * 20_000)
    events = [change for found in task.looks() for change in found.changes if isinstance(change, AddEvent)]
    assert len(events) <= 1_002
    assert task.look().more is False


def test_more_metrics_than_one_look_takes_are_all_taken_before_the_end(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_reader, "LOOK_BYTES", 1 << 17)
    for process in range(3):
        with open(task.root / layout.METRICS / f"1-{process}.jsonl", "w") as file:
            file.writelines(f'{{"v": {{"p{process}": 1}}, "step": {step}, "t": 1}}\n' for step in range(5000))
    task.journal(ENDED)
    seen = task.looks()
    assert len(seen) > 3
    assert [found.ending is not None for found in seen] == [False] * (len(seen) - 1) + [True]
    assert len({(point.key, point.step) for found in seen for point in found.points}) == 15_000


def test_files_of_a_terabyte_cost_nothing(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are sparse; reading is bounded in memory and on disk."""
    monkeypatch.setattr(journal_reader, "LARGEST_FILE", 16 << 20)
    monkeypatch.setattr(writer, "_SLACK", 1 << 20)
    for name in (layout.JOURNAL, layout.STATUS, f"{layout.METRICS}/1-1.jsonl", layout.segment(0)):
        (task.root / name).touch()
        os.truncate(task.root / name, 1 << 40)
    task.pump = task.again()
    tracemalloc.start()
    try:
        seen = task.looks()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kept = sum(path.stat().st_size for path in task.home.runs.rglob("*.log"))
    assert sum(found.log_bytes for found in seen) == kept <= 4 << 20
    assert peak < 64 << 20


def test_a_hundred_thousand_files(task: Task) -> None:
    for number in range(20_000):
        (task.root / layout.METRICS / f"1-{number}.jsonl").touch()
    for name in ("²", "x", "1", "9" * 200):
        (task.root / layout.LOG / f"{name}.log").write_bytes(b"o 1 x\n")
    (task.root / layout.METRICS / "1-0.jsonl").write_text('{"v": {"a": 1}, "step": 1, "t": 1}\n')
    found = task.look()
    assert len(found.points) == 1 and found.log_bytes == 0


def test_other_files_in_the_place_of_an_order(task: Task, tmp_path: Path) -> None:
    """A pipe does not block the write, and a link is not followed."""
    near = LocalTaskDir(str(task.root))
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.mkfifo(task.root / f"{layout.SECRETS}.{os.getpid()}.tmp")
    (task.root / layout.SECRETS).symlink_to(precious)
    near.write_secrets({"NAME": "value"})
    assert json.loads((task.root / layout.SECRETS).read_text()) == {"NAME": "value"}
    assert (task.root / layout.SECRETS).stat().st_mode & 0o777 == 0o600
    (task.root / f"{layout.SECRETS}.{os.getpid()}.tmp").symlink_to(precious)
    near.write_secrets({"NAME": "other"})
    assert precious.read_text() == "precious"


def test_the_directory_itself_is_a_link(task: Task, tmp_path: Path) -> None:
    task.root.rename(tmp_path / "moved")
    task.root.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="not a directory"):
        LocalTaskDir(str(task.root)).write_secrets({})
    with pytest.raises(OSError, match="not a directory"):
        LocalTaskDir(str(task.root)).read(layout.JOURNAL)


def test_too_many_open_files_loses_nothing(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the server itself is not the task's fault: the whole look fails and is retried."""
    (task.root / layout.METRICS / "1-1.jsonl").write_text('{"v": {"loss": 2}, "step": 2, "t": 1}\n')
    task.journal(ENDED)
    with monkeypatch.context() as patch:
        patch.setattr(LocalTaskDir, "lines", lambda *_: _raise(OSError(errno.EMFILE, "too many open files")))
        with pytest.raises(OSError, match="too many"):
            task.look()
    found = task.look()
    assert found.ending is not None and len(found.points) == 1


def test_blobs_on_a_read_only_disk_are_no_reason_to_refuse_a_checkpoint(task: Task) -> None:
    stage(task.root, 1, "step-1.pt", step=1)
    blobs = str(task.home.blobs)
    os.makedirs(blobs)
    for command in (["--bind", blobs, blobs], ["-o", "remount,ro,bind", blobs]):
        if os.geteuid() != 0 or subprocess.run(["mount", *command], capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
    try:
        found = task.look()
        assert task.transfers.waits == [TRY_AGAIN] and found.untaken == ["step-1.pt"]
    finally:
        subprocess.run(["umount", "--lazy", blobs], check=True)
    task.transfers.finish()
    found = task.look()
    assert (found.rejected, [row.name for row in found.checkpoints]) == ([], ["step-1.pt"])


def _raise(exc: Exception) -> None:
    raise exc


def test_what_the_run_made_of_the_files_of_others_is_said_once(task: Task) -> None:
    """The event explains an unexpected end to the user."""
    whole = {
        layout.TASK: TaskInfo(run=task.run, attempt=1, task="worker-0").to_json(),
        layout.ORDER: Order(seq=1, generation=1, verb="run").to_json(),
        layout.STATUS: Status("running", generation=1).to_json(),
    }
    for name, content in whole.items():
        (task.root / name).write_text(json.dumps(content))
    assert task.pump.reader.look_round(had_status=True) == []
    (task.root / layout.ORDER).unlink()
    (task.root / layout.STATUS).unlink()
    os.mkfifo(task.root / layout.STATUS)
    (task.root / layout.TASK).write_text("[" * 100_000)
    (change,) = task.pump.reader.look_round(had_status=True)
    assert isinstance(change, AddEvent)
    for found in (
        "order.json is gone",
        "status.json is not a regular file",
        "task.json is not what was written",
    ):
        assert found in change.row.text
    assert task.pump.reader.look_round(had_status=True) == [], "once"
    (task.root / layout.STATUS).unlink()
    (change,) = task.again().reader.look_round(had_status=False)
    assert isinstance(change, AddEvent) and "status.json" not in change.row.text
    shutil.rmtree(task.root)
    assert task.pump.reader.look_round(had_status=True) == []
