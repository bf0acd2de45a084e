"""What a scanner reports: finished scans, and checkpoints that are being written."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.launcher.checkpoints.scanner import PENDING, UNFINISHED_FOR
from stoker.task import checkpoint_names
from support.checkpoints.scanning import Task


def test_a_checkpoint_is_pending_until_it_is_committed(task: Task) -> None:
    task.poll()
    before = task.scanner.scans
    assert task.scanner.pending() == []
    task.write("step-1.bin", b"one")
    task.poll()
    assert task.scanner.pending() == ["step-1.bin"] and task.scanner.scans > before
    task.pass_time(4.0)
    assert task.names == ["step-1.bin"] and task.scanner.pending() == []


def test_a_temporary_name_announces_its_checkpoint(task: Task) -> None:
    temporary = task.write(".step-2.bin.77-0a1b2c3d.tmp", b"two")
    task.poll()
    assert task.scanner.pending() == ["step-2.bin"]
    temporary.rename(task.dir / "step-2.bin")
    task.poll()
    assert task.scanner.pending() == ["step-2.bin"]
    task.pass_time(1.0)
    assert task.names == ["step-2.bin"] and task.scanner.pending() == []
    # The writer of this one has died: it is not awaited forever.
    task.write("step-3.bin.tmp", b"three")
    task.poll()
    assert task.scanner.pending() == ["step-3.bin"]
    task.poll(UNFINISHED_FOR)
    assert task.scanner.pending() == []


def test_the_number_of_pending_names_is_bounded(task: Task) -> None:
    for number in range(PENDING + 10):
        task.write(f"step-{number}.bin", b"x")
        task.write(f"later-{number}.bin.tmp", b"x")
    task.poll()
    assert len(task.scanner.pending()) == PENDING


def test_the_last_scan_counts(task: Task) -> None:
    task.write("step-1.bin", b"one")
    before = task.scanner.scans
    task.scanner.finish(False)
    assert task.scanner.scans > before and task.scanner.pending() == []


def test_scans_without_inotify_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError("no inotify here")

    monkeypatch.setattr("stoker.linux.inotify.Inotify.__init__", none)
    task = Task(tmp_path / "task", blind=True).begin()
    task.poll()
    before = task.scanner.scans
    task.scanner.poll(task.clock.now)
    assert task.scanner.scans == before
    task.poll(30.0)
    assert task.scanner.scans > before
    task.close()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("step-100.pt.tmp", "step-100.pt"),
        (".step-100.123-abcd0123.tmp", "step-100"),
        ("tmp-checkpoint-500", "checkpoint-500"),
        ("last.ckpt.part", "last.ckpt"),
        (".tmp", ".tmp"),
    ],
)
def test_what_a_temporary_name_means(name: str, meant: str) -> None:
    assert checkpoint_names.final_name(name) == meant
