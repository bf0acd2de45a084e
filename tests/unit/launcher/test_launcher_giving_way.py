"""Copies of checkpoints give way to the training while it runs."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from pathlib import Path

import pytest

from stoker.launcher.checkpoints import stager
from stoker.launcher.checkpoints.stager import Stager, StagingJob, StagingOutcome
from stoker.linux import direct_io, idle_throttle


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every pause: whether the copy was urgent."""
    told: list[bool] = []
    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", lambda self: told.append(self._hurried()))
    monkeypatch.setattr(direct_io, "LARGE", 100_000)
    return told


def job(tmp_path: Path, data: bytes, **more: bool) -> StagingJob:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "last.bin").write_bytes(data)
    return StagingJob("last.bin", ["last.bin"], "sdk", str(source), str(tmp_path / "000001.tmp"), 1, **more)


def archive(size: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("data", bytes(size))
    return file.getvalue()


def copied(stager: Stager, job: StagingJob) -> StagingOutcome:
    stager.submit(job)
    outcome = stager.next_outcome(None)
    assert outcome is not None
    return outcome


def test_a_large_copy_gives_way_and_a_small_one_does_not(tmp_path: Path, paused: list[bool]) -> None:
    stager = Stager(lambda: None)
    assert copied(stager, job(tmp_path, b"x" * 99_999)).status == "staged"
    assert paused == []
    assert copied(stager, job(tmp_path, b"x" * 100_000)).status == "staged"
    assert set(paused) == {False}
    stager.close()


def test_it_also_gives_way_while_the_copy_is_verified(tmp_path: Path, paused: list[bool]) -> None:
    stager = Stager(lambda: None)
    copied(stager, job(tmp_path, b"x" * 3_000_000))
    unknown = len(paused)
    assert copied(stager, job(tmp_path, archive(3_000_000))).status == "staged"
    assert len(paused) > 2 * unknown + 2, "a window of a MiB at a time"
    stager.close()


def test_after_the_training_copies_do_not_give_way(tmp_path: Path, paused: list[bool]) -> None:
    stager = Stager(lambda: None)
    stager.hurry(True)
    assert copied(stager, job(tmp_path, b"x" * 500_000)).status == "staged"
    assert set(paused) == {True}
    paused.clear()
    stager.hurry(False)
    assert copied(stager, job(tmp_path, b"y" * 500_000)).status == "staged"
    assert set(paused) == {False}
    stager.close()


def test_a_running_copy_becomes_urgent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    begun, told = threading.Event(), threading.Event()

    def pause(self: idle_throttle.IdleThrottle) -> None:
        seen.append(self._hurried())
        begun.set()
        told.wait(60)

    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", pause)
    monkeypatch.setattr(direct_io, "LARGE", 1)
    stager = Stager(lambda: None)
    stager.submit(job(tmp_path, bytes(2 * direct_io.PIECE)))
    assert begun.wait(60)
    stager.hurry(True)
    told.set()
    assert stager.next_outcome(None) is not None
    assert not seen[0] and all(seen[1:]) and len(seen) > 1
    stager.close()


@pytest.mark.parametrize("size", [99_999, 100_000])
@pytest.mark.parametrize("hashed", [True, False])
def test_large_files_are_hashed_on_request(
    tmp_path: Path, paused: list[bool], size: int, hashed: bool
) -> None:
    data = b"x" * size
    first = stager.stage(job(tmp_path, data, hashed=hashed))
    expected = hashlib.sha256(data).hexdigest() if hashed or size < direct_io.LARGE else ""
    assert [file["sha256"] for file in first.files] == [expected]
    assert (tmp_path / "000001.tmp" / "last.bin").read_bytes() == data
    again = job(tmp_path, data, hashed=hashed)
    again.known = first.content
    assert stager.stage(again).status == ("same" if expected else "staged"), "without a hash it is not known"
    second = job(tmp_path, b"y" * size, hashed=hashed)
    second.known = first.content
    assert stager.stage(second).status == "staged"


def test_an_impatient_copy_is_urgent(tmp_path: Path, paused: list[bool]) -> None:
    stager = Stager(lambda: None)
    assert copied(stager, job(tmp_path, b"x" * 500_000, patient=False)).status == "staged"
    assert set(paused) == {True}
    stager.close()


def test_a_copy_before_others_is_urgent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    begun, another = threading.Event(), threading.Event()

    def pause(self: idle_throttle.IdleThrottle) -> None:
        begun.set()
        assert another.wait(60)
        seen.append(self._hurried())

    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", pause)
    monkeypatch.setattr(direct_io, "LARGE", 1)
    stager = Stager(lambda: None)
    stager.submit(job(tmp_path, b"x" * 1000))
    assert begun.wait(60)
    stager.submit(job(tmp_path, b"x" * 1000))
    another.set()
    while stager.waiting:
        stager.next_outcome(None)
    assert seen[0]
    stager.close()


def test_pauses_do_not_count_as_copying_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(self: idle_throttle.IdleThrottle) -> None:
        self.rested += 1000.0

    monkeypatch.setattr(idle_throttle.IdleThrottle, "pause", pause)
    monkeypatch.setattr(direct_io, "LARGE", 1)
    stager = Stager(lambda: None)
    assert copied(stager, job(tmp_path, b"x" * 1000)).seconds < 0
    stager.close()


def test_any_error_of_a_copy_is_reported_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise IndexError("no such member")

    copies = Stager(lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(stager.verify, "verify_unit", broken)
        outcome = copied(copies, job(tmp_path, b"x"))
    assert (outcome.status, outcome.reason) == ("failed", "cannot copy last.bin: IndexError: no such member")
    assert not (tmp_path / "000001.tmp").exists()
    assert copied(copies, job(tmp_path, b"x")).status == "staged"
    copies.close()
