"""A run through `stoker run` on this machine, with a member killed in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from box import Box, wait

LINE = re.compile(
    r"(step|finished) (\d+) rank (\d+) of (\d+)(?: total (\d+))?[^|\n]*\| generation (\d+) pid (\d+)"
)
STEPS = 40
LIMIT = 400.0


@dataclass(frozen=True)
class Said:
    what: str
    step: int
    rank: int
    world: int
    total: int | None
    generation: int
    pid: int


class Journey:
    """One run."""

    def __init__(self, box: Box, *arguments: str) -> None:
        self.box = box
        self.run = box.submit(*arguments)

    def text(self) -> str:
        return self.box("logs", self.run).stdout

    def said(self) -> list[Said]:
        found = []
        for what, step, rank, world, total, generation, pid in LINE.findall(self.text()):
            number = int(total) if total else None
            found.append(Said(what, int(step), int(rank), int(world), number, int(generation), int(pid)))
        return found

    def reached(self, step: int) -> None:
        """It has done so many steps, and the server has a checkpoint of it."""

        def there() -> bool:
            state = self.box.show(self.run)["state"]
            if state in ("failed", "stopped", "succeeded"):
                raise AssertionError(f"{state} before step {step}\n{self.report()}")
            time.sleep(0.1)
            return any(int(found) >= step for found in re.findall(r"\bstep (\d+) rank", self._written()))

        wait(there, limit=LIMIT)
        wait(lambda: self.box.show(self.run)["checkpoints"], limit=LIMIT)

    def _written(self) -> str:
        """The log as the launchers write it: looked at often, so without starting anything."""
        paths = (self.box.home.tasks / self.run).glob("*/*/log/*.log")
        return "".join(path.read_text(errors="replace") for path in paths)

    def directory(self, task: str) -> Path:
        attempts = sorted((self.box.home.tasks / self.run).iterdir(), key=lambda path: int(path.name))
        return attempts[-1] / task

    def kill(self, task: str, number: int = signal.SIGKILL) -> None:
        """Every process of the task's body, wherever it is: as the kernel does it when memory runs out."""
        killed = [os.kill(pid, number) for pid in processes(self.directory(task))]
        assert killed, f"{task} has no process"

    def succeeded(self, limit: float = LIMIT) -> dict[str, Any]:
        ended = self.box.ended(self.run, limit)
        assert ended["state"] == "succeeded", self.report()
        return ended

    def every_step_once(self, world: int, adding: int | None = None) -> None:
        """The sum of all steps is what it is only when none was left out or counted twice."""
        adding = adding or world
        expected = sum(step * adding * (adding + 1) // 2 for step in range(1, STEPS + 1))
        finished = [said for said in self.said() if said.what == "finished"]
        assert [
            (said.rank, said.step, said.total) for said in sorted(finished, key=lambda said: said.rank)
        ] == [(rank, STEPS, expected) for rank in range(world)], self.report()

    def no_rank_twice(self, world: int) -> None:
        """In each generation every rank is one process, and they agree on how many there are."""
        said = self.said()
        for generation in {one.generation for one in said}:
            ours = [one for one in said if one.generation == generation]
            assert {one.world for one in ours} == {world}, self.report()
            pids = {rank: {one.pid for one in ours if one.rank == rank} for rank in range(world)}
            assert all(len(found) <= 1 for found in pids.values()), self.report()
            assert {one.rank for one in ours} <= set(range(world)), self.report()

    def went_on(self) -> None:
        """The second generation began where the first had kept its state, not at the beginning."""
        said = self.said()
        generations = sorted({one.generation for one in said})
        assert len(generations) == 2, self.report()
        before = max(one.step for one in said if one.generation == generations[0])
        after = min(one.step for one in said if one.generation == generations[1])
        assert 1 < after <= before + 1, self.report()

    def report(self) -> str:
        return f"{json.dumps(self.box.show(self.run), indent=1)[-6000:]}\n{self.text()[-8000:]}\n{self.box.server_log()}"


def processes(directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"STOKER_TASK_DIR={directory}\0".encode() in environ:
                found.append(int(entry.name))
    return found
