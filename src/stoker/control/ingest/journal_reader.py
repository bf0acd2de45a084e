"""Reads a task directory: status, journal, metrics, logs.

Everything is taken in exactly once: the cursor of each file is recorded in the same transaction as the data read. The
control loop calls this for tasks of the current attempt only, so later output of an ended attempt is never taken in.
Only the entry of a checkpoint is read here; `ingester` transfers its bytes.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.control.ingest import folder_repairs, refusals, tampering, validation
from stoker.control.ingest.checkpoint_rows import score, transfer_row
from stoker.control.ingest.redaction import NOTHING, Redaction
from stoker.control.ingest.step_rate import StepRate
from stoker.control.logs.writer import LOOK, LogWriter, source_name
from stoker.settings import Home, LogSettings
from stoker.store.rows import (
    AddEvent,
    AddMetrics,
    Change,
    CheckpointRow,
    EventRow,
    MoveCursor,
    PartRow,
    Point,
    TransferRow,
)
from stoker.task import fencing, layout
from stoker.task.directory import TaskDir
from stoker.task.formats import FRAME, Ending, StagedCheckpoint, Status, parse_lines, split_lines
from stoker.task.local_directory import UnsafePath

LOOK_BYTES = 4 << 20
"""Bytes of metrics, and of the journal, that one look takes in. As rows they are many times larger."""
LONGEST_LINE = 64 << 20
"""Bytes of one line of the journal. The entry of a checkpoint with 200,000 files takes about half of that."""
LARGEST_FILE = 1 << 30
"""Bytes of a file of metrics, or of the journal, after which its reading stops."""
INVALID_ENTRIES = 100
"""Invalid entries after which the reading of the journal stops."""
MOST_WARNINGS = 1000
"""Warnings and repairs in one task's journal that become events. User code can write any number of them."""
OURS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EINTR,
    }
)
"""Temporary errors of the server's machine. All other errors of a file are caused by the task."""
MOST_NUMBER = 10**9
METRIC_FILES = 1000
"""Files of metrics that are read; each reporting process has one."""
MOST_UNTAKEN = 1000
"""Pending transfers of one task after which its journal is not read further. User code can name any number."""
_CATCH_UP = 15.0
"""Seconds to wait for the last lines of a remote task directory. They never arrive if the courier is gone."""
_SERVING_ROLES = ("launcher", "scheduler", "ps")
"""Roles that serve the others. Their reports stand for the run only if there is no other role."""
_LINE = 4000
_LINES = 50


@dataclass(eq=False)
class Transfer:
    """A checkpoint that a launcher has committed, until it is in the blobs and reported."""

    row: TransferRow
    staged: StagedCheckpoint | None = None
    """Its entry in the journal. None: the entry is gone and the checkpoint is refused."""
    rejected: list[str] = field(default_factory=list)
    """Names of checkpoints that the launcher refused between this one and the next."""
    kept: tuple[str, int] | None = None
    """Digest of its tree and size in bytes, once it is in the blobs."""
    refused: str = ""
    """Why it is refused; empty: it is not."""
    faults: int = 0
    """Tries that failed with an unexpected exception."""

    @property
    def done(self) -> bool:
        return self.kept is not None or bool(self.refused)


@dataclass
class Intake:
    """Result of one look."""

    status: Status | None = None
    started_at: float | None = None
    ending: Ending | None = None
    changes: list[Change] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    """Metrics taken in by this look."""
    generation: int = 0
    """Generation of the body."""
    parts: list[PartRow] = field(default_factory=list)
    """Parts, if the run has several tasks: input of `assembly.Assembly`. `changes` does not contain them."""
    rejected: list[str] = field(default_factory=list)
    """Names of damaged checkpoints that the task wrote."""
    hung: dict[str, Any] | None = None
    """The newest hang that the launcher reported: seconds, stacks, how. Empty: the hang is over. None: nothing new."""
    seen: list[Transfer] = field(default_factory=list)
    """New committed checkpoints, in the order of the journal. Their bytes are not transferred yet."""
    untaken: list[str] = field(default_factory=list)
    """Names of all its checkpoints that are not transferred yet, including those of `seen`."""
    heard: bool = True
    """The journal was read as far as the status describes."""
    log_bytes: int = 0
    visible: bool = False
    """There is something new to show to a user who follows the run."""
    more: bool = False
    """There is more than one look may take in: record this, then look again."""

    def join(self, later: Intake) -> None:
        """Merge the result of a later look at the same task."""
        self.status = later.status or self.status
        self.started_at = self.started_at or later.started_at
        self.ending = later.ending or self.ending
        self.hung = self.hung if later.hung is None else later.hung
        for name in ("changes", "checkpoints", "points", "parts", "rejected", "seen"):
            getattr(self, name).extend(getattr(later, name))
        self.log_bytes += later.log_bytes
        self.visible = self.visible or later.visible
        self.more = later.more
        self.untaken, self.heard = later.untaken, later.heard


