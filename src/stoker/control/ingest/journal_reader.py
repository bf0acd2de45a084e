"""Reading what a task directory holds: status, journal, metrics, logs.

Exactly once: how far each file was read (the cursor) is recorded in the transaction that records what was read.
Called by the control loop for tasks of the current attempt only, so what an ended one still writes is never
taken in. No bytes are moved here: of a checkpoint only its entry is read, and its transfer follows (see `ingester`).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.control.ingest import refusals, tampering, validation
from stoker.control.ingest.checkpoint_rows import score, transfer_row
from stoker.control.ingest.redaction import NOTHING, Redaction
from stoker.control.ingest.step_rate import StepRate
from stoker.control.logs.reader import LOOK, LogWriter, source_name
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
"""Bytes of metrics, and of the journal, that one look takes in: as rows they are many times as big."""
LONGEST_LINE = 64 << 20
"""Bytes of one line of the journal. A checkpoint of 200,000 files takes about half of that."""
LARGEST_FILE = 1 << 30
"""Bytes of one file of metrics, or of the journal, beyond which it is not read any more."""
NONSENSE = 100
"""Entries that no launcher writes, after which the journal is not read any more."""
TOLD = 1000
"""Warnings of one task's journal that become events: user code can write any number of them."""
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
"""What the machine lacks for a while. Everything else that goes wrong with a file is the task's doing."""
MOST_NUMBER = 10**9
METRIC_FILES = 1000
"""Files of metrics that are read: one for each process that reports."""
MOST_UNTAKEN = 1000
"""Checkpoints of one task whose bytes are on their way, after which its journal waits: user code can name any number."""
_CATCH_UP = 15.0
"""Seconds that the last lines of a far task have to arrive. A courier that is gone brings nothing any more."""
_SILENT = ("launcher", "scheduler", "ps")
"""Roles that serve the others, and speak only where nobody else does."""
_LINE = 4000
_LINES = 50


