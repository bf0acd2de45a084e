"""Taking in what a task directory holds: status, journal, metrics, logs, checkpoints.

Exactly once: how far each file was read (the cursor) is recorded in the transaction that records what was read.
Called by the control loop for tasks of the current attempt only, so what an ended one still writes is never
taken in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.blobs import BlobStore
from stoker.control.archive import LogWriter
from stoker.courier import carry_checkpoint
from stoker.errors import StokerError
from stoker.settings import Home
from stoker.store.rows import (
    AddCheckpoint,
    AddEvent,
    AddMetrics,
    Change,
    CheckpointRow,
    EventRow,
    MoveCursor,
    Point,
)
from stoker.task import fence, layout
from stoker.task.formats import Ending, StagedCheckpoint, Status
from stoker.task.near import NearTaskDir, UnsafePath


@dataclass
class Intake:
    """What one look found."""

    status: Status | None = None
    started_at: float | None = None
    ending: Ending | None = None
    changes: list[Change] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    """Metrics taken in by this look."""
    log_bytes: int = 0
    visible: bool = False
    """Somebody following the run would see something new."""


class Pump:
    """One task of one attempt."""

    def __init__(
        self,
        home: Home,
        blobs: BlobStore,
        directory: NearTaskDir,
        *,
        run: str,
        attempt: int,
        task: str,
        generation: int,
        cursors: Mapping[tuple[str, str], int],
        latest: Mapping[str, float],
    ) -> None:
        self.directory = directory
        self.run = run
        self.attempt = attempt
        self.task = task
        self.generation = generation
        self._blobs = blobs
        self._cursors = {file: offset for (name, file), offset in cursors.items() if name == task}
        self._logs = LogWriter(home, run, attempt, task)
        self._dropped = 0
        self._latest = dict(latest)

    def look(self, *, final: bool = False) -> Intake:
        """Everything new since the last look. `final`: the launcher holds or is gone, nothing more will come."""
        found = Intake(status=self.directory.status())
        self._metrics(found)  # first: a checkpoint is judged by what was reported before it
        self._journal(found)
        self._latest.update({point.key: point.value for point in found.points})
        found.log_bytes = self._logs.carry(self.directory, final=final)
        if found.status and found.status.log_dropped > self._dropped:
            self._dropped = found.status.log_dropped
            self._logs.drop(self.directory, self._dropped)
        found.visible = bool(found.changes or found.log_bytes)
        return found

    def _journal(self, found: Intake) -> None:
        entries, offset = self.directory.journal(self._cursors.get(layout.JOURNAL, 0))
        for entry in entries:
            if not fence.accept(int(entry.get("generation", self.generation)), self.generation, ended=False):
                continue
            kind = entry.get("k")
            if kind == "started":
                found.started_at = float(entry.get("at") or time.time())
            elif kind == "ended":
                found.ending = Ending.from_json(entry)
            elif kind == "checkpoint":
                self._checkpoint(StagedCheckpoint.from_json(entry), found)
            elif kind == "rejected":
                text = f"checkpoint {entry.get('name')} is not offered: {entry.get('reason')}"
                found.changes.append(self._event("warning", text, {"name": entry.get("name")}))
            elif kind == "warning":
                found.changes.append(self._event("warning", str(entry.get("message"))))
            elif kind == "setup":
                text = f"setup {entry.get('state')} in {float(entry.get('seconds') or 0):.1f} s"
                found.changes.append(self._event("setup", text))
        self._move(layout.JOURNAL, offset, found)

    def _checkpoint(self, staged: StagedCheckpoint, found: Intake) -> None:
        try:
            digest, size = carry_checkpoint(self.directory, staged, self._blobs)
        except (StokerError, UnsafePath) as exc:
            # The copy in the task directory is not what the launcher hashed (damaged, or tampered with): it is
            # never offered, training goes on, and the one before it stays.
            found.changes.append(self._event("warning", f"checkpoint {staged.name} is not offered: {exc}"))
            return
        row = CheckpointRow(
            id=f"ck-{self.run}-{self.attempt}-{staged.number}",
            run=self.run,
            attempt=self.attempt,
            generation=staged.generation,
            name=staged.name,
            digest=digest,
            size=size,
            how=staged.how,
            created_at=staged.at,
            written_at=staged.written_at,
            step=staged.step,
            metrics=dict(staged.metrics),
        )
        row = score(row, found.points, self._latest)
        found.checkpoints.append(row)
        step = f" at step {staged.step}" if staged.step is not None else ""
        found.changes.append(AddCheckpoint(row))
        found.changes.append(
            self._event("checkpoint", f"checkpoint {staged.name}{step} kept", {"id": row.id})
        )

    def _metrics(self, found: Intake) -> None:
        for name in self.directory.list(layout.METRICS):
            file = f"{layout.METRICS}/{name}"
            if not name.endswith(".jsonl") or not _of_generation(name, self.generation):
                continue
            before = self._cursors.get(file, 0)
            try:
                entries, offset = self.directory.lines(file, before)
            except UnsafePath:
                continue  # not a regular file: user code put it there, nothing to read
            points = [point for entry in entries for point in _points(entry)]
            if points:
                found.changes.append(AddMetrics(self.run, self.attempt, points))
                found.points.extend(points)
            self._move(file, offset, found)

    def _move(self, file: str, offset: int, found: Intake) -> None:
        if offset != self._cursors.get(file, 0):
            self._cursors[file] = offset
            found.changes.append(MoveCursor(self.run, self.attempt, self.task, file, offset))

    def _event(self, kind: str, text: str, data: dict[str, Any] | None = None) -> AddEvent:
        return AddEvent(EventRow(self.run, time.time(), kind, text, data or {}))


def score(row: CheckpointRow, points: Sequence[Point], latest: Mapping[str, float]) -> CheckpointRow:
    """A checkpoint is judged by what it was saved with, else by what was reported for its step, else by the
    newest values reported before it was written."""
    values = dict(latest)
    values.update(
        {point.key: point.value for point in points if point.t <= (row.written_at or row.created_at)}
    )
    if row.step is not None:
        values.update({point.key: point.value for point in points if point.step == row.step})
    return replace(row, metrics={**values, **row.metrics})


def _points(entry: Mapping[str, Any]) -> list[Point]:
    values, step, t = entry.get("v"), entry.get("step"), entry.get("t")
    if not isinstance(values, dict) or not isinstance(step, int) or not isinstance(t, int | float):
        return []
    return [
        Point(str(key)[:200], step, float(value), float(t))
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(step) < 1 << 62
    ]


def _of_generation(name: str, generation: int) -> bool:
    return name.split("-", 1)[0] == str(generation)
