"""Transfers give way to a training on this machine and to each other; a server does not wait for them to
end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Queue

import pytest

from stoker.blobs import BlobStore
from stoker.control.ingest import checkpoint_transfer
from stoker.control.ingest.checkpoint_transfer import AT_ONCE, Abandoned, CheckpointTransfers
from stoker.linux import direct_io, idle_throttle
from stoker.task import layout
from stoker.task.formats import StagedCheckpoint
from stoker.task.local_directory import LocalTaskDir
from support.blobs import stored

DATA = bytes(3 * direct_io.PIECE)


@pytest.fixture
def task(tmp_path: Path) -> LocalTaskDir:
    (tmp_path / layout.staged(1)).mkdir(parents=True)
    (tmp_path / layout.staged(1) / "last.pt").write_bytes(DATA)
    return LocalTaskDir(str(tmp_path))


def staged() -> StagedCheckpoint:
    file = {"path": "last.pt", "size": len(DATA), "sha256": "", "mode": 0o600}
    return StagedCheckpoint(number=1, generation=1, name="last.pt", how="sdk", files=[file])


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_transfer, "LARGE", 1)


@pytest.fixture
def transfers() -> Iterator[CheckpointTransfers]:
    found = CheckpointTransfers()
    yield found
    found.close()


def carry(
    transfers: CheckpointTransfers, task: LocalTaskDir, blobs: BlobStore, hurried: Callable[[], bool] = bool
) -> Future[tuple[str, int]]:
    """In a thread of the transfers."""
    done: Future[tuple[str, int]] = Future()

    def work() -> bool:
        try:
            done.set_result(transfers.carry(task, staged(), blobs, size=len(DATA), hurried=hurried))
        except BaseException as exc:
            done.set_exception(exc)
        return False

    transfers.add("digits-1", work)
    return done


def test_a_transfer_pauses_between_two_pieces_unless_it_is_urgent(
    task: LocalTaskDir, tmp_path: Path, transfers: CheckpointTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[bool] = []
    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", lambda self: rested.append(self._hurried()))
    hurry = iter([False, False, True])
    blobs = BlobStore(tmp_path / "blobs")
    digest, size = carry(transfers, task, blobs, lambda: next(hurry)).result(60)
    assert size == len(DATA) and blobs.verify_tree(digest) == []
    assert rested == [False, False, True]


def test_a_small_transfer_takes_no_turn(
    task: LocalTaskDir, tmp_path: Path, transfers: CheckpointTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_transfer, "LARGE", len(DATA) + 1)
    monkeypatch.setattr(checkpoint_transfer, "IdleThrottle", lambda *_: pytest.fail("it rests"))
    assert carry(transfers, task, BlobStore(tmp_path / "blobs")).result(60)[1] == len(DATA)


def test_a_transfer_is_abandoned_when_its_server_ends_and_repeated_by_the_next(
    task: LocalTaskDir, tmp_path: Path, transfers: CheckpointTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = threading.Event(), threading.Event()

    def rest(self: idle_throttle.IdleThrottle) -> None:
        begun.set()
        assert closed.wait(60)

    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", rest)
    blobs = BlobStore(tmp_path / "blobs")
    carrying = carry(transfers, task, blobs)
    assert begun.wait(60)
    transfers.close()
    closed.set()
    with pytest.raises(Abandoned):
        carrying.result(60)
    assert stored(blobs) == 0
    assert (tmp_path / layout.staged(1) / "last.pt").stat().st_size == len(DATA)
    another = CheckpointTransfers()
    digest, _ = carry(another, task, blobs).result(60)
    assert blobs.verify_tree(digest) == []
    another.close()


class Slow:
    """Transfers from slow pods; each ends when its test releases it."""

    def __init__(self, transfers: CheckpointTransfers) -> None:
        self.transfers = transfers
        self.begun: Queue[str] = Queue()
        self.end = threading.Event()

    def add(self, run: str, count: int = 1) -> None:
        for _ in range(count):
            self.transfers.add(run, partial(self._work, run))

    def _work(self, run: str) -> bool:
        self.begun.put(run)
        assert self.end.wait(60)
        return False

    def started(self, count: int) -> list[str]:
        return [self.begun.get(timeout=60) for _ in range(count)]


@pytest.fixture
def slow(transfers: CheckpointTransfers) -> Iterator[Slow]:
    found = Slow(transfers)
    yield found
    found.end.set()


def test_slow_pods_of_one_run_do_not_delay_another(slow: Slow) -> None:
    slow.add("wide", AT_ONCE + 8)
    assert slow.started(AT_ONCE) == ["wide"] * AT_ONCE
    slow.add("other", 2)
    assert slow.started(1) == ["other"]
    assert slow.begun.empty()


def test_runs_take_turns(transfers: CheckpointTransfers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_transfer, "AT_ONCE", 1)
    monkeypatch.setattr(checkpoint_transfer, "RUNS_AT_ONCE", 1)
    first = Slow(transfers)
    first.add("a")
    assert first.started(1) == ["a"]
    rest = Slow(transfers)
    rest.add("a", 3)
    rest.add("b", 2)
    rest.add("c", 1)
    rest.end.set()
    first.end.set()
    assert sorted(rest.started(3)) == ["a", "b", "c"]
    assert sorted(rest.started(3)) == ["a", "a", "b"]


def test_unfinished_work_is_queued_again(transfers: CheckpointTransfers) -> None:
    left, done = [3], threading.Event()

    def work() -> bool:
        left[0] -= 1
        if not left[0]:
            done.set()
        return bool(left[0])

    transfers.add("a", work)
    assert done.wait(60)


def test_a_wait_ends_with_the_server(transfers: CheckpointTransfers) -> None:
    transfers.close()
    with pytest.raises(Abandoned):
        transfers.wait(3600)
    transfers.add("a", lambda: pytest.fail("it never begins"))
