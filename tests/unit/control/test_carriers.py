"""Carrying aside: it gives way to a training on this machine, and a server that ends does not wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.control.ingest.checkpoint_transfer import Abandoned, CheckpointTransfers
from stoker.linux import direct_io, idle_throttle
from stoker.task import layout
from stoker.task.formats import StagedCheckpoint
from stoker.task.local_directory import LocalTaskDir

DATA = bytes(3 * direct_io.PIECE)


@pytest.fixture
def task(tmp_path: Path) -> LocalTaskDir:
    (tmp_path / layout.staged(1)).mkdir(parents=True)
    (tmp_path / layout.staged(1) / "last.pt").write_bytes(DATA)
    return LocalTaskDir(str(tmp_path))


def staged() -> StagedCheckpoint:
    file = {"path": "last.pt", "size": len(DATA), "sha256": "", "mode": 0o600}
    return StagedCheckpoint(number=1, generation=1, name="last.pt", how="sdk", files=[file])


def test_it_rests_between_two_pieces_unless_it_is_hurried(
    task: LocalTaskDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[bool] = []
    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", lambda self: rested.append(self._hurried()))
    hurry = iter([False, False, True])
    carriers, blobs = CheckpointTransfers(), BlobStore(tmp_path / "blobs")
    digest, size = carriers.carry(task, staged(), blobs, lambda: next(hurry)).result(60)
    assert size == len(DATA) and blobs.verify_tree(digest) == []
    assert rested == [False, False, True]
    carriers.close()


def test_a_server_that_ends_breaks_it_off_and_the_next_one_does_it_again(
    task: LocalTaskDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = threading.Event(), threading.Event()

    def rest(self: idle_throttle.IdleThrottle) -> None:
        begun.set()
        assert closed.wait(60)

    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", rest)
    carriers, blobs = CheckpointTransfers(), BlobStore(tmp_path / "blobs")
    carrying = carriers.carry(task, staged(), blobs, lambda: False)
    assert begun.wait(60)
    carriers.close()
    closed.set()
    with pytest.raises(Abandoned):
        carrying.result(60)
    assert blobs.usage().blobs == 0
    assert (tmp_path / layout.staged(1) / "last.pt").stat().st_size == len(DATA)
    another = CheckpointTransfers()
    digest, _ = another.carry(task, staged(), blobs, lambda: False).result(60)
    assert blobs.verify_tree(digest) == []
    another.close()
