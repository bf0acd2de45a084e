"""Logs and metrics are read while checkpoints are in transfer, and each checkpoint is reported exactly
once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.control.ingest import journal_reader
from stoker.control.ingest.ingester import MOST_FAULTS, TRY_AGAIN, Ingester
from stoker.control.ingest.journal_reader import Intake
from stoker.settings import Home
from stoker.store import Store
from stoker.store.rows import AddCheckpoint, AddEvent, NewRun, PutTransfer
from stoker.task import layout
from stoker.task.formats import Ending
from support.control.driven import stage
from support.control.ingesting import HeldTransfers, TaskFiles, ingester


class Task(TaskFiles):
    """A task directory, its ingester, and the database into which every look is recorded at once."""

    def __init__(self, tmp_path: Path, **more: Any) -> None:
        self.home = Home(tmp_path / "home")
        super().__init__(tmp_path / "task")
        self.store = Store.open(self.home.database)
        self.run = self.store.submit(NewRun("key", "digits", {}, ["true"]), now=1.0)[0].id
        self.more = more
        self.phase("running")
        self.ingester = self.restart()

    def restart(self) -> Ingester:
        """Another server starts."""
        self.transfers = HeldTransfers()
        cursors = self.store.cursors(self.run, 1)
        self.ingester = ingester(
            self.home, self.root, self.transfers, run=self.run, cursors=cursors, **self.more
        )
        self.ingester.resume(self.store.checkpoint_transfers(self.run, 1))
        return self.ingester

    def look(self, *, final: bool = False) -> Intake:
        return self.record(self.ingester.look(final=final))

    def record(self, found: Intake) -> Intake:
        self.store.apply([*found.changes, *(PutTransfer(one.row) for one in found.seen)])
        return found

    def on_their_way(self) -> list[str]:
        return [row.name for row in self.store.checkpoint_transfers(self.run, 1)]

    def kept(self) -> list[str]:
        return [row.name for row in self.store.checkpoints(self.run)]

    def end(self) -> None:
        self.journal({"k": "ended", **Ending(1, 1, "exited", at=70.0).to_json()})
        self.phase("ended")

    def checkpoint(self, number: int, data: bytes = b"weights", step: int | None = None) -> None:
        stage(self.root, number, f"step-{number}.pt", file="last.pt", step=step, data=data)

    def damage(self, number: int) -> None:
        path = self.root / layout.staged(number) / "last.pt"
        path.write_bytes(b"y" * path.stat().st_size)

    def report(self, step: int, t: float, loss: float) -> None:
        with open(self.root / layout.METRICS / "1-7-ab.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "t": t, "v": {"loss": loss}}) + "\n")


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


def names(found: Intake) -> list[str]:
    return [row.name for row in found.checkpoints]


def test_entries_after_a_checkpoint_are_read_at_once(task: Task) -> None:
    task.report(1, 40.0, 0.5)
    task.checkpoint(1)
    task.journal({"k": "warning", "message": "behind it"})
    task.journal({"k": "hang", "seconds": 60, "stacks": "s", "how": "py-spy"})
    task.checkpoint(2)
    task.end()
    found = task.look()
    assert [one.row.name for one in found.seen] == ["step-1.pt", "step-2.pt"] == found.untaken
    assert "behind it" in [change.row.text for change in found.changes if isinstance(change, AddEvent)]
    assert found.hung is not None and found.ending is not None and found.heard and not found.checkpoints
    assert (
        task.store.cursors(task.run, 1)["worker-0", layout.JOURNAL]
        == os.stat(task.root / layout.JOURNAL).st_size
    )
    assert task.on_their_way() == ["step-1.pt", "step-2.pt"]


def test_a_transferred_checkpoint_is_reported_with_the_next_look(task: Task) -> None:
    task.checkpoint(1)
    task.checkpoint(2)
    task.look()
    assert not task.ingester.has_arrived
    task.transfers.work()
    assert task.ingester.has_arrived and task.ingester.untaken == ["step-1.pt", "step-2.pt"]
    found = task.look()
    assert names(found) == ["step-1.pt"] and found.untaken == ["step-2.pt"] and found.visible
    task.transfers.work()
    found = task.record(task.ingester.collect())
    assert names(found) == ["step-2.pt"] and found.untaken == [] and found.status is None
    assert task.kept() == ["step-1.pt", "step-2.pt"] and task.on_their_way() == []
    assert task.ingester.look().changes == []


def test_each_checkpoint_has_the_metrics_reported_before_it(task: Task) -> None:
    task.report(1, 40.0, 0.9)
    task.checkpoint(1)
    task.look()
    task.report(2, 49.0, 0.5)
    task.checkpoint(2)
    task.look()
    task.report(3, 60.0, 0.1)
    task.look()
    task.restart()  # their metrics are recorded
    task.transfers.finish()
    found = task.look()
    assert [(row.name, row.metrics) for row in found.checkpoints] == [
        ("step-1.pt", {"loss": 0.9}),
        ("step-2.pt", {"loss": 0.5}),
    ]


@pytest.mark.parametrize("carried", [False, True])
def test_the_next_server_continues_the_transfers(task: Task, carried: bool) -> None:
    task.checkpoint(1)
    task.look()
    if carried:
        task.transfers.finish()  # the files have left the directory, and no record says so
    task.restart()
    assert task.ingester.untaken == ["step-1.pt"]
    task.transfers.finish()
    assert names(task.look()) == ["step-1.pt"]
    assert task.kept() == ["step-1.pt"] and task.on_their_way() == []
    assert task.restart().untaken == []


def test_an_unrecorded_checkpoint_is_read_again_by_the_next_server(task: Task) -> None:
    task.checkpoint(1)
    task.ingester.look()
    task.transfers.finish()
    task.restart()
    assert [one.row.name for one in task.look().seen] == ["step-1.pt"]
    task.transfers.finish()
    assert names(task.look()) == ["step-1.pt"] and task.kept() == ["step-1.pt"]


def test_checkpoints_of_a_changed_journal_are_rejected(task: Task) -> None:
    task.checkpoint(1)
    task.checkpoint(2)
    task.look()
    path = task.root / layout.JOURNAL
    path.write_bytes(b"x" * path.stat().st_size)
    task.restart()
    found = task.look()
    assert found.rejected == ["step-1.pt", "step-2.pt"] and not task.transfers.works
    assert task.on_their_way() == [] == task.kept()


def test_transfers_of_another_generation_are_dropped(task: Task) -> None:
    task.checkpoint(1)
    task.look()
    task.more = {"generation": 2}
    assert task.restart().untaken == [] and not task.transfers.works


def test_a_damaged_one_is_refused_and_the_next_one_counts(task: Task) -> None:
    task.checkpoint(1)
    task.damage(1)
    task.checkpoint(2)
    task.look()
    task.transfers.finish()
    found = task.look()
    assert names(found) == ["step-2.pt"] and found.rejected == ["step-1.pt"]
    assert any(isinstance(change, AddEvent) and "not offered" in change.row.text for change in found.changes)
    assert task.on_their_way() == []


def test_refusals_of_the_launcher_keep_their_order(tmp_path: Path) -> None:
    """A part written after a damaged one replaces it; an earlier part does not."""
    task = Task(tmp_path, alone=False)
    task.checkpoint(1)
    task.look()
    task.journal({"k": "rejected", "name": "step-1.pt", "reason": "torn"})
    task.checkpoint(2)
    task.journal({"k": "rejected", "name": "step-2.pt", "reason": "torn"})
    assert task.look().rejected == []
    task.transfers.work()
    found = task.look()
    assert [part.name for part in found.parts] == ["step-1.pt"] and found.rejected == ["step-1.pt"]
    task.transfers.work()
    assert task.look().rejected == ["step-2.pt"]
    task.journal({"k": "rejected", "name": "step-3.pt", "reason": "torn"})
    assert task.look().rejected == ["step-3.pt"], "nothing is on its way"


def test_checkpoints_of_several_tasks_are_parts(tmp_path: Path) -> None:
    task = Task(tmp_path, alone=False)
    task.checkpoint(1, step=7)
    found = task.look()
    assert found.seen[0].row.metrics == {} and found.untaken == ["step-1.pt"]
    found.seen[0].row = type(found.seen[0].row)(**{**vars(found.seen[0].row), "metrics": {"loss": 0.5}})
    task.transfers.finish()
    found = task.look()
    assert [(part.task, part.name, part.step, part.metrics) for part in found.parts] == [
        ("worker-0", "step-1.pt", 7, {"loss": 0.5})
    ]
    assert not [change for change in found.changes if isinstance(change, AddCheckpoint)]


def test_a_transfer_is_retried_after_an_io_error(task: Task) -> None:
    task.checkpoint(1)
    task.look()
    task.transfers.fault = OSError(errno.EIO, os.strerror(errno.EIO))
    task.transfers.work()
    task.transfers.work()
    assert task.transfers.waits == [TRY_AGAIN] * 2 and task.ingester.untaken and not task.ingester.has_arrived
    task.transfers.fault = None
    task.transfers.finish()
    assert names(task.look()) == ["step-1.pt"]


def test_the_checkpoints_of_a_lost_task_are_rejected(task: Task) -> None:
    task.checkpoint(1)
    task.look()
    task.transfers.fault = OSError(errno.EHOSTDOWN, "the task's courier is gone")
    task.transfers.finish()
    assert task.look().rejected == ["step-1.pt"] and task.transfers.waits == []


def test_an_unexpected_error_does_not_delay_the_end_forever(task: Task) -> None:
    task.checkpoint(1)
    task.look()
    task.transfers.fault = RuntimeError("a bug")
    task.transfers.finish()
    assert len(task.transfers.waits) == MOST_FAULTS - 1
    assert task.look().rejected == ["step-1.pt"]


def test_a_look_that_fails_loses_nothing(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    task.checkpoint(1)
    task.look()
    task.transfers.finish()
    task.report(1, 60.0, 0.5)
    with monkeypatch.context() as broken:
        broken.setattr(type(task.ingester.directory), "read", lambda *_: _raise(OSError(errno.EIO, "no")))
        with pytest.raises(OSError, match="no"):
            task.ingester.look()
    found = task.look()
    assert names(found) == ["step-1.pt"] and [point.value for point in found.points] == [0.5]


def _raise(exc: Exception) -> None:
    raise exc


def hurried(task: Task) -> bool:
    """Whether the last requested transfer is urgent."""
    found: bool = task.transfers.asked[-1]["hurried"]()
    return found


@pytest.mark.parametrize("by", ["the end", "another", "a last look"])
def test_a_transfer_is_urgent_when_something_waits_for_it(task: Task, by: str) -> None:
    task.transfers.fault = OSError(errno.EIO, "later")
    task.checkpoint(1)
    task.look()
    task.transfers.work()
    task.journal({"k": "warning", "message": "this does not wait for it"})
    task.look()
    assert not hurried(task)
    if by == "another":
        task.checkpoint(2)
    elif by == "the end":
        task.end()
    task.look(final=by == "a last look")
    assert hurried(task)


@pytest.mark.parametrize(("step", "hurries"), [(None, True), (7, False)])
def test_a_part_without_a_step_is_urgent(tmp_path: Path, step: int | None, hurries: bool) -> None:
    """It counts only while no task writes, and may be overwritten at any time."""
    task = Task(tmp_path, alone=False)
    task.checkpoint(1, step=step)
    task.look()
    task.transfers.finish()
    assert hurried(task) == hurries


def test_too_many_checkpoints_wait_in_the_journal(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "MOST_UNTAKEN", 2)
    for number in range(1, 4):
        task.checkpoint(number)
    task.end()
    found = task.look()
    assert len(found.seen) == 2 and not found.heard and not found.more and found.ending is None
    task.transfers.work()
    task.record(task.ingester.collect())
    found = task.look()
    assert [one.row.name for one in found.seen] == ["step-3.pt"] and found.heard and found.ending is not None


def test_invalid_checkpoint_entries(task: Task) -> None:
    for entry in (
        {"k": "checkpoint", "number": "x"},
        {"k": "checkpoint", "generation": 1, "number": 3, "files": [{"size": "no"}]},
        {"k": "checkpoint", "generation": 1, "number": 3, "files": 7},
    ):
        task.journal(entry)
    task.checkpoint(4)
    task.look()
    task.transfers.finish()
    assert names(task.look()) == ["step-4.pt"]
