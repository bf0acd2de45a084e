"""What people are told of an attempt with several tasks: who is there, where, and in which state the world is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.store.rows import AttemptRow, TaskRow

Json = dict[str, Any]


def tasks_view(attempt: AttemptRow, rows: Sequence[TaskRow]) -> list[Json]:
    """The tasks as they were placed, in the order of their ranks. One that has left the world is not among them."""
    known = {row.task: row for row in rows}
    names = list(attempt.placement) or sorted(known)
    return [_task(name, attempt.placement.get(name) or {}, known.get(name)) for name in names]


def _task(name: str, place: Mapping[str, Any], row: TaskRow | None) -> Json:
    return {
        "name": name,
        "role": name.rpartition("-")[0],
        "node": place.get("node"),
        "gpus": list(place.get("gpus") or ()),
        "incarnation": place.get("incarnation", row.incarnation if row else 1),
        "generation": place.get("generation", 1),
        "phase": row.phase if row else "starting",
        "exit_code": row.exit_code if row else None,
        "usage": row.usage if row else {},
    }


def world_view(attempt: AttemptRow, tasks: Sequence[Json]) -> Json | None:
    """None: one task alone is no world."""
    if len(tasks) < 2:
        return None
    return {"size": len(tasks), "generation": attempt.generation, "text": _state(attempt.generation, tasks)}


def _state(generation: int, tasks: Sequence[Json]) -> str:
    """`world of 4, generation 3; worker-2 was replaced once`"""
    said = [f"world of {len(tasks)}, generation {generation}"]
    said += [
        f"{task['name']} was replaced {_times(task['incarnation'] - 1)}"
        for task in tasks
        if task["incarnation"] > 1
    ]
    return "; ".join(said)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
