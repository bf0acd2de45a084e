"""A run of the scripts in tests/frameworks with a member killed in the middle, and checks of its log.

The same on this machine and in pods: only the kill and the frequent reading of the log differ.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.client.local import connect
from support.box import Box
from support.waiting import wait

SCRIPTS = Path(__file__).parents[1] / "frameworks" / "scripts"
LINE = re.compile(
    r"(step|finished) (\d+) rank (\d+) of (\d+)(?: total (\d+))?[^|\n]*\| generation (\d+) pid (\d+ on \S+)"
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
    process: str
    """`17 on digits-7f3k-worker-0`: the same pid may occur in several pods."""


class Journey:
    """One run."""

    def __init__(self, box: Box, *arguments: str) -> None:
        self.box = box
        self.run = box.submit(*arguments)

    def text(self) -> str:
        return self.box("logs", self.run).stdout

    def said(self) -> list[Said]:
        found = []
        for what, step, rank, world, total, generation, process in LINE.findall(self.text()):
            number = int(total) if total else None
            found.append(Said(what, int(step), int(rank), int(world), number, int(generation), process))
        return found

    def reached(self, step: int) -> None:
        """Wait until the run has done so many steps, and the server has a checkpoint of it."""

        def there() -> bool:
            state = self.box.show(self.run)["state"]
            if state in ("failed", "stopped", "succeeded"):
                raise AssertionError(f"{state} before step {step}\n{self.report()}")
            time.sleep(0.1)
            return any(int(found) >= step for found in re.findall(r"\bstep (\d+) rank", self._written()))

        wait(there, limit=LIMIT)
        wait(lambda: self.box.show(self.run)["checkpoints"], limit=LIMIT)

    def _written(self) -> str:
        """The log. It is read often, so no process is started for it."""
        with connect(self.box.home) as client:
            return "\n".join(record.get("text", "") for record in client.logs(self.run))

    def kill(self, task: str) -> None:
        """Kill the task's processes."""
        self.box.client().drill(self.run, "process", task)

    def succeeded(self, limit: float = LIMIT) -> dict[str, Any]:
        ended = self.box.ended(self.run, limit)
        assert ended["state"] == "succeeded", self.report()
        return ended

    def every_step_once(self, world: int, adding: int | None = None) -> None:
        """The total of all steps is right only if each step counted exactly once."""
        adding = adding or world
        expected = sum(step * adding * (adding + 1) // 2 for step in range(1, STEPS + 1))
        finished = [said for said in self.said() if said.what == "finished"]
        assert [
            (said.rank, said.step, said.total) for said in sorted(finished, key=lambda said: said.rank)
        ] == [(rank, STEPS, expected) for rank in range(world)], self.report()

    def no_rank_twice(self, world: int) -> None:
        """In each generation every rank is one process, and all agree on the size of the world."""
        said = self.said()
        for generation in {one.generation for one in said}:
            ours = [one for one in said if one.generation == generation]
            assert {one.world for one in ours} == {world}, self.report()
            found = {rank: {one.process for one in ours if one.rank == rank} for rank in range(world)}
            assert all(len(processes) <= 1 for processes in found.values()), self.report()
            assert {one.rank for one in ours} <= set(range(world)), self.report()

    def went_on(self) -> None:
        """The second generation resumed from the state of the first, not from the beginning."""
        said = self.said()
        generations = sorted({one.generation for one in said})
        assert len(generations) == 2, self.report()
        before = max(one.step for one in said if one.generation == generations[0])
        after = min(one.step for one in said if one.generation == generations[1])
        assert 1 < after <= before + 1, self.report()

    def report(self) -> str:
        return f"{json.dumps(self.box.show(self.run), indent=1)[-6000:]}\n{self.text()[-8000:]}\n{self.box.server_log()}"
