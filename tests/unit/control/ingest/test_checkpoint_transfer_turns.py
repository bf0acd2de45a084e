"""The launchers of an attempt's tasks, and the server that transfers for each of them, share one part of the
CPU."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stoker.blobs import BlobStore
from stoker.control.ingest import checkpoint_transfer
from stoker.control.ingest.checkpoint_transfer import CheckpointTransfers
from stoker.engine.local.tasks import directories
from stoker.launcher.checkpoints.scanner import Scanner
from stoker.linux import direct_io, idle_throttle
from stoker.task import layout
from stoker.task.formats import StagedCheckpoint, TaskInfo
from stoker.task.local_directory import LocalTaskDir

DATA = b"x" * 1000


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU is free, and every file is large."""
    monkeypatch.setattr(idle_throttle, "_idle", lambda: 0.0)
    monkeypatch.setattr(idle_throttle, "_group", lambda: (None, None))
    monkeypatch.setattr(idle_throttle, "LOOK", 0.001)
    monkeypatch.setattr(idle_throttle, "PATIENCE", 1e9)
    monkeypatch.setattr(direct_io, "LARGE", 1)
    monkeypatch.setattr(checkpoint_transfer, "LARGE", 1)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Threads that asked for the turn while another thread had it."""
    told: set[int] = set()
    take = idle_throttle._Turn.take

    def asked(self: idle_throttle._Turn, now: float) -> bool:
        taken = take(self, now)
        if not taken:
            told.add(threading.get_ident())
        return taken

    monkeypatch.setattr(idle_throttle._Turn, "take", asked)
    return told


def make(attempt: Path, index: int) -> Path:
    directory = attempt / f"worker-{index}"
    directories.create(directory, TaskInfo("run-1", 1, directory.name, "worker", index))
    return directory


def wait_for(told: set[int], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(told) < count:
        assert time.monotonic() < deadline, f"{len(told)} of {count} asked for their turn"
        time.sleep(0.01)


def carry(transfers: CheckpointTransfers, root: Path, blobs: BlobStore) -> Future[int]:
    (root / layout.staged(1)).mkdir()
    (root / layout.staged(1) / "last.bin").write_bytes(DATA)
    file = {"path": "last.bin", "size": len(DATA), "sha256": "", "mode": 0o600}
    staged = StagedCheckpoint(number=1, generation=1, name="last.bin", how="sdk", files=[file])
    done: Future[int] = Future()

    def work() -> bool:
        directory = LocalTaskDir(str(root))
        done.set_result(transfers.carry(directory, staged, blobs, size=len(DATA), hurried=bool)[1])
        return False

    transfers.add("run-1", work)
    return done


def test_only_one_copy_runs_at_a_time_beside_a_training(tmp_path: Path, refused: set[int]) -> None:
    first, second, third = (make(tmp_path / "1", index) for index in range(3))
    journal: list[dict[str, Any]] = []
    scanner = Scanner(str(first), journal.append, quiet=0.0, near=True)
    scanner.begin(1)
    holder = idle_throttle._Turn(str(first / layout.TURNS))
    assert holder.take(0.0)
    (first / layout.checkpoints(1) / "last.bin").write_bytes(DATA)
    deadline = time.monotonic() + 60
    while not scanner._stager.waiting:
        assert time.monotonic() < deadline, "the checkpoint was not seen"
        scanner.poll(time.monotonic())
    transfers, blobs = CheckpointTransfers(), BlobStore(tmp_path / "blobs")
    carried = [carry(transfers, root, blobs) for root in (second, third)]
    wait_for(refused, 3)
    assert not any(one.done() for one in carried) and scanner._stager.done.empty()
    holder.release()
    assert [one.result(60) for one in carried] == [len(DATA)] * 2
    outcome = scanner._stager.next_outcome(60)
    assert outcome is not None and outcome.status == "staged"
    assert holder.take(0.0) and holder._fd is not None, "each transfer has given it back"
    holder.release()
    transfers.close()
    scanner.close()


def test_another_attempt_has_its_own_turn(tmp_path: Path, refused: set[int]) -> None:
    holder = idle_throttle._Turn(str(make(tmp_path / "1", 0) / layout.TURNS))
    assert holder.take(0.0)
    other = make(tmp_path / "2", 0)
    transfers, blobs = CheckpointTransfers(), BlobStore(tmp_path / "blobs")
    assert carry(transfers, other, blobs).result(60) == len(DATA)
    assert not refused and (other / layout.TURNS).exists(), "it asked for the turn, and had it"
    holder.release()
    transfers.close()


def test_a_later_or_repeated_task_has_the_same_turn(tmp_path: Path) -> None:
    first = make(tmp_path / "1", 0)
    assert not (first / layout.TURNS).exists(), "a task alone needs none until it takes a turn"
    second = make(tmp_path / "1", 1)
    held = [(task / layout.TURNS).stat().st_ino for task in (first, second)]
    directories.archive(first, 1)
    again, third = make(tmp_path / "1", 0), make(tmp_path / "1", 2)
    held += [(task / layout.TURNS).stat().st_ino for task in (again, third)]
    assert len(set(held)) == 1
    make(tmp_path / "1", 1)
    assert (second / layout.TURNS).stat().st_ino == held[0], "made once more after a crash"


def test_a_lock_that_leads_elsewhere_is_not_shared(tmp_path: Path) -> None:
    first = make(tmp_path / "1", 0)
    (first / layout.TURNS).symlink_to(tmp_path / "elsewhere")
    assert not (make(tmp_path / "1", 1) / layout.TURNS).exists()
    assert not (tmp_path / "elsewhere").exists()
