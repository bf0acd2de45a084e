"""Whether a run hangs: all tasks of its world are silent.

A launcher reports only its own task. A single silent task is no sign: in most trainings only the first rank prints and
reports, MPI workers print through mpirun, and parameter servers print nothing. Tasks that are replaced alone
(`on_loss: task`) do not count if others form a world.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stoker.control.ingest.journal_reader import Intake
from stoker.control.policy.outcome import Outcome
from stoker.control.state import LiveRun, LiveTask
from stoker.spec.states import Cause
from stoker.store.rows import AddEvent, Change, EventRow

MOST = 16
"""Tasks whose hang becomes an event of its own, at most."""


def note(live: LiveRun, found: Mapping[str, Intake]) -> list[Change]:
    """Take in what launchers reported. A hang is recorded once; if the job asks for it, the world starts again."""
    for name, intake in found.items():
        if intake.hung is not None and name in live.tasks:
            live.tasks[name].hung = intake.hung
    world = [task for task in live.tasks.values() if task.part.on_loss == "world"] or list(
        live.tasks.values()
    )
    running = [task for task in world if task.verdict is None and not task.joining]
    if not running or not all(task.hung for task in running):
        live.hung = None
        return []
    if live.hung is not None:
        return []
    live.hung = _text(running[0])
    if live.job.hang is not None and live.job.hang.then == "restart" and live.reforming is None:
        live.reforming = Outcome(Cause.HANG, None, live.hung, {"message": live.hung})
    return [_event(live.id, task) for task in running[:MOST]]


def _event(run: str, task: LiveTask) -> AddEvent:
    how = str(task.hung.get("how"))
    stacks = "" if how == "none" else f"; its stacks are in its log (by {how})"
    data: dict[str, Any] = {"task": task.name, "stacks": task.hung.get("stacks"), "how": how}
    return AddEvent(EventRow(run, time.time(), "hang", _text(task) + stacks, data))


def _text(task: LiveTask) -> str:
    return f"{task.name} said and did nothing for {task.hung.get('seconds', 0):.0f} s"
