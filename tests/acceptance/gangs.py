"""Starting the training of `worlds`, and telling from what it printed whether everything went as it must."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from box import Box, wait
from worlds import expected

STEPS = 60


def begin(box: Box, *flags: str, steps: int = STEPS, every: int = 5, pause: float = 0.05) -> str:
    shutil.copy(Path(__file__).with_name("worlds.py"), box.work / "worlds.py")
    return box.submit(*flags, "--", "python3", "worlds.py", str(steps), str(every), str(pause))


def lines(box: Box, run: str) -> list[str]:
    return box("logs", run).stdout.splitlines()


def starts(box: Box, run: str) -> list[dict[str, int]]:
    """Every body that ever started, as it said itself."""
    found = [line.partition("start ")[2] for line in lines(box, run) if "start rank=" in line]
    return [{key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)} for line in found]


def check(box: Box, run: str, workers: int, steps: int = STEPS) -> dict[str, Any]:
    """It succeeded, with the value that an undisturbed training has, and no rank was there twice in any world."""
    seen = box.ended(run)
    assert seen["state"] == "succeeded", seen["reason"]
    finals = [line for line in lines(box, run) if "final rank=" in line]
    assert len(finals) == workers
    assert all(f"step={steps} state={expected(steps)}" in line for line in finals), finals
    bodies = [(body["attempt"], body["generation"], body["rank"]) for body in starts(box, run)]
    assert len(bodies) == len(set(bodies))
    return seen


def generation(box: Box, run: str) -> int:
    return int(box.show(run)["attempts"][-1]["generation"])


def checkpointed(box: Box, run: str, least: int = 1) -> None:
    wait(lambda: len(box.show(run)["checkpoints"]), lambda count: count >= least)
