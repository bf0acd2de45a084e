"""The results of several tasks form one whole: sharded checkpoints, outputs, logs, metrics."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.linux.direct_io import LARGE
from support import shards
from support.box import Box
from support.waiting import wait


def begin(box: Box, steps: int, pause: float = 0.5, size: int = 0) -> str:
    shutil.copy(Path(shards.__file__), box.work / "shards.py")
    job = ["python", "shards.py", str(steps), str(pause), str(size)]
    return box.submit("--workers", "2", "--retries", "1", "--", *job)


def kept(box: Box, run: str) -> list[dict[str, Any]]:
    return [row for row in box.show(run)["checkpoints"] if row["kept"]]


@pytest.mark.parametrize(
    ("victim", "size"), [("body", 0), ("launcher", 0), ("server", 0), ("launcher", LARGE), ("server", LARGE)]
)
@pytest.mark.long
def test_every_rank_finds_all_parts_of_one_step(box: Box, victim: str, size: int) -> None:
    """Large parts are transferred in parallel to other work."""
    run = begin(box, 1_000_000, pause=2.0 if size else 0.5, size=size)
    wait(lambda: kept(box, run), lambda rows: len(rows) >= 2)
    if victim == "server":
        box.kill_server()
        before = box.show(run)["checkpoints"][-1]["step"]
        wait(lambda: kept(box, run)[-1]["step"], lambda step: step > before)
    box("drill", run, "--how", "launcher" if victim == "launcher" else "process", "--task", "worker-1")
    found = wait(lambda: _found(box, run), lambda found: len(found) >= 2)
    assert {rank for rank, _, _ in found} == {"0", "1"}
    assert all(first == second for _, first, second in found), found
    box("stop", run)
    assert all(row["world_size"] == 2 for row in box.ended(run)["checkpoints"])


def _found(box: Box, run: str) -> list[tuple[str, str, str]]:
    return re.findall(r"found rank=(\d) rank0.txt=(\d+) rank1.txt=(\d+)", box("logs", run).stdout)


@pytest.mark.shared_server
def test_outputs_logs_and_metrics(box: Box) -> None:
    run = begin(box, 6, pause=0.02)
    seen = box.ended(run)
    assert seen["state"] == "succeeded", seen["reason"]
    assert seen["outputs"]["apart"] == ["rank.txt"]
    box("pull", run, "-o", "out")
    assert (box.work / "out/rank.txt").read_text() == "0" and (
        box.work / "out/task-1/rank.txt"
    ).read_text() == "1"
    said = box("logs", run).stdout.splitlines()
    assert {line.partition("]")[0] for line in said} == {"[worker-0", "[worker-1"}
    times = [line.split()[0] for line in box("logs", run, "-t").stdout.splitlines()]
    assert times == sorted(times)
    assert box("logs", run, "--task", "worker-1", "--tail", "1").stdout == "done rank=1\n"
    assert [entry["key"] for entry in box.json("metrics", run)] == ["loss"]
    assert [entry["key"] for entry in box.json("metrics", run, "--all-ranks")] == ["loss", "loss@worker-1"]
    usage = {task["name"]: task["usage"] for task in seen["attempts"][-1]["tasks"]}
    assert {name: found["step"] for name, found in usage.items()} == {"worker-0": 5, "worker-1": 5}
    assert all(found["step_seconds"] > 0 for found in usage.values())


def test_isolated_tasks_take_turns_by_the_same_lock(box: Box) -> None:
    """Launchers and the server agree by a lock on one CPU user at a time (see stoker.linux.idle_throttle)."""
    look = "import os; held = os.stat(os.environ['STOKER_TASK_DIR'] + '/.turns'); print(held.st_dev, held.st_ino)"
    run = box.submit("--workers", "2", "--framework", "none", "--", "python", "-c", look)
    assert box.ended(run)["state"] == "succeeded"
    first, second = (box("logs", run, "--task", f"worker-{index}").stdout for index in range(2))
    assert first == second and re.fullmatch(r"\d+ \d+\n", first)
