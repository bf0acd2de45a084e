"""The rows of the store as plain dataclasses, and the changes that it can apply.

Control gathers all changes that one pass decided and applies them in one transaction.
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
    """Hash of the whole submission. The same key with another fingerprint is a Conflict."""


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
    """run | stop | kill | suspend: what the user wants. Only the API writes it; resume resets it."""
    priority: int
    tags: tuple[str, ...]
    job: Json
    command: list[str]
    code: str | None
    record: Json
    """Empty in lists that are read without records."""
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
    """Attempts lost in a row by no fault of the user."""
    not_before: float = 0.0
    """Wall-clock time before which it is not queued again (backoff)."""
    outputs: Json | None = None
    warnings: tuple[str, ...] = ()
    folder: Json | None = None
    """What is kept of the working folder (`control.folder`)."""
    removed_at: float | None = None
    """Since when it is in the trash; None: it is not."""


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
    """By task name."""
    resumed_from: str | None = None
    usage: Json = field(default_factory=dict)
    removed: bool = False
    """Whether the engine has deleted everything of it."""


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
    """Digest of its tree."""
    size: int
    how: str
    created_at: float
    written_at: float = 0.0
    step: int | None = None
    metrics: Json = field(default_factory=dict)
    kept: bool = True
    """False once retention has given up its bytes; the row stays."""
    world_size: int | None = None
    """How many trained when it was written; None: not counted, there was one task."""
    seq: int = 0
    """Order in the store, which sets it."""


@dataclass(frozen=True)
class PartRow:
    """What one task wrote of a checkpoint that other tasks may have parts of too."""

    run: str
    attempt: int
    generation: int
    """Generation of the task's body. A number is used once per task directory, and each directory has its generation."""
    task: str
    number: int
    name: str
    digest: str
    """Digest of its tree."""
    size: int
    how: str
    created_at: float
    written_at: float = 0.0
    step: int | None = None
    metrics: Json = field(default_factory=dict)
    checkpoint: str | None = None
    """The complete checkpoint that contains it."""


@dataclass(frozen=True)
class TransferRow:
    """A checkpoint that a task has committed and whose bytes are on their way to the blobs."""

    run: str
    attempt: int
    generation: int
    """Generation of the task's body."""
    task: str
    """The task at its incarnation, as in its cursors."""
    number: int
    offset: int
    """Of its entry in the task's journal, which lists the files."""
    length: int
    name: str
    size: int
    """As its launcher says."""
    how: str
    created_at: float
    written_at: float = 0.0
    step: int | None = None
    metrics: Json = field(default_factory=dict)
    """What it is judged by: what had been reported when its entry was read."""


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
    """A cluster as an administrator configured it."""

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
    """The same id twice is the same checkpoint and adds one row."""

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
    """Deletes one part. A missing part is no error."""

    row: PartRow


@dataclass(frozen=True)
class DropParts:
    """Deletes all parts of an attempt. The end of an attempt does this too."""

    run: str
    attempt: int


@dataclass(frozen=True)
class PutTransfer:
    """Insert or replace."""

    row: TransferRow


@dataclass(frozen=True)
class DropTransfer:
    """Its checkpoint is kept, or was refused. A missing transfer is no error. The end of an attempt drops all of its
    transfers."""

    row: TransferRow


@dataclass(frozen=True)
class AddMetrics:
    run: str
    attempt: int
    points: Sequence[Point]


@dataclass(frozen=True)
class MoveCursor:
    """How far a file of a task directory has been read. Applied in the same transaction as what was read."""

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
    | PutTransfer
    | DropTransfer
    | AddMetrics
    | MoveCursor
)


@dataclass(frozen=True)
class RunFilter:
    states: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    """The run has all of them."""
    name: str | None = None
    name_like: str | None = None
    """A substring, matched literally."""
    project: str | None = None
    before: int | None = None
    """Only runs with a smaller seq, for the next page."""
    limit: int = 50
    trash: bool = False
    """Only runs in the trash, which are in no other list."""


@dataclass(frozen=True)
class RunSize:
    """What is stored of a run, in bytes. Content that several runs share counts for each."""

    run: str
    checkpoints: int = 0
    outputs: int = 0
    folder: int = 0


@dataclass(frozen=True)
class Roots:
    """The trees that must be kept, by what they are. A tree may be in several sets."""

    code: set[str]
    checkpoints: set[str]
    """Parts of checkpoints too."""
    outputs: set[str]
    folder: set[str]
    trash: set[str]
    """Of any kind, for runs in the trash."""
