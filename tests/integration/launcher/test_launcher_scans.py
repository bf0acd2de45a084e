"""A launcher whose checkpoints other tasks need reports its finished scans and the files being written."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]


def test_finished_scans_are_reported_while_nothing_changes(mode: Any, task: Make) -> None:
    it = task(sample_every=3600.0)
    mode.start(it)
    it.sh("sleep 1000", scan_every=0.05)
    first = it.phase("running").scans
    mode.wait_for(lambda: it.near.status().scans > first + 3, "reported scans")
    it.order("stop", kill=True)
    it.ending(1)
    ended = it.phase("ended")
    assert ended.scans > first and ended.pending == []


def test_files_being_written_are_reported(mode: Any, task: Make) -> None:
    it = task(sample_every=3600.0)
    mode.start(it)
    it.sh('exec 3> "$STOKER_CHECKPOINT_DIR/step-7.bin"; echo half >&3; sleep 1000', scan_every=0.05)
    it.phase("running")
    mode.wait_for(lambda: it.near.status().pending == ["step-7.bin"], "a checkpoint that is being written")
    assert it.journal("checkpoint") == []
