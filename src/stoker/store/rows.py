"""What the store keeps, as plain dataclasses, and the changes that can be asked of it.

Control gathers everything one pass decided into a list of changes and applies it in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.store.placement import TaskPlacement

Json = dict[str, Any]


@dataclass(frozen=True)
class NewRun:
    """A submission. `key` makes it idempotent: the same key gives the same run, once."""

    key: str
    name: str
    job: Json
    command: list[str]
    priority: int = 0
    project: str = "default"
    user: str = ""
    tags: tuple[str, ...] = ()
    code: str | None = None
    record: Json = field(default_factory=dict)
    fingerprint: str = ""
    """Hash of the whole submission: the same key with another one is a Conflict."""


@dataclass(frozen=True)
class RunRow:
    id: str
    seq: int
    """Order of submission, unique over the store."""
    key: str
    name: str
    project: str
    user: str
    state: str
    desired: str
    """run | stop | kill | suspend: what people want; only the interface writes it (and resume resets it)."""
    priority: int
    tags: tuple[str, ...]
    job: Json
    command: list[str]
    code: str | None
    record: Json
    """Empty in lists that were asked for without records."""
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    cause: str | None = None
    reason: str = ""
    attempt: int = 0
    """Number of the newest attempt; 0 before the first."""
    failures: int = 0
    """Attempts that spent the user's retries since the last submit or resume."""
    faults: int = 0
    """Attempts lost in a row through no fault of the user's."""
    not_before: float = 0.0
    """Wall-clock time before which it is not queued again (backoff)."""
    outputs: Json | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttemptRow:
    run: str
    number: int
    generation: int = 1
    state: str = "starting"
    """starting | running | stopping | ended"""
    cause: str | None = None
    evidence: Json = field(default_factory=dict)
    exit_code: int | None = None
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    engine: str = "local"
    handle: Json = field(default_factory=dict)
    placement: Mapping[str, TaskPlacement] = field(default_factory=dict)
    """By task."""
    order_seq: int = 0
    resumed_from: str | None = None
    usage: Json = field(default_factory=dict)
    removed: bool = False
    """What the engine held of it has been deleted."""


@dataclass(frozen=True)
class TaskRow:
    run: str
    attempt: int
    task: str
    incarnation: int = 1
    phase: str = "starting"
    exit_code: int | None = None
    usage: Json = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointRow:
    id: str
    run: str
    attempt: int
    generation: int
    name: str
    digest: str
    """Tree of blobs."""
    size: int
    how: str
    created_at: float
    written_at: float = 0.0
    step: int | None = None
    metrics: Json = field(default_factory=dict)
    kept: bool = True
    """False once retention let its bytes go; the row stays."""
    world_size: int | None = None
    """How many trained when it was written; None: nobody counted, there was one task."""
    seq: int = 0
    """Order within the store; set by it."""


@dataclass(frozen=True)
class PartRow:
    """What one task wrote of a checkpoint that others may have parts of too."""

    run: str
    attempt: int
    generation: int
    """Of the task's body. A number is used once in a task directory, and another directory means another generation."""
    task: str
    number: int
    name: str
    digest: str
    """Tree of blobs."""
    size: int
    how: str
    created_at: float
    written_at: float = 0.0
    step: int | None = None
    metrics: Json = field(default_factory=dict)
    checkpoint: str | None = None
    """The complete checkpoint that it went into."""


@dataclass(frozen=True)
class EventRow:
    run: str
    t: float
    kind: str
    """queued starting running stopping ended checkpoint warning resumed drill ..."""
    text: str
    data: Json = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True)
class ClusterRow:
    """Somewhere that tasks can run, as an administrator described it."""

    name: str
    config: Json
    created_at: float
    updated_at: float


@dataclass(frozen=True)
class Point:
    key: str
    step: int
    value: float
    t: float


# -- changes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateRun:
    id: str
    values: Mapping[str, Any]
    """Columns of RunRow. Never `id`, `seq`, `key`."""


@dataclass(frozen=True)
class AddAttempt:
    row: AttemptRow


@dataclass(frozen=True)
class UpdateAttempt:
    run: str
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class PutTask:
    """Insert or replace."""

    row: TaskRow


@dataclass(frozen=True)
class AddEvent:
    row: EventRow


@dataclass(frozen=True)
class AddCheckpoint:
    """The same id twice is the same checkpoint, once."""

    row: CheckpointRow


@dataclass(frozen=True)
class UpdateCheckpoint:
    id: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class PutPart:
    """Insert or replace."""

    row: PartRow


@dataclass(frozen=True)
class DropPart:
    """Forget one; one that is not there is forgotten already."""

    row: PartRow


@dataclass(frozen=True)
class DropParts:
    """Forget all parts of an attempt. An attempt that ends forgets them by itself."""

    run: str
    attempt: int


@dataclass(frozen=True)
class AddMetrics:
    run: str
    attempt: int
    points: Sequence[Point]


@dataclass(frozen=True)
class MoveCursor:
    """How far a file of a task directory has been taken in. In the same transaction as what was read."""

    run: str
    attempt: int
    task: str
    file: str
    offset: int


Change = (
    UpdateRun
    | AddAttempt
    | UpdateAttempt
    | PutTask
    | AddEvent
    | AddCheckpoint
    | UpdateCheckpoint
    | PutPart
    | DropPart
    | DropParts
    | AddMetrics
    | MoveCursor
)


@dataclass(frozen=True)
class RunFilter:
    states: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    """All of them."""
    name: str | None = None
    name_like: str | None = None
    """A substring, matched literally."""
    project: str | None = None
    before: int | None = None
    """Only runs with a smaller seq: the page after."""
    limit: int = 50