@dataclass(eq=False)
class Transfer:
    """A checkpoint that a launcher has committed, until it is in the blobs and that is told."""

    row: TransferRow
    staged: StagedCheckpoint | None = None
    """Its entry in the journal. None: it is gone, and the checkpoint is refused."""
    rejected: list[str] = field(default_factory=list)
    """Names of checkpoints that the launcher has refused after this one and before the next."""
    kept: tuple[str, int] | None = None
    """The digest of its tree and its bytes, once it is in the blobs."""
    refused: str = ""
    """Why it never will be."""
    faults: int = 0
    """Tries that failed in a way that was not foreseen."""

    @property
    def done(self) -> bool:
        return self.kept is not None or bool(self.refused)


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
    generation: int = 0
    """Of the body that was looked at."""
    parts: list[PartRow] = field(default_factory=list)
    """Of a task that is not alone: what it committed, for `assembly.Assembly` to make checkpoints of. Nothing of them is
    in `changes`."""
    rejected: list[str] = field(default_factory=list)
    """Names of checkpoints that it wrote and that are damaged."""
    hung: dict[str, Any] | None = None
    """What its launcher said of its silence last: seconds, stacks, how; empty: it lives again. None: nothing new."""
    seen: list[Transfer] = field(default_factory=list)
    """Committed, in the order of the journal. Their bytes are still to be moved."""
    untaken: list[str] = field(default_factory=list)
    """Names of all of its checkpoints whose bytes are on their way, those of `seen` among them."""
    heard: bool = True
    """All that its status speaks of has been read."""
    log_bytes: int = 0
    visible: bool = False
    """Somebody following the run would see something new."""
    more: bool = False
    """There is more to take in than one look may take: record this, then look again."""

    def join(self, later: Intake) -> None:
        """What a later look at the same task found, as if both had been one."""
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
    """One task of one attempt."""

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
        """`alone`: the run has no other task. Otherwise how fast it gets on is in the usage. `speaks` (see `speaker`): what
        it reports is the run's; of the others it gets their name: `loss@worker-1`. None: the first worker speaks.
        `redaction`: takes the run's secrets out."""
        self.directory = directory
        self.run = run
        self.attempt = attempt
        self.task = task
        self.generation = generation
        self.source = source_name(task, incarnation)
        """The task at its incarnation: by this its rows are called."""
        self.untaken = 0
        """How many checkpoints that it found are not in the blobs yet. Set before each look."""
        self._cursors = {file: offset for (name, file), offset in cursors.items() if name == self.source}
        self._logs = LogWriter(home, run, attempt, self.source, logs)
        self._dropped = 0
        self._latest = dict(latest)
        self.alone = alone
        self._speaks = task == speaker(["worker-0", task]) if speaks is None else speaks
        self._pace = StepRate()
        self._redaction = redaction
        self._clean = redaction.text
        self.spoiled = False
        """The journal cannot be read: user code put something else in its place."""
        self._nonsense = 0
        """What no launcher writes. From NONSENSE on, the journal is read no more."""
        self._told = 0
        self._unread = False
        self._found: set[str] = set()

    def look(self, *, final: bool = False) -> Intake:
        """What is new since the last look, as much as one look may take. `final`: the launcher holds or is gone,
        nothing more will come. A look that fails has taken nothing in, but for lines of the log, which are kept."""
        before = dict(self._cursors)
        try:
            return self._look(final=final)
        except BaseException:  # whatever it is: nothing of this look is recorded, all is read again
            self._cursors = before
            raise

    def _look(self, *, final: bool) -> Intake:
        found = Intake(status=self._status(), generation=self.generation)
        self._metrics(found)  # first: a checkpoint is judged by what was reported before it
        if not found.more:
            self._log(found, final=final)
        if not found.more:
            self._journal(found)
        if not found.more and (found.ending is not None or final):
            self._rest(found, final=final)
        if self.alone:
            for one in found.seen:
                one.row = score(one.row, found.points, self._latest)
        self._latest.update({point.key: point.value for point in found.points})
        found.heard = found.heard and not found.more
        found.visible = bool(found.changes or found.parts or found.log_bytes)
        if not self.alone:
            for said in (found.status, found.ending):
                if said is not None:
                    said.usage = {**said.usage, **self._pace.usage()}
        return found

    def _status(self) -> Status | None:
        status = self.directory.status()
        if status is None or not self._redaction:
            return status
        said = self._redaction.value
        return replace(
            status, pending=said(status.pending), ending=said(status.ending), usage=said(status.usage)
        )

    def look_round(self, *, had_status: bool) -> list[Change]:
        """What the run made of the files that others write, in one event: when it is told to stop, which writes an order anew,
        and when its body has ended. `had_status`: its launcher was heard."""
        found = tampering.found(self.directory, had_status=had_status)
        said = [one for one in found if one not in self._found]
        self._found.update(said)
        text = f"{self.task}: in its task directory {', '.join(said)}; the run itself did that"
        return [self._event("warning", text)] if said else []

    def leave_unread(self, found: Intake) -> None:
        """There is more than anybody waits for."""
        if not self._unread:
            self._unread = True
            text = f"{self.task} was killed and has written more than can be taken in at once: the rest is left out"
            found.changes.append(self._event("warning", text))

    def read_before(self) -> Ending | None:
        """How the body ended, where its end has been read already: by a server that died before it had acted on it."""
        found, offset, end = None, 0, self._cursors.get(layout.JOURNAL, 0)
        while offset < end and not self.spoiled:
            lines, used = split_lines(self._read_journal(offset, min(LOOK_BYTES, end - offset)))
            for entry in parse_lines(lines):
                if entry.get("k") == "ended" and entry.get("generation") == self.generation:
                    intake = Intake()
                    self._journalled(entry, 0, 0, intake)
                    found = intake.ending or found
            if not used:
                break
            offset += used
        return found

    def _rest(self, found: Intake, *, final: bool) -> None:
        """What was written between the reads above and the ending is there now, and it is the last of it."""
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
            return  # user code put a link in place of the log: there is no log to take over
        found.log_bytes += taken
        found.more = found.more or taken >= LOOK

    def _journal(self, found: Intake) -> None:
        before = self._cursors.get(layout.JOURNAL, 0)
        if before >= LARGEST_FILE or self._nonsense >= NONSENSE:
            return
        try:
            data = self._read_journal(before, LOOK_BYTES)
            replaced = not data and before > self.directory.size(layout.JOURNAL)
        except OSError as exc:
            if exc.errno in OURS:
                raise
            self._spoil(found, exc.strerror or str(exc))
            return
        if replaced and not self.directory.exists():
            self.spoiled = True  # that its directory is gone is said by the engine
            return
        if replaced:
            self._spoil(found, "gone or shorter than it was")
            return
        lines, used = split_lines(data, keep=True)
        offset = before
        for line in lines:
            entries = list(parse_lines([line]))
            if self.untaken + len(found.seen) >= MOST_UNTAKEN and any(map(_is_checkpoint, entries)):
                found.heard = False
                break
            for entry in entries:
                self._journalled(entry, offset, len(line), found)
            offset += len(line)
            if self._nonsense >= NONSENSE:
                break
        if not used and len(data) >= LOOK_BYTES and not _may_be_entry(data):
            offset += len(data)  # a line that nobody could ever read past
            self._doubt(found, NONSENSE // 10)
        waits = bool(self._nonsense >= NONSENSE or not found.heard or found.ending is not None)
        # Also where what follows is one long line, of which this look has read the beginning.
        found.more = not waits and (
            offset - before >= LOOK_BYTES // 2 or (len(data) >= LOOK_BYTES and used > 0)
        )
        self._move(layout.JOURNAL, offset, found)

    def _read_journal(self, offset: int, limit: int) -> bytes:
        """What one look takes in: `limit` bytes, or one longer line."""
        data = self.directory.read(layout.JOURNAL, offset, limit)
        if len(data) < limit or b"\n" in data or not _may_be_entry(data):
            return data
        data = self.directory.read(layout.JOURNAL, offset, LONGEST_LINE)
        return data[: data.find(b"\n") + 1] or data

    def _doubt(self, found: Intake, entries: int = 1) -> None:
        """What no launcher writes: without a bound, user code could fill the database with it."""
        self._nonsense += entries
        if self._nonsense >= NONSENSE:
            self._spoil(found, "not what its launcher writes")

    def _warn(self, found: Intake, text: str, data: dict[str, Any] | None = None) -> None:
        self._told += 1
        if self._told <= TOLD:
            found.changes.append(self._event("warning", text, data))
        if self._told == TOLD:
            found.changes.append(
                self._event("warning", f"{self.task}: there are more warnings than {TOLD}; no more are told")
            )

    def _spoil(self, found: Intake, what: str) -> None:
        """What its launcher says of the end is in the status too; checkpoints that it journals now are not heard of."""
        if not self.spoiled:
            self.spoiled = True
            text = f"{self.task}: {layout.JOURNAL} in its task directory is {what}; the run itself did that"
            found.changes.append(
                self._event("warning", f"{text}. New checkpoints of this attempt are not kept")
            )

    def _journalled(self, entry: Mapping[str, Any], offset: int, length: int, found: Intake) -> None:
        if not self._is_of_now(entry):
            return
        try:
            if _is_checkpoint(entry):
                self._checkpoint(StagedCheckpoint.from_json(dict(entry)), offset, length, found)
            else:
                self._entry(entry, found)
        except (TypeError, ValueError):
            self._warn(found, f"the journal says something that cannot be understood: {str(entry)[:200]}")
            self._doubt(found)

    def _is_of_now(self, entry: Mapping[str, Any]) -> bool:
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
        """The entry of a checkpoint that an earlier server saw. None: user code has changed the journal."""
        lines, _ = split_lines(self.directory.read(layout.JOURNAL, row.offset, row.length))
        for entry in parse_lines(lines):
            if (
                entry.get("k") == "checkpoint"
                and entry.get("number") == row.number
                and self._is_of_now(entry)
            ):
                try:
                    return StagedCheckpoint.from_json(dict(entry))
                except (TypeError, ValueError):
                    return None
        return None

    def refuse(self, name: str, reason: str, found: Intake) -> None:
        """The checkpoint is never offered, training goes on, and the one before it stays."""
        found.rejected.append(name)
        self._warn(found, *refusals.said(name, self._clean(reason)))
        self._doubt(found)

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
                continue  # not a regular file, or not readable: user code put it there, nothing to read
            points = [point for entry in entries for point in validation.points(entry, self._clean)]
            if not self.alone:
                points = self._of_several(points, _local_rank(name))
            if points:
                found.changes.append(AddMetrics(self.run, self.attempt, points))
                found.points.extend(points)
            self._move(file, offset, found)
            taken += offset - before
            if taken >= LOOK_BYTES // 2:
                found.more = True
                return

    def _of_several(self, points: list[Point], local_rank: int) -> list[Point]:
        """Who reported it is said in the key, but for the one that speaks for all."""
        if local_rank == 0:
            self._pace.take(points)
        if self._speaks and local_rank == 0:
            return points
        tail = f"@{self.task}.{local_rank}" if local_rank else f"@{self.task}"
        return [replace(point, key=point.key + tail) for point in points]

    def _metric_files(self) -> list[str]:
        try:
            names = self.directory.list(layout.METRICS)
        except UnsafePath:
            return []  # a link in its place
        ours = [name for name in names if name.endswith(".jsonl") and _of_generation(name, self.generation)]
        # What was read of each is recorded by its name: one with a secret in it was never made by the SDK.
        return [name for name in ours if name.isascii() and self._clean(name) == name][:METRIC_FILES]

    def _move(self, file: str, offset: int, found: Intake) -> None:
        if offset != self._cursors.get(file, 0):
            self._cursors[file] = offset
            found.changes.append(MoveCursor(self.run, self.attempt, self.source, file, offset))

    def _event(self, kind: str, text: str, data: dict[str, Any] | None = None) -> AddEvent:
        said = validation.text(text, _LINE, self._clean)
        return AddEvent(EventRow(self.run, time.time(), kind, said, data or {}))


def speaker(tasks: Sequence[str]) -> str:
    """The one of these, in the order of the ranks, whose reports stand for the run: the client where there is one, else
    the first that trains."""
    roles = [task.rpartition("-")[0] for task in tasks]
    for wanted in (("client",), ("chief", "master", "worker")):
        found = [task for task, role in zip(tasks, roles, strict=True) if role in wanted]
        if found:
            return found[0]
    others = [task for task, role in zip(tasks, roles, strict=True) if role not in _SILENT]
    return (others or list(tasks))[0]


def _is_checkpoint(entry: Mapping[str, Any]) -> bool:
    return entry.get("k") == "checkpoint"


def _may_be_entry(data: bytes) -> bool:
    """Whether these may be the first bytes of an entry of the journal."""
    return data.startswith(b"{") and len(data) < LONGEST_LINE


def _local_rank(name: str) -> int:
    """Of the process that wrote a file of metrics: `3-1234-abcd.jsonl`, `3-1235-ef01-1.jsonl`."""
    pieces = name.removesuffix(".jsonl").split("-")
    return int(pieces[3]) if len(pieces) == 4 and pieces[3].isascii() and pieces[3].isdigit() else 0


def _of_generation(name: str, generation: int) -> bool:
    return name.split("-", 1)[0] == str(generation)
