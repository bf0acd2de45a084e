"""Takes over checkpoints of lost tasks from a shared volume, and removes parts that are not needed there.

The next attempt takes complete checkpoints that a lost attempt did not hand over, before it gets its order. By then the
lost attempt is proven gone or given up. Every byte is compared with the journalled hashes before a checkpoint counts:
a lost task that still writes can only damage its own checkpoints. This works for runs of one task only; parts of several
tasks are not put together.

The courier of a task removes its part when all of it was transferred, or the courier of the attempt that took over its
checkpoints does. Parts of runs that have ended are removed by any courier that sees them and has permission.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from stoker.blobs import BlobStore
from stoker.control.ingest import refusals
from stoker.control.ingest.checkpoint_rows import checkpoint_row, score, transfer_row
from stoker.control.ingest.journal_reader import OURS
from stoker.control.policy import hold
from stoker.control.state import LiveRun, LiveTask
from stoker.errors import NotFound, StokerError, StoreError
from stoker.spec.states import RunState
from stoker.store import Store
from stoker.store.rows import AddCheckpoint, AddEvent, AttemptRow, Change, CheckpointRow, EventRow, RunRow
from stoker.task import layout
from stoker.task.directory import SharingTaskDir, TaskDir
from stoker.task.formats import StagedCheckpoint
from stoker.task.layout import SharedPart
from stoker.transfer import carry_checkpoint

log = logging.getLogger(__name__)


class Salvage:
    """Everything here blocks: call it from threads."""

    def __init__(self, store: Store, blobs: BlobStore) -> None:
        self._store = store
        self._blobs = blobs

    def take(self, live: LiveRun, task: LiveTask) -> tuple[list[Change], list[SharedPart]]:
        """Take over what earlier attempts left. Returns changes, to be recorded before a checkpoint is chosen, and the
        parts they came from. May be repeated."""
        directory = task.directory
        if not _sharing(directory) or not live.alone or live.attempt is None or live.attempt.number <= 1:
            return [], []
        changes: list[Change] = []
        taken: list[SharedPart] = []
        try:
            for part in sorted(directory.parts()[0]):
                if (part.run, part.task) == (live.id, task.name) and part.attempt < live.attempt.number:
                    changes += self._take(live, directory, part)
                    taken.append(part)
        except (StokerError, OSError) as exc:
            if isinstance(exc, StoreError) or getattr(exc, "errno", None) in OURS:
                raise  # a fault of this machine: retried
            # The run goes on from checkpoints that were transferred. The files stay on the volume.
            text = f"what a lost attempt left on the shared volume cannot be taken: {exc}"
            changes.append(_event(live.id, "warning", text))
        return changes, taken

    def _take(self, live: LiveRun, directory: SharingTaskDir, part: SharedPart) -> list[Change]:
        attempt = self._store.attempt(part.run, part.attempt)
        known = self._store.checkpoints(live.id)
        before = {row.digest for row in known}
        numbers = carried([row for row in known if row.attempt == part.attempt])
        entries = directory.salvage(part, attempt.generation, numbers)
        found = [staged for staged in staged_of(entries) if staged.number not in numbers]
        latest = self._store.latest_metrics(live.id) if found else {}
        rows: list[CheckpointRow] = []
        changes: list[Change] = [
            _refused(live.id, entry["name"], entry.get("reason"))
            for entry in entries
            if entry.get("k") == "rejected" and "name" in entry
        ]
        for staged in sorted(found, key=lambda one: one.number, reverse=True):
            if len(rows) == max(1, live.job.checkpoint.keep):
                break  # older ones would not be kept anyway
            try:
                digest, size = carry_checkpoint(
                    directory,
                    staged,
                    self._blobs,
                    part=part,
                    rename=live.redaction.text if live.redaction else None,
                )
            except StoreError:
                raise
            except StokerError as exc:
                changes.append(_refused(live.id, staged.name, exc))
            else:
                # If inodes differ between nodes, a checkpoint that was restored or transferred looks new.
                if digest not in before:
                    clean = live.redaction.text
                    transfer = transfer_row(
                        staged, run=part.run, attempt=part.attempt, source="worker-0", clean=clean
                    )
                    rows.append(checkpoint_row(score(transfer, [], latest), digest, size))
        for row in reversed(rows):
            step = f" at step {row.step}" if row.step is not None else ""
            text = f"checkpoint {row.name}{step} of lost attempt {part.attempt} found on the shared volume and kept"
            changes += [AddCheckpoint(row), _event(live.id, "checkpoint", text, {"id": row.id})]
        return changes

    def sweep(
        self, live: LiveRun, task: LiveTask, taken: Sequence[SharedPart], others: Sequence[str]
    ) -> None:
        """Remove parts that are not needed any more. `others`: runs that are not over. What cannot be removed now is
        left to a later sweep."""
        directory = task.directory
        if not _sharing(directory) or live.attempt is None:
            return
        number = live.attempt.number
        try:
            parts, empty = directory.parts()
            for part in parts:
                if part.run == live.id:
                    useless = part.attempt < number and (part in taken or not live.alone)
                else:
                    useless = part.run not in others and self._over(part.run, part.attempt)
                if useless:
                    remove(directory, part)
            for run in empty:
                if run != live.id and run not in others and self._over(run, None):
                    directory.discard(f"{layout.SHARED}/{run}")
        except OSError as exc:
            log.info("run %s: the shared volume is not swept: %s", live.id, exc)

    def _over(self, run: str, attempt: int | None) -> bool:
        """False for a run that the database does not know: a backup may bring it back."""
        try:
            row = self._store.run(run)
            return over(row, self._store.attempt(run, row.attempt if attempt is None else attempt))
        except NotFound:
            return False


def over(run: RunRow, attempt: AttemptRow) -> bool:
    """Whether the files of this attempt are not needed any more. Pure, except for the clock of held attempts."""
    kept = hold.is_kept(attempt) or hold.files_of(attempt)
    return RunState(run.state).terminal and attempt.state == "ended" and not kept


def carried(rows: Sequence[CheckpointRow]) -> list[int]:
    """The numbers, in the task directory, of the checkpoints of one attempt of one task."""
    numbers = [row.id.rpartition("-")[2] for row in rows]
    return [int(number) for number in numbers if number.isdecimal()]


def staged_of(entries: Sequence[Mapping[str, Any]]) -> list[StagedCheckpoint]:
    """The staged checkpoints in journal entries. User code could write the journal: invalid entries are ignored."""
    found: dict[int, StagedCheckpoint] = {}
    for entry in entries:
        if entry.get("k") == "checkpoint" and type(entry.get("number")) is int:
            with contextlib.suppress(TypeError, ValueError):
                found[entry["number"]] = StagedCheckpoint.from_json(entry)
    return list(found.values())


def remove(directory: TaskDir, part: SharedPart) -> None:
    """Remove a part if permissions allow it. OSError: the courier cannot be reached."""
    if not _sharing(directory):
        return
    try:
        directory.discard(part.path)
    except OSError as exc:
        if exc.errno in (errno.EIO, errno.EHOSTDOWN):
            raise
        log.info("%s is not removed from the shared volume: %s", part.name, exc)


def shares(directory: TaskDir | None) -> bool:
    """Whether the directory is on a shared volume, and outlives its task."""
    return _sharing(directory)


def _sharing(directory: TaskDir | None) -> TypeGuard[SharingTaskDir]:
    return directory is not None and directory.shares


def _refused(run: str, name: object, why: object) -> AddEvent:
    text, data = refusals.said(name, why)
    return _event(run, "warning", text.replace(" is not", " of a lost attempt is not", 1), data)


def _event(run: str, kind: str, text: str, data: dict[str, Any] | None = None) -> AddEvent:
    return AddEvent(EventRow(run, time.time(), kind, text[:4000], data or {}))
