"""Where the tasks of an attempt are, as recorded in its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

VERSION = 1
"""Version of the record. Records without one are older and have the same fields."""


@dataclass(frozen=True, slots=True)
class TaskPlacement:
    """A task's share of a node, and what the database knows of the task there."""

    node: str | None = None
    gpus: tuple[str, ...] = ()
    cpu: float | None = None
    memory: int | None = None
    isolation: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0
    """The task's number in the scheduler."""
    ports: tuple[int, ...] = ()
    """Ports at which the other tasks reach it, where tasks share the ports of a machine."""
    incarnation: int = 1
    generation: int = 1
    """Generation of its newest body, or of the one that it starts next."""
    ordered: int | None = None
    """The incarnation that last got an order. None: recorded by a version that did not store it."""
    moved: int = 0
    """How often its ports were moved because an abandoned body may still listen on them."""
    given_up: bool = False
    """It replaces an incarnation that was given up without proof of its end."""
    joining: bool = False
    """It is not in the world yet; the next generation includes it."""
    leaving: bool = False
    """The next generation no longer includes it."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"v": VERSION}
        for name, default in _DEFAULTS:
            value = getattr(self, name)
            if value != default:
                found[name] = list(value) if isinstance(value, tuple) else value
        return found

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> TaskPlacement:
        """Raises ValueError for a record of a newer version."""
        version = record.get("v", VERSION)
        if version != VERSION:
            raise ValueError(f"a placement of version {version}; this server reads version {VERSION}")
        known = {key: value for key, value in record.items() if key in _NAMES}
        for name in ("gpus", "ports"):
            if name in known:
                known[name] = tuple(known[name] or ())
        return TaskPlacement(**known)


_DEFAULTS = tuple((name, getattr(TaskPlacement(), name)) for name in (f.name for f in fields(TaskPlacement)))
_NAMES = frozenset(name for name, _ in _DEFAULTS)


def encode(placement: Mapping[str, TaskPlacement]) -> dict[str, Any]:
    return {task: place.to_json() for task, place in placement.items()}


def decode(record: Mapping[str, Any]) -> dict[str, TaskPlacement]:
    return {task: TaskPlacement.from_json(place) for task, place in record.items()}
