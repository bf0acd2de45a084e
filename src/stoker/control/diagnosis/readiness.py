"""How many tasks of a run are up, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.control.fleet import Wait
from stoker.control.state import LiveRun, LiveTask

_NAMED = 3
"""Tasks named one by one; further ones are only counted."""


@dataclass(frozen=True)
class Absent:
    """A task that is not up."""

    task: str
    why: str
    """The engine's reason; empty: none yet."""
    wait: Wait | None = None


@dataclass(frozen=True)
class Readiness:
    """Which of the wanted tasks are up."""

    size: int
    absent: tuple[Absent, ...] = ()
    generation: int = 1
    started: bool = True
    """Every task was ordered to run."""
    joining: tuple[str, ...] = ()
    """Tasks that are starting for the next generation. Not counted."""

    @property
    def up(self) -> int:
        return self.size - len(self.absent)

    @property
    def complete(self) -> bool:
        return not self.absent

    def text(self) -> str:
        """`3 of 4 tasks up; worker-3: pulling image`"""
        counts = f"{self.up} of {self.size} tasks up"
        named = self.absent[:_NAMED]
        reasons = [f"{one.task}: {one.why or 'not there yet'}" for one in named]
        if len({one.why for one in named}) == 1 and len(self.absent) > 1:
            names = ", ".join(one.task for one in named)
            reasons = [f"{names}: {named[0].why or 'not there yet'}"]
        if len(self.absent) > _NAMED:
            reasons.append(f"and {len(self.absent) - _NAMED} more")
        return "; ".join([counts, *reasons])


def readiness_of(live: LiveRun) -> Readiness | None:
    """Readiness of the current attempt. None: there is no attempt, or it has only one task."""
    if live.attempt is None or len(live.tasks) < 2:
        return None
    members = [task for task in live.tasks.values() if not task.joining]
    return Readiness(
        size=len(members),
        absent=tuple(Absent(task.name, _why(task), task.wait) for task in members if not task.up),
        generation=live.attempt.generation,
        started=all(task.ordered for task in members),
        joining=tuple(task.name for task in live.tasks.values() if task.joining),
    )


def _why(task: LiveTask) -> str:
    if task.gone is not None:
        return f"lost ({task.gone})"
    return task.wait.text if task.wait is not None else ""
