"""Large checkpoints are carried while logs and metrics are taken in, and nothing that was written after them comes first."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stoker.blobs import BlobStore
from stoker.control.ingest import checkpoint_transfer
from stoker.control.ingest import journal_reader as pumps
from stoker.control.ingest.journal_reader import Intake, JournalReader
from stoker.settings import Home
from stoker.store.rows import AddEvent
from stoker.task import layout
from stoker.task.formats import Ending, StagedCheckpoint, Status, write_json
from stoker.task.local_directory import LocalTaskDir
from stoker.transfer import carry_checkpoint
from support.waiting import wait


class Carriers(checkpoint_transfer.CheckpointTransfers):
    """Carries when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], tuple[Any, ...]]] = []
        self.fault: Exception | None = None
        self.begins = True

    def carry(self, *asked: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.begins:
            future.set_running_or_notify_cancel()
        self.waiting.append((future, asked))
        return future

    def work(self) -> None:
        future, (directory, staged, blobs, *_) = self.waiting.pop(0)
        try:
            if self.fault is not None:
                raise self.fault
            future.set_result(carry_checkpoint(directory, staged, blobs))
        except Exception as exc:
            future.set_exception(exc)


class Task:
    def __init__(self, tmp_path: Path, **more: Any) -> None:
        self.home = Home(tmp_path / "home")
        self.root = tmp_path / "task"
        for name in layout.DIRECTORIES:
            (self.root / name).mkdir(parents=True)
        self.blobs = BlobStore(self.home.blobs)
        self.carriers = Carriers()
        self.phase("running")
        self.pump = self.made(**more)

    def made(self, **more: Any) -> JournalReader:
        return JournalReader(
            self.home,
            self.blobs,
            LocalTaskDir(str(self.root)),
            run="digits-1",
            attempt=1,
            task="worker-0",
            generation=1,
            cursors={},
            latest={},
            carriers=self.carriers,
            **more,
        )

    def phase(self, phase: str) -> None:
        write_json(str(self.root / layout.STATUS), Status(phase, generation=1).to_json())

    def journal(self, entry: dict[str, Any]) -> None:
        with open(self.root / layout.JOURNAL, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def checkpoint(self, number: int, data: bytes, step: int | None = None) -> None:
        place = self.root / layout.staged(number)
        place.mkdir(parents=True)
        (place / "last.pt").write_bytes(data)
        file = {"path": "last.pt", "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "mode": 420}
        staged = StagedCheckpoint(
            number=number, generation=1, name=f"step-{number}.pt", how="sdk", files=[file], step=step,
            metrics={}, at=50.0, written_at=50.0,
        )  # fmt: skip
        self.journal({"k": "checkpoint", **staged.to_json()})

    def report(self, step: int, t: float, loss: float) -> None:
        with open(self.root / layout.METRICS / "1-7-ab.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "t": t, "v": {"loss": loss}}) + "\n")


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(pumps, "LARGE", 1000)
    return Task(tmp_path)


def names(found: Intake) -> list[str]:
    return [row.name for row in found.checkpoints]


def test_what_is_small_is_taken_in_at_once(task: Task) -> None:
    task.checkpoint(1, b"x" * 999)
    found = task.pump.look()
    assert names(found) == ["step-1.pt"] and not found.behind and found.carrying is None


def test_metrics_come_in_while_a_large_one_is_carried(task: Task) -> None:
    task.report(1, 40.0, 0.5)
    task.checkpoint(1, b"x" * 1000)
    task.checkpoint(2, b"small")
    found = task.pump.look()
    carrying = found.carrying
    assert carrying is not None and found.behind and not found.more and names(found) == []
    task.report(2, 60.0, 0.25)
    found = task.pump.look()
    assert [point.value for point in found.points] == [0.25] and found.behind
    assert found.carrying is None, "there is one already to be woken by"
    task.carriers.work()
    assert carrying.done()
    found = task.pump.look()
    # In the order they were written, each judged by what had been reported before it.
    assert names(found) == ["step-1.pt", "step-2.pt"] and not found.behind
    assert [row.metrics for row in found.checkpoints] == [{"loss": 0.5}, {"loss": 0.5}]
    assert task.blobs.verify_tree(found.checkpoints[0].digest) == []
    assert task.pump.look().changes == []


def test_an_end_waits_for_what_is_on_its_way_and_that_hurries(task: Task) -> None:
    task.checkpoint(1, b"x" * 1000)
    assert task.pump.look().behind
    ((_, (*_, hurried, _)),) = task.carriers.waiting
    assert not hurried()
    task.journal({"k": "ended", **Ending(1, 1, "exited", at=70.0).to_json()})
    assert task.pump.look().ending is None
    task.phase("ended")
    looked = ThreadPoolExecutor(1)
    found = looked.submit(task.pump.look)
    wait(hurried)
    task.carriers.work()
    assert names(found.result(60)) == ["step-1.pt"] and found.result().ending is not None
    looked.shutdown()


def test_an_end_does_not_wait_for_others_that_are_carried_first(task: Task) -> None:
    task.carriers.begins = False
    task.checkpoint(1, b"x" * 1000)
    assert task.pump.look().behind
    task.journal({"k": "ended", **Ending(1, 1, "exited", at=70.0).to_json()})
    task.phase("ended")
    found = task.pump.look()
    assert names(found) == ["step-1.pt"] and found.ending is not None
    assert task.carriers.waiting[0][0].cancelled()


def test_what_others_in_the_journal_wait_for_hurries(task: Task) -> None:
    task.checkpoint(1, b"x" * 1000)
    task.pump.look()
    ((_, (*_, hurried, _)),) = task.carriers.waiting
    assert not hurried()
    task.journal({"k": "warning", "message": "the next line"})
    task.pump.look()
    assert hurried()


def test_of_one_that_has_ended_nothing_goes_aside(task: Task) -> None:
    task.phase("ended")
    task.checkpoint(1, b"x" * 5000)
    task.journal({"k": "ended", **Ending(1, 1, "exited", at=70.0).to_json()})
    found = task.pump.look()
    assert names(found) == ["step-1.pt"] and found.ending is not None and not task.carriers.waiting


def test_a_damaged_one_is_refused_and_the_next_one_counts(task: Task) -> None:
    task.checkpoint(1, b"x" * 1000)
    (task.root / layout.staged(1) / "last.pt").write_bytes(b"y" * 1000)
    task.checkpoint(2, b"small")
    assert task.pump.look().behind
    task.carriers.work()
    found = task.pump.look()
    assert names(found) == ["step-2.pt"] and found.rejected == ["step-1.pt"]
    assert any(isinstance(change, AddEvent) and "not offered" in change.row.text for change in found.changes)


def test_a_full_disk_is_tried_again(task: Task) -> None:
    task.carriers.fault = OSError(errno.EIO, os.strerror(errno.EIO))
    task.checkpoint(1, b"x" * 1000)
    assert task.pump.look().behind
    task.carriers.work()
    with pytest.raises(OSError, match="Input/output"):
        task.pump.look()
    task.carriers.fault = None
    assert task.pump.look().behind
    task.carriers.work()
    assert names(task.pump.look()) == ["step-1.pt"]


def test_a_server_that_died_meanwhile_begins_again(task: Task) -> None:
    task.checkpoint(1, b"x" * 1000)
    assert task.pump.look().behind
    task.carriers.work()
    again = task.made()  # it had not recorded anything: the cursor is where it was
    assert again.look().behind
    task.carriers.work()
    assert names(again.look()) == ["step-1.pt"]


def test_a_part_of_a_checkpoint_of_several_tasks_is_carried_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pumps, "LARGE", 1000)
    task = Task(tmp_path, alone=False)
    task.checkpoint(1, b"x" * 1000)
    found = task.pump.look()
    assert found.behind == [("step-1.pt", 1)] and found.parts == []
    task.checkpoint(2, b"small")
    task.journal({"k": "rejected", "name": "step-3.pt", "reason": "damaged"})
    found = task.pump.look()
    assert found.behind == [("step-1.pt", 1), ("step-2.pt", 2), ("step-3.pt", None)]
    assert found.parts == [] and found.rejected == [] and found.heard
    task.carriers.work()
    found = task.pump.look()
    assert [part.name for part in found.parts] == ["step-1.pt", "step-2.pt"] and found.behind == []


@pytest.mark.parametrize(("step", "hurries"), [(None, True), (7, False)])
def test_a_part_without_a_step_hurries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, hurries: bool
) -> None:
    """It counts only while nobody writes, and may be overwritten any time."""
    monkeypatch.setattr(pumps, "LARGE", 1000)
    task = Task(tmp_path, alone=False)
    task.checkpoint(1, b"x" * 1000, step=step)
    task.pump.look()
    ((_, (*_, hurried, _)),) = task.carriers.waiting
    assert hurried() == hurries


def test_what_waits_behind_is_judged_by_what_had_been_reported_before_it(task: Task) -> None:
    task.report(1, 40.0, 0.9)
    task.checkpoint(1, b"x" * 1000)
    task.pump.look()
    task.report(2, 49.0, 0.5)
    task.checkpoint(2, b"small")
    task.pump.look()
    task.report(3, 60.0, 0.1)
    task.pump.look()
    task.carriers.work()
    found = task.pump.look()
    assert [(row.name, row.metrics) for row in found.checkpoints] == [
        ("step-1.pt", {"loss": 0.9}),
        ("step-2.pt", {"loss": 0.5}),
    ]


def test_a_sign_of_life_does_not_wait(task: Task) -> None:
    task.journal({"k": "hang", "seconds": 60, "stacks": "s", "how": "py-spy"})
    task.checkpoint(1, b"x" * 1000)
    assert task.pump.look().hung == {"seconds": 60.0, "stacks": "s", "how": "py-spy"}
    task.journal({"k": "alive"})
    assert task.pump.look().hung == {}
    task.journal({"k": "hang", "seconds": "nonsense"})
    assert task.pump.look().hung == {}
    task.carriers.work()
    assert task.pump.look().hung == {}


def test_a_journal_that_was_not_read_to_its_end_says_nothing_of_what_its_status_says(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.checkpoint(1, b"x" * 1000)
    task.checkpoint(2, b"small")
    size = (task.root / layout.JOURNAL).stat().st_size
    monkeypatch.setattr(pumps, "LOOK_BYTES", size - 1)
    found = task.pump.look()
    assert found.behind == [("step-1.pt", 1)] and not found.heard
    monkeypatch.setattr(pumps, "LOOK_BYTES", size + 1)
    found = task.pump.look()
    assert found.behind == [("step-1.pt", 1), ("step-2.pt", 2)] and found.heard


def test_a_look_that_fails_loses_nothing_that_was_reported(task: Task) -> None:
    task.carriers.fault = OSError(errno.EIO, os.strerror(errno.EIO))
    task.checkpoint(1, b"x" * 1000)
    task.pump.look()
    task.carriers.work()
    task.report(1, 60.0, 0.5)
    task.journal({"k": "warning", "message": "said once"})
    with pytest.raises(OSError, match="Input/output"):
        task.pump.look()
    task.carriers.fault = None
    assert [point.value for point in task.pump.look().points] == [0.5]
    task.carriers.work()
    found = task.pump.look()
    assert names(found) == ["step-1.pt"] and found.points == []


def test_what_the_journal_says_of_a_checkpoint_may_be_nonsense(task: Task) -> None:
    for entry in (
        {"k": "checkpoint", "number": "x"},
        {"k": "checkpoint", "generation": 1, "number": 3, "files": [{"size": "no"}]},
        {"k": "checkpoint", "generation": 1, "number": 3, "files": 7},
    ):
        task.journal(entry)
    task.checkpoint(4, b"fine")
    found = task.pump.look()
    assert names(found) == ["step-4.pt"] and not task.carriers.waiting
