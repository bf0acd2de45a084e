"""Copies of checkpoints give way to the training, and only for as long as there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.launcher import staging
from stoker.launcher.staging import Job, Stager
from stoker.task import direct

AUTOGROUP = Path("/proc/self/autogroup")


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the kernel was told about this process's session."""
    told: list[int] = []
    monkeypatch.setattr(staging, "_weigh", lambda nice: told.append(nice) or True)
    monkeypatch.setattr(direct, "LARGE", 1000)
    return told


def job(tmp_path: Path, size: int) -> Job:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "last.bin").write_bytes(b"x" * size)
    return Job("last.bin", ["last.bin"], "sdk", str(source), str(tmp_path / "000001.tmp"), 1)


def copied(stager: Stager, job: Job) -> str:
    stager.submit(job)
    outcome = stager.next_outcome(None)
    assert outcome is not None
    return outcome.status


def test_a_large_copy_gives_way_and_a_small_one_is_over_before_it_matters(
    tmp_path: Path, weighed: list[int]
) -> None:
    stager = Stager(lambda: None)
    assert copied(stager, job(tmp_path, 999)) == "staged"
    assert weighed == []
    assert copied(stager, job(tmp_path, 1000)) == "staged"
    assert weighed == [staging.NICE, 0]
    stager.close()


def test_nobody_is_given_way_to_when_the_training_is_over(tmp_path: Path, weighed: list[int]) -> None:
    stager = Stager(lambda: None)
    stager.hurry(True)
    assert copied(stager, job(tmp_path, 5000)) == "staged"
    assert weighed == []
    stager.hurry(False)
    assert copied(stager, job(tmp_path, 5000)) == "staged"
    assert weighed == [staging.NICE, 0]
    stager.close()


def test_a_copy_under_way_hurries_from_then_on(tmp_path: Path, weighed: list[int]) -> None:
    stager = Stager(lambda: None)
    stager.submit(job(tmp_path, 10))
    stager.hurry(True)
    assert weighed == [0]
    stager.next_outcome(None)
    stager.close()


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share CPU time between sessions")
def test_the_kernel_takes_it_and_gives_it_back() -> None:
    code = """
from stoker.launcher import staging
def seen(): return open("/proc/self/autogroup").read().split()[-1]
with staging.giving_way(64 << 20):
    print(seen())
print(seen())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert done.stdout.split() in ([str(staging.NICE), "0"], ["0", "0"])


def test_without_such_a_kernel_it_is_as_if_nothing_had_been_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_weigh", lambda nice: False)
    with staging.giving_way(64 << 20):
        assert os.getpid()
