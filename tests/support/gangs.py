"""Starts the training of `worlds`, and checks its output for correctness."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from support.box import Box
from support.waiting import wait
from support.worlds import expected

STEPS = 60
WORLDS = Path(__file__).with_name("worlds.py")
"""The program of the training."""


def begin(box: Box, *flags: str, steps: int = STEPS, every: int = 5, pause: float = 0.05) -> str:
    shutil.copy(WORLDS, box.work)
    return box.submit(*flags, "--", "python3", "worlds.py", str(steps), str(every), str(pause))


def lines(box: Box, run: str, *flags: str) -> list[str]:
    return box("logs", run, *flags).stdout.splitlines()


def starts(box: Box, run: str) -> list[dict[str, int]]:
    """The printed facts of every body that started."""
    found = [line.partition("start ")[2] for line in lines(box, run) if "start rank=" in line]
    return [{key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)} for line in found]


def check(box: Box, run: str, workers: int, steps: int = STEPS) -> dict[str, Any]:
    """The run succeeded with the value of an undisturbed training, and no rank started twice in a world."""
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


def sizes(box: Box, run: str) -> dict[int, int]:
    """The size of each generation's world. Every member started, and all began with the same step."""
    bodies: dict[int, list[dict[str, int]]] = {}
    for body in starts(box, run):
        bodies.setdefault(body["generation"], []).append(body)
    for generation, world in bodies.items():
        assert len({(body["size"], body["step"]) for body in world}) == 1, world
        assert sorted(body["rank"] for body in world) == [*range(world[0]["size"])], world
        assert generation == 1 or world[0]["step"] > 0, "it went on from a checkpoint"
    return {generation: world[0]["size"] for generation, world in sorted(bodies.items())}


def trains(box: Box, run: str, number: int, size: int) -> None:
    """The world of this generation has so many members, and has a checkpoint of its own."""

    def look() -> tuple[int, int, int]:
        seen = box.show(run)
        now = seen["attempts"][-1]["generation"]
        begun = [body for body in starts(box, run) if (body["generation"], body["size"]) == (now, size)]
        return now, len(begun), sum(row["generation"] == now for row in seen["checkpoints"])

    wait(look, lambda seen: seen[:2] == (number, size) and seen[2] > 0, limit=300)


def checkpointed(box: Box, run: str, least: int = 1) -> None:
    wait(lambda: len(box.show(run)["checkpoints"]), lambda count: count >= least)