class JournalReader:
    """Reads the directory of one task of one attempt."""

    def __init__(
        self,
        home: Home,
        directory: TaskDir,
        *,
        run: str,
        attempt: int,
        task: str,
        incarnation: int = 1,
        generation: int,
        cursors: Mapping[tuple[str, str], int],
        latest: Mapping[str, float],
        logs: LogSettings = LogSettings(),
        alone: bool = True,
        speaks: bool | None = None,
        redaction: Redaction = NOTHING,
    ) -> None:
        """`alone`: the run has no other task. Otherwise the usage contains its step rate. `speaks` (see `speaker`): its
        metrics stand for the run; those of other tasks get the task's name: `loss@worker-1`. None: the first worker's
        stand for the run. `redaction`: removes the run's secrets."""
        self.directory = directory
        self.run = run
        self.attempt = attempt
        self.task = task
        self.generation = generation
        self.source = source_name(task, incarnation)
        """Task and incarnation: the name in its rows."""
        self.untaken = 0
        """Number of found checkpoints that are not in the blobs yet. Set before each look."""
        self._cursors = {file: offset for (name, file), offset in cursors.items() if name == self.source}
        self._logs = LogWriter(home, run, attempt, self.source, logs)
        self._dropped = 0
        self._latest = dict(latest)
        self.alone = alone
        self._stands_for_run = task == speaker(["worker-0", task]) if speaks is None else speaks
        self._step_rate = StepRate()
        self._redaction = redaction
        self._clean = redaction.text
        self.spoiled = False
        """The journal cannot be read: user code replaced it."""
        self._invalid = 0
        """Invalid entries so far. See INVALID_ENTRIES."""
        self._warnings = 0
        self._rest_left_out = False
        self._tampered: set[str] = set()

    def look(self, *, final: bool = False) -> Intake:
        """What is new since the last look, as much as one look may take. `final`: the launcher waits for orders or is gone,
        and writes nothing more. A look that raises has taken in nothing, except copied lines of the log."""
        before = dict(self._cursors)
        try:
            return self._look(final=final)
        except BaseException:  # nothing of this look will be recorded: read all of it again
            self._cursors = before
            raise

    def _look(self, *, final: bool) -> Intake:
        found = Intake(status=self._status(), generation=self.generation)
        self._metrics(found)  # first: a checkpoint is scored by earlier metrics
        if not found.more:
            self._log(found, final=final)
        if not found.more:
            self._journal(found)
        if not found.more and (found.ending is not None or final):
            self._read_last(found, final=final)
        if self.alone:
            for one in found.seen:
                one.row = score(one.row, found.points, self._latest)
        self._latest.update({point.key: point.value for point in found.points})
        found.heard = found.heard and not found.more
        found.visible = bool(found.changes or found.parts or found.log_bytes)
        if not self.alone:
            for record in (found.status, found.ending):
                if record is not None:
                    record.usage = {**record.usage, **self._step_rate.usage()}
        return found

    def _status(self) -> Status | None:
        status = self.directory.status()
        if status is None or not self._redaction:
            return status
        clean = self._redaction.value
        return replace(
            status, pending=clean(status.pending), ending=clean(status.ending), usage=clean(status.usage)
        )

    def look_round(self, *, had_status: bool) -> list[Change]:
        """One event about files that the run must not change and did. Called before the order to stop is written, because
        that replaces `order.json`, and when the body has ended. `had_status`: the launcher has written a status."""
        found = tampering.found(self.directory, had_status=had_status)
        new = [one for one in found if one not in self._tampered]
        self._tampered.update(new)
        text = f"{self.task}: in its task directory {', '.join(new)}; the run itself did that"
        return [self._event("warning", text)] if new else []

    def leave_unread(self, found: Intake) -> None:
        """Record that the remaining output of a killed task is not read."""
        if not self._rest_left_out:
            self._rest_left_out = True
            text = f"{self.task} was killed and has written more than can be taken in at once: the rest is left out"
            found.changes.append(self._event("warning", text))

    def read_before(self) -> Ending | None:
        """The ending of the body, if an earlier server read it and died before it acted on it."""
        found, offset, end = None, 0, self._cursors.get(layout.JOURNAL, 0)
        while offset < end and not self.spoiled:
            lines, used = split_lines(self._read_journal(offset, min(LOOK_BYTES, end - offset)))
            for entry in parse_lines(lines):
                if entry.get("k") == "ended" and entry.get("generation") == self.generation:
                    intake = Intake()
                    self._take_entry(entry, 0, 0, intake)
                    found = intake.ending or found
            if not used:
                break
            offset += used
        return found

    def _read_last(self, found: Intake, *, final: bool) -> None:
        """Read the output that was written between the reads above and the ending. Nothing follows it."""
        self.directory.catch_up(_CATCH_UP)
        before = -1, -1
        while before != (len(found.points), found.log_bytes):
            before = len(found.points), found.log_bytes
            self._metrics(found)
            self._log(found, final=final)
        found.more = False

    def _log(self, found: Intake, *, final: bool) -> None:
        try:
            taken = self._logs.carry(self.directory, final=final)
            newest = found.ending or found.status
            if newest is not None and newest.log_dropped > self._dropped:
                self._dropped = newest.log_dropped
                printed = self._dropped - FRAME * newest.log_dropped_lines
                self._logs.drop(self.directory, max(0, min(printed, self._dropped)))
        except UnsafePath:
            return  # user code replaced the log by a link: there is no log to copy
        found.log_bytes += taken
        found.more = found.more or taken >= LOOK

    def _journal(self, found: Intake) -> None:
        before = self._cursors.get(layout.JOURNAL, 0)
        if before >= LARGEST_FILE or self._invalid >= INVALID_ENTRIES:
            return
        try:
            data = self._read_journal(before, LOOK_BYTES)
            replaced = not data and before > self.directory.size(layout.JOURNAL)
        except OSError as exc:
            if exc.errno in OURS:
                raise
            self._give_up(found, exc.strerror or str(exc))
            return
        if replaced and not self.directory.exists():
            self.spoiled = True  # the engine reports that the directory is gone
            return
        if replaced:
            self._give_up(found, "gone or shorter than it was")
            return
        lines, used = split_lines(data, keep=True)
        offset = before
        for line in lines:
            entries = list(parse_lines([line]))
            if self.untaken + len(found.seen) >= MOST_UNTAKEN and any(map(_is_checkpoint, entries)):
                found.heard = False
                break
            for entry in entries:
                self._take_entry(entry, offset, len(line), found)
            offset += len(line)
            if self._invalid >= INVALID_ENTRIES:
                break
        if not used and len(data) >= LOOK_BYTES and not _may_be_entry(data):
            offset += len(data)  # an endless line: skip what was read of it
            self._count_invalid(found, INVALID_ENTRIES // 10)
        waits = bool(self._invalid >= INVALID_ENTRIES or not found.heard or found.ending is not None)
        # More also follows if this look read only the beginning of a long line.
        found.more = not waits and (
            offset - before >= LOOK_BYTES // 2 or (len(data) >= LOOK_BYTES and used > 0)
        )
        self._move(layout.JOURNAL, offset, found)

    def _read_journal(self, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes, or one longer line."""
        data = self.directory.read(layout.JOURNAL, offset, limit)
        if len(data) < limit or b"\n" in data or not _may_be_entry(data):
            return data
        data = self.directory.read(layout.JOURNAL, offset, LONGEST_LINE)
        return data[: data.find(b"\n") + 1] or data

    def _count_invalid(self, found: Intake, entries: int = 1) -> None:
        """No launcher writes these. Without a bound, user code could fill the database."""
        self._invalid += entries
        if self._invalid >= INVALID_ENTRIES:
            self._give_up(found, "not what its launcher writes")

    def _warn(
        self, found: Intake, text: str, data: dict[str, Any] | None = None, kind: str = "warning"
    ) -> None:
        self._warnings += 1
        if self._warnings <= MOST_WARNINGS:
            found.changes.append(self._event(kind, text, data))
        if self._warnings == MOST_WARNINGS:
            found.changes.append(
                self._event(
                    "warning",
                    f"{self.task}: there are more warnings than {MOST_WARNINGS}; no more are recorded",
                )
            )

    def _give_up(self, found: Intake, what: str) -> None:
        """Give up the journal. The status has the ending too, but checkpoints that are journalled from now on are not
        found."""
        if not self.spoiled:
            self.spoiled = True
            text = f"{self.task}: {layout.JOURNAL} in its task directory is {what}; the run itself did that"
            found.changes.append(
                self._event("warning", f"{text}. New checkpoints of this attempt are not kept")
            )

    def _take_entry(self, entry: Mapping[str, Any], offset: int, length: int, found: Intake) -> None:
        if not self._is_current(entry):
            return
        try:
            if _is_checkpoint(entry):
                self._checkpoint(StagedCheckpoint.from_json(dict(entry)), offset, length, found)
            else:
                self._entry(entry, found)
        except (TypeError, ValueError):
            self._warn(found, f"the journal has an invalid entry: {str(entry)[:200]}")
            self._count_invalid(found)

    def _is_current(self, entry: Mapping[str, Any]) -> bool:
        generation = entry.get("generation", self.generation)
        return type(generation) is int and fencing.accept(generation, self.generation, ended=False)

    def _entry(self, entry: Mapping[str, Any], found: Intake) -> None:
        kind = entry.get("k")
        if kind == "started":
            found.started_at = validation.moment(entry.get("at"))
        elif kind == "ended":
            ending = Ending.from_json(entry)
            lines = [validation.text(line, _LINE, self._clean) for line in ending.last_lines[-_LINES:]]
            message = validation.text(ending.message, _LINE, self._clean)
            usage = self._redaction.value(ending.usage)
            found.ending = replace(ending, message=message, last_lines=lines, usage=usage)
        elif kind == "rejected":
            name = validation.text(entry.get("name"), validation.NAME, self._clean)
            reason = self._clean(str(entry.get("reason")))
            self._warn(found, *refusals.said(name, reason))
            (found.seen[-1].rejected if found.seen else found.rejected).append(name)
        elif kind == "warning":
            self._warn(found, str(entry.get("message")))
        elif kind == "folder":
            for text in folder_repairs.said(entry, self._clean):
                self._warn(found, text, kind="restored")
        elif kind in ("hang", "alive"):
            found.hung = validation.hung(entry, self._clean)
        elif kind == "setup":
            text = f"setup {entry.get('state')} in {float(entry.get('seconds') or 0):.1f} s"
            found.changes.append(self._event("setup", text))

    def _checkpoint(self, staged: StagedCheckpoint, offset: int, length: int, found: Intake) -> None:
        if type(staged.number) is not int or not 0 <= staged.number < MOST_NUMBER:
            name = validation.text(staged.name, validation.NAME, self._clean)
            self.refuse(name, f"{str(staged.number)[:40]!r} is not a number of a checkpoint", found)
            return
        row = transfer_row(
            staged,
            run=self.run,
            attempt=self.attempt,
            source=self.source,
            offset=offset,
            length=length,
            clean=self._clean,
        )
        found.seen.append(Transfer(row, staged))

    def reread(self, row: TransferRow) -> StagedCheckpoint | None:
        """The journal entry of a transfer that an earlier server recorded. None: user code has changed the journal."""
        lines, _ = split_lines(self.directory.read(layout.JOURNAL, row.offset, row.length))
        for entry in parse_lines(lines):
            if (
                entry.get("k") == "checkpoint"
                and entry.get("number") == row.number
                and self._is_current(entry)
            ):
                try:
                    return StagedCheckpoint.from_json(dict(entry))
                except (TypeError, ValueError):
                    return None
        return None

    def refuse(self, name: str, reason: str, found: Intake) -> None:
        """Record that the checkpoint is never restored. Training continues, and earlier checkpoints stay."""
        found.rejected.append(name)
        self._warn(found, *refusals.said(name, self._clean(reason)))
        self._count_invalid(found)

    def kept(self, name: str, step: int | None, checkpoint: str) -> AddEvent:
        at = f" at step {step}" if step is not None else ""
        return self._event("checkpoint", f"checkpoint {name}{at} kept", {"id": checkpoint})

    def _metrics(self, found: Intake) -> None:
        taken = 0
        for name in self._metric_files():
            file = f"{layout.METRICS}/{name}"
            before = self._cursors.get(file, 0)
            if before >= LARGEST_FILE:
                continue
            try:
                entries, offset = self.directory.lines(file, before, LOOK_BYTES)
            except (UnsafePath, PermissionError):
                continue  # not a regular file, or not readable: made by user code, nothing to read
            points = [point for entry in entries for point in validation.points(entry, self._clean)]
            if not self.alone:
                points = self._name_reporter(points, _local_rank(name))
            if points:
                found.changes.append(AddMetrics(self.run, self.attempt, points))
                found.points.extend(points)
            self._move(file, offset, found)
            taken += offset - before
            if taken >= LOOK_BYTES // 2:
                found.more = True
                return

    def _name_reporter(self, points: list[Point], local_rank: int) -> list[Point]:
        """Add the reporting task to the keys, except for the task whose metrics stand for the run."""
        if local_rank == 0:
            self._step_rate.take(points)
        if self._stands_for_run and local_rank == 0:
            return points
        tail = f"@{self.task}.{local_rank}" if local_rank else f"@{self.task}"
        return [replace(point, key=point.key + tail) for point in points]

    def _metric_files(self) -> list[str]:
        try:
            names = self.directory.list(layout.METRICS)
        except UnsafePath:
            return []  # replaced by a link
        ours = [name for name in names if name.endswith(".jsonl") and _of_generation(name, self.generation)]
        # Cursors are recorded by file name. The SDK never makes a name that contains a secret.
        return [name for name in ours if name.isascii() and self._clean(name) == name][:METRIC_FILES]

    def _move(self, file: str, offset: int, found: Intake) -> None:
        if offset != self._cursors.get(file, 0):
            self._cursors[file] = offset
            found.changes.append(MoveCursor(self.run, self.attempt, self.source, file, offset))

    def _event(self, kind: str, text: str, data: dict[str, Any] | None = None) -> AddEvent:
        cleaned = validation.text(text, _LINE, self._clean)
        return AddEvent(EventRow(self.run, time.time(), kind, cleaned, data or {}))


def speaker(tasks: Sequence[str]) -> str:
    """The task whose metrics stand for the run: the client if there is one, else the first that trains. `tasks`: in the
    order of the ranks."""
    roles = [task.rpartition("-")[0] for task in tasks]
    for wanted in (("client",), ("chief", "master", "worker")):
        found = [task for task, role in zip(tasks, roles, strict=True) if role in wanted]
        if found:
            return found[0]
    others = [task for task, role in zip(tasks, roles, strict=True) if role not in _SERVING_ROLES]
    return (others or list(tasks))[0]


def _is_checkpoint(entry: Mapping[str, Any]) -> bool:
    return entry.get("k") == "checkpoint"


def _may_be_entry(data: bytes) -> bool:
    """Whether these may be the first bytes of a journal entry."""
    return data.startswith(b"{") and len(data) < LONGEST_LINE


def _local_rank(name: str) -> int:
    """Local rank of the process that wrote a file of metrics: `3-1234-abcd.jsonl` (0), `3-1235-ef01-1.jsonl` (1)."""
    pieces = name.removesuffix(".jsonl").split("-")
    return int(pieces[3]) if len(pieces) == 4 and pieces[3].isascii() and pieces[3].isdigit() else 0


def _of_generation(name: str, generation: int) -> bool:
    return name.split("-", 1)[0] == str(generation)
