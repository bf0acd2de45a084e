"""The database of a home is lost during trainings: nothing is ended or deleted, and a backup restores it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from stoker.store.dialects import sqlite_copies as copies
from support.box import Box
from support.processes import alive
from support.waiting import wait

TRAIN = """
import json, os, sys, time
directory = os.environ["STOKER_CHECKPOINT_DIR"]
step = 0
print("pid", os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    path = os.path.join(directory, "state.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step}, file)
    os.replace(path + ".tmp", path)
    print("step", step, flush=True)
    step += 1
    time.sleep(0.05)
print("done", step, flush=True)
"""


@pytest.mark.long
def test_trainings_outlive_a_deleted_database(box: Box) -> None:
    known, newer = _two_trainings(box)
    pids = {run: box.launcher(run) for run in (known, newer)}
    kept = {path: path.read_bytes() for path in _automatic(box)}
    box.kill_server()
    _delete(box)
    for command in (["ps"], ["run", "--", "true"]):
        refused = box(*command, code=1)
        assert "is gone" in refused.stderr and "stoker backup restore" in refused.stderr
        assert "2 in its ledger" in refused.stderr and known in refused.stderr
        assert refused.stdout == ""
        box.kill_server()
    assert not box.home.database.exists()
    assert {path: path.read_bytes() for path in _automatic(box)} == kept
    box("ps", code=1)
    restored = box.json("backup", "restore")  # a server without the database is stopped without a question
    assert restored["runs"] == 1 and Path(restored["from"]) in kept
    assert [entry["id"] for entry in restored["missing"]] == [newer]
    box.until(known, "running")
    wait(lambda: [run["id"] for run in _unknown(box) if run["tasks"]] == [newer])
    assert newer in box("server", "status").stdout
    assert {run: box.launcher(run) for run in pids} == pids
    assert all(alive(pid) for pid in pids.values())
    (box.work / "end").touch()
    _is_complete(box, known, box.ended(known))
    box("backup", "forget", newer)
    wait(lambda: not alive(pids[newer]))
    wait(lambda: not _unknown(box))
    left = [path.read_bytes() for path in (box.home.tasks / newer).rglob("*") if path.is_file()]
    assert any(b"step 0" in content for content in left), "its directory stays"


def test_a_database_deleted_under_its_server_loses_nothing(box: Box) -> None:
    """The server still has the files open, so nothing is lost."""
    run = box.submit("--", "sleep", "600")
    box.until(run, "running")
    pid = box.launcher(run)
    _delete(box)
    refused = box("run", "-d", "--", "true", code=1)
    assert "the file is gone" in refused.stderr and "stoker backup restore" in refused.stderr
    wait(lambda: any(found and found.runs for found in map(copies.contents, _automatic(box))))
    restored = box.json("backup", "restore", "--stop-server")
    assert (restored["runs"], restored["missing"]) == (1, [])
    assert len(box.until(run, "running")["attempts"]) == 1 and box.launcher(run) == pid
    assert len(_automatic(box)) <= 3, "one last copy, even after many restarts of the loop"


def _two_trainings(box: Box) -> tuple[str, str]:
    """One run that is in the newest backup of the database, and one that is not."""
    box.write("train.py", TRAIN)
    box.home.root.mkdir(parents=True)
    known = box.submit("train.py", str(box.work / "end"))
    box.until(known, "running")
    box("server", "stop")
    box("server", "start")  # makes a backup
    wait(lambda: [path for path in _automatic(box) if (found := copies.contents(path)) and found.runs])
    newer = box.submit("train.py", str(box.work / "never"))
    box.until(newer, "running")
    wait(lambda: [c for c in box.show(known)["checkpoints"] if c["kept"]])
    return known, newer


def _is_complete(box: Box, run: str, shown: dict[str, Any]) -> None:
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 1), shown
    lines = box("logs", run).stdout.splitlines()
    steps = int(lines[-1].split()[1])
    assert lines == [lines[0], *(f"step {step}" for step in range(steps)), f"done {steps}"]
    out = box.work / "out"
    box("pull", run, "--what", "checkpoints", "-o", str(out))
    assert {"step": steps - 1} in [json.loads(path.read_text()) for path in out.rglob("state.json")]


def test_beginning_anew_moves_everything_aside(box: Box) -> None:
    run = box.submit("--", "sleep", "600")
    box.until(run, "running")
    pid = box.launcher(run)
    refused = box("server", "start", "--anew", code=1)
    assert "sound" in refused.stderr or "a server runs" in refused.stderr
    box.kill_server()
    _delete(box)
    shutil.rmtree(box.home.backups)
    refused = box("ps", code=1)
    assert (
        "There is no copy in this home" in refused.stderr and "stoker server start --anew" in refused.stderr
    )
    refused = box("server", "start", "--anew", code=1)
    assert f"{run} (pid {pid})" in refused.stderr and alive(pid)
    os.kill(pid, signal.SIGTERM)  # as the hint says
    wait(lambda: box("server", "start", "--anew", code=None), lambda done: done.returncode == 0)
    wait(lambda: not alive(pid))
    assert box.json("ps", "-a") == []
    (aside,) = box.home.root.glob("lost-*")
    assert run in (aside / "ledger.jsonl").read_text() and (aside / "tasks" / run).is_dir()
    box("run", "--", "true")


def _automatic(box: Box) -> list[Path]:
    return sorted((box.home.backups / "auto").glob("*.db"))


def _unknown(box: Box) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = box.client().server()["unknown"]
    return found


def _delete(box: Box) -> None:
    for path in box.home.root.glob("stoker.db*"):
        path.unlink()
