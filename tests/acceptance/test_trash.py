"""Removed runs: hidden, brought back as they were, and deleted for good."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from support.box import Box
from support.waiting import wait

pytestmark = pytest.mark.shared_server

TRAIN = """
import json, os, sys
import stoker
value = float(sys.argv[1])
stoker.report(step=1, val_acc=value)
os.makedirs(os.environ["STOKER_OUTPUT_DIR"], exist_ok=True)
with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], "model.bin"), "wb") as file:
    file.write(os.urandom(2_000_000))
print("trained", value, flush=True)
"""


def ids(runs: list[dict[str, Any]]) -> set[str]:
    return {run["id"] for run in runs}


def test_a_removed_run_comes_back_whole_and_a_purged_one_leaves_no_bytes(box: Box) -> None:
    box.write("train.py", TRAIN)
    good, bad, worst = (box.submit("train.py", value) for value in ("0.9", "0.5", "0.1"))
    for run in (good, bad, worst):
        assert box.ended(run)["state"] == "succeeded"
    live = box.submit("sh", "-c", "sleep 600")
    refused = box("rm", live, code=1)
    assert f"hint: End it first: stoker stop --wait {live}" in refused.stderr
    before = box.show(bad)
    (gone,) = box.json("rm", bad)
    assert gone["bytes"]["outputs"] == 2_000_000 and gone["bytes"]["logs"] > 0
    assert bad not in ids(box.json("ps", "-a")) and ids(box.json("ps", "--trash")) >= {bad}
    assert "was removed" in box("show", bad, code=3).stderr
    box("rm", "--undo", bad)
    assert box.show(bad) == before
    assert "trained 0.5" in box("logs", bad).stdout
    box("pull", bad)
    assert (box.work / bad / "outputs" / "model.bin").stat().st_size == 2_000_000

    kept, blob = (box.home.blobs / "objects" / stored(box, run) for run in (good, bad))
    several = ("rm", "--keep-best", "val_acc:max", good, bad, worst)
    assert "hint: Add --yes." in box(*several, code=2).stderr
    assert ids(box.json(*several, "--yes")) == {bad, worst}
    make_old(box.home.blobs)
    pruned = box.json("prune", "--yes")
    assert {bad, worst} <= set(pruned["runs"]) and pruned["bytes"] > 4_000_000
    assert kept.exists() and not blob.exists()
    assert not (box.home.runs / bad).exists() and (box.home.runs / good).exists()
    assert "no run" in box("rm", "--undo", bad, code=3).stderr
    # The ledger still names them: they are no lost runs, for which the sweep of the blobs would stop.
    assert not ids(box.client().server()["unknown"]) & {bad, worst}
    assert box.show(good)["outputs"]["bytes"] == 2_000_000
    disk = box.json("disk")
    assert disk["kinds"]["outputs"] >= 2_000_000 and disk["kinds"]["logs"] > 0 and disk["free"] > 0
    assert bad not in ids(disk["runs"])


def test_removing_releases_what_was_held_for_inspection(box: Box) -> None:
    run = box.submit("--keep-on-failure", "30m", "sh", "-c", "exit 3")
    assert box.ended(run)["state"] == "failed"
    assert (box.home.tasks / run).exists()
    box("rm", run)
    wait(lambda: (box.home.tasks / run).exists(), lambda there: not there)


def stored(box: Box, run: str) -> str:
    """The file of the run's model, beneath the objects."""
    (file,) = (file for file in box.client().files(run)["files"] if file["path"] == "model.bin")
    digest = str(file["sha256"])
    return f"{digest[:2]}/{digest[2:]}"


def make_old(directory: Path) -> None:
    """Blobs that were used within the last minute are freed later."""
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (1, 1))
