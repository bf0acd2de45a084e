"""How the API shows an attempt with several tasks: its tasks, their nodes and the state of the world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.store.placement import TaskPlacement
from stoker.store.rows import AttemptRow, TaskRow

Json = dict[str, Any]


def tasks_view(attempt: AttemptRow, rows: Sequence[TaskRow]) -> list[Json]:
    """The tasks as they were placed, in the order of their ranks. Tasks that have left the world are not included."""
    known = {row.task: row for row in rows}
    names = list(attempt.placement) or sorted(known)
    roles = list(dict.fromkeys(_role(name) for name in names))
    names.sort(
        key=lambda name: (roles.index(_role(name)), _index(name))
    )  # tasks that joined later were placed last
    over = attempt.state == "ended"
    return [_task(name, attempt.placement.get(name), known.get(name), over) for name in names]


def _task(name: str, known: TaskPlacement | None, row: TaskRow | None, over: bool) -> Json:
    place = known or TaskPlacement()
    if row is not None and row.incarnation < place.incarnation:
        row = None  # the row of its predecessor
    return {
        "name": name,
        "role": _role(name),
        "node": place.node,
        "gpus": list(place.gpus),
        "incarnation": place.incarnation if known or row is None else row.incarnation,
        "generation": place.generation,
        "phase": "ended" if over else _phase(place, row),  # a vanished task last reported another phase
        "exit_code": row.exit_code if row else None,
        "usage": row.usage if row else {},
    }


def _role(name: str) -> str:
    return name.rpartition("-")[0]


def _index(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _phase(place: TaskPlacement, row: TaskRow | None) -> str:
    """The phase that the launcher reports; of tasks that join or leave, the server's."""
    if place.joining:
        return "joining"
    if place.leaving and (row is None or row.phase != "ended"):
        return "leaving"
    return row.phase if row else "starting"


def world_view(attempt: AttemptRow, tasks: Sequence[Json], *, elastic: bool = False) -> Json | None:
    """The world of the attempt. None: a single task is no world."""
    if len(tasks) < 2:
        return None
    members = [task for task in tasks if task["phase"] != "joining"]
    return {
        "size": len(members),
        "generation": attempt.generation,
        "text": _state(attempt.generation, tasks, len(members), elastic),
    }


def _state(generation: int, tasks: Sequence[Json], size: int, elastic: bool) -> str:
    """`world of 4, generation 3; worker-2 was replaced once`. In an elastic world tasks may also have left and come
    back."""
    parts = [f"world of {size}, generation {generation}"]
    for phase, verb in (("joining", "join"), ("leaving", "leave")):
        names = [task["name"] for task in tasks if task["phase"] == phase]
        if names:
            parts.append(f"{', '.join(names)} will {verb}")
    for task in tasks:
        if (again := task["incarnation"] - 1) > 0:
            verb = "came back" if elastic else "was replaced"
            parts.append(f"{task['name']} {verb} {_times(again)}")
    return "; ".join(parts)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
