"""Where the tasks of an attempt are, as its row records it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

VERSION = 1
"""Of the record. Records without a version were written before there was one; their fields are the same."""


@dataclass(frozen=True, slots=True)
class TaskPlacement:
    """A task's share of a node, and what the database knows of the task there."""

    node: str | None = None
    gpus: tuple[str, ...] = ()
    cpu: float | None = None
    memory: int | None = None
    isolation: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0
    """By which the queue knows the task."""
    ports: tuple[int, ...] = ()
    """At which the other tasks reach it, where tasks share the ports of a machine."""
    incarnation: int = 1
    generation: int = 1
    """Of its newest body, or of the one that it is to start next."""
    ordered: int | None = None
    """The incarnation that had an order last. None: recorded by a version that did not say so."""
    moved: int = 0
    """How often its ports were moved, because a body that was given up may still listen on them."""
    given_up: bool = False
    """It stands in for an incarnation that was given up without proof of its end."""
    joining: bool = False
    """It is not part of the world yet: the next generation has it."""
    leaving: bool = False
    """The next generation does not have it."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"v": VERSION}
        for name, default in _DEFAULTS:
            value = getattr(self, name)
            if value != default:
                found[name] = list(value) if isinstance(value, tuple) else value
        return found

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> TaskPlacement:
        """ValueError: it was written by a newer version."""
        version = record.get("v", VERSION)
        if version != VERSION:
            raise ValueError(f"a placement of version {version}, and this server reads version {VERSION}")
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
