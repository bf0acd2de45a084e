"""Which checkpoints of a lost task are salvaged from its part of a shared volume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher.checkpoints import scan_state, stager
from stoker.launcher.recovery import salvage
from stoker.linux import idle_throttle
from stoker.task import layout
from support.checkpoints.scanning import Task, archive


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path / "task").begin()


def lost(task: Task, place: Path) -> Path:
    """The machine is lost; only the files on the volume remain."""
    part = place / "1.worker-0.1"
    part.mkdir()
    for name in layout.LASTING:
        (task.root / name).rename(part / name)
    return part


def entries(part: Path, kind: str) -> list[dict[str, Any]]:
    lines = (part / layout.JOURNAL).read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["k"] == kind]


def taken(part: Path) -> dict[str, str]:
    return {entry["name"]: entry["how"] for entry in entries(part, "checkpoint")}


@pytest.fixture(autouse=True)
def another_machine(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part is read on another machine than the one where `task` has begun."""
    monkeypatch.setattr(scan_state, "boot_id", lambda: "another machine")


def test_a_finished_copy_counts_in_any_format(task: Task, tmp_path: Path) -> None:
    task.rename("a.bin", b"one")
    task.poll()
    task.poll(0.3)
    assert task.names == ["a.bin"]
    part = lost(task, tmp_path)
    salvage(str(part), 1, [])
    (entry,) = entries(part, "checkpoint")
    assert (entry["name"], entry["how"]) == ("a.bin", "rename")
    assert (part / layout.staged(entry["number"]) / "a.bin").read_bytes() == b"one"


def test_a_transferred_checkpoint_is_not_salvaged_again(task: Task, tmp_path: Path) -> None:
    task.rename("step-1.pt", archive("one"))
    task.poll()
    task.poll(0.3)
    (entry,) = task.entries("checkpoint")
    shutil.rmtree(task.root / layout.staged(entry["number"]))
    task.rename("step-2.pt", archive("two"))
    task.poll()
    task.poll(0.3)
    part = lost(task, tmp_path)
    for _ in range(2):
        salvage(str(part), 1, [entry["number"]])
        assert list(taken(part)) == ["step-2.pt"], "and nothing twice"


def test_what_was_not_copied_yet_has_to_prove_itself(task: Task, tmp_path: Path) -> None:
    """A file name may be on the volume without its bytes after the loss of a machine."""
    whole = archive("whole")
    task.write("whole.pt", whole)
    task.write("torn.npz", whole[: len(whole) // 2])
    task.write("unknown.bin", b"\0" * 100)
    task.write("late.tmp", whole)
    part = lost(task, tmp_path)
    salvage(str(part), 1, [])
    assert taken(part) == {"whole.pt": "verified"}
    assert {entry["name"] for entry in entries(part, "rejected")} == {"torn.npz", "unknown.bin"}


def test_a_replaced_task_that_still_runs_does_not_interfere(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher stages the same checkpoint at the same moment, under the next number."""
    task.rename("a.bin", b"one")
    task.poll()
    task.poll(0.3)
    (mine,) = task.entries("checkpoint")
    task.write("b.pt", archive("two"))
    part = lost(task, tmp_path)
    really = stager.stage

    def beside(job: stager.StagingJob, pause: idle_throttle.Pause) -> stager.StagingOutcome:
        theirs = part / layout.staged(mine["number"] + 1)
        theirs.mkdir()
        (theirs / "b.pt").write_bytes(b"theirs")
        return really(job, pause)

    monkeypatch.setattr(stager, "stage", beside)
    salvage(str(part), 1, [])
    assert list(taken(part)) == ["a.bin", "b.pt"]
    (_, found) = entries(part, "checkpoint")
    assert (part / layout.staged(found["number"]) / "b.pt").read_bytes() == archive("two")


def test_a_restored_checkpoint_is_not_salvaged(tmp_path: Path) -> None:
    place = tmp_path / "again"
    (place / "checkpoints/1").mkdir(parents=True)
    (place / "checkpoints/1/old.pt").write_bytes(archive("old"))
    task = Task(place).begin()
    part = lost(task, tmp_path)
    salvage(str(part), 1, [])
    assert taken(part) == {}


def test_a_part_of_a_task_that_never_began(tmp_path: Path) -> None:
    part = tmp_path / "1.worker-0.1"
    for name in layout.LASTING:
        (part / name).mkdir(parents=True)
    (part / "checkpoints/1").mkdir()
    (part / "checkpoints/1/x.pt").write_bytes(archive("x"))
    salvage(str(part), 1, [])
    assert taken(part) == {}
