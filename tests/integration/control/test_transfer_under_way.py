"""A run during a slow transfer of one of its checkpoints."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.control.ingest import checkpoint_transfer
from stoker.task import layout
from stoker.task.formats import StagedCheckpoint
from stoker.task.local_directory import LocalTaskDir
from support.control.rigs import Rig
from support.waiting import wait

DATA = b"weights" * 10


def stage(directory: Path) -> None:
    """Stage a checkpoint as a launcher does."""
    place = directory / layout.staged(1)
    place.mkdir(parents=True)
    (place / "last.pt").write_bytes(DATA)
    file = {"path": "last.pt", "size": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest(), "mode": 420}
    staged = StagedCheckpoint(
        number=1, generation=1, name="last.pt", how="sdk", files=[file], step=7, metrics={}, at=50.0, written_at=50.0
    )  # fmt: skip
    with open(directory / layout.JOURNAL, "a") as journal:
        journal.write(json.dumps({"k": "checkpoint", **staged.to_json()}) + "\n")


def test_it_reports_and_is_stopped_meanwhile(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint_transfer.carry_checkpoint
    begun, may_end = threading.Event(), threading.Event()

    def slowly(*args: Any, **named: Any) -> tuple[str, int]:
        begun.set()
        assert may_end.wait(120)
        return real(*args, **named)

    monkeypatch.setattr(checkpoint_transfer, "carry_checkpoint", slowly)
    run = rig.submit("hang").id
    rig.until(run, "running")
    directory = rig.settings.home.tasks / run / "1" / "worker-0"
    stage(directory)
    rig.engine.notice(run, 1, "worker-0")
    try:
        wait(begun.is_set)
        report = directory / layout.METRICS / "1-7-ab.jsonl"
        report.write_text(json.dumps({"step": 8, "t": 60.0, "v": {"late": 0.5}}) + "\n")
        rig.engine.notice(run, 1, "worker-0")
        wait(lambda: rig.store.metric_points(run, "late"))
        assert not rig.store.checkpoints(run)
        rig.controller.stop_run(run, kill=False, by="ada")
        wait(lambda: (order := LocalTaskDir(str(directory)).order()) is not None and order.verb == "stop")
    finally:
        may_end.set()
    assert rig.ended(run).state == "stopped"
    (kept,) = rig.store.checkpoints(run)
    assert (kept.name, kept.step, kept.metrics) == ("last.pt", 7, {})
    assert rig.blobs.verify_tree(kept.digest) == []
