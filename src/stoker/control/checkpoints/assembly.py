"""From what single tasks committed to checkpoints of the run.

The rules are in `gathering`, which is pure; here are the rows and the trees. How the loop uses it:

    assembly = Assembly(blobs, run=..., attempt=..., latest=store.latest_metrics(run))
    done = assembly.begin(generation, {"worker-0": 1, "worker-1": 1}, world_size=2,
                          known=store.checkpoint_parts(run, attempt))     # commit done.changes
    ...
    found = {task: ingester.look() for each task}            # of readers with alone=False
    done = assembly.take(found, lost={tasks that are proven gone, after they were collected})
    commit(changes of each Intake + done.changes)            # in one transaction: parts are counted exactly once
    done.checkpoints                                         # rows that became complete: as Intake.checkpoints was
    sweeper.dropped |= done.freed

A member that comes back alone: `replace`. One that is not waited for any more (`on_loss: ignore`): `leave`. When all
bodies of a generation have ended and their last looks were taken, what is complete is complete: then `begin` for the
next generation, which forgets the rest. With one member a checkpoint is complete at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.blobs import BlobStore
from stoker.control.checkpoints.completion import Completion, Round, Settled, WrittenPart
from stoker.control.ingest import refusals
from stoker.control.ingest.checkpoint_rows import score
from stoker.control.ingest.journal_reader import Intake
from stoker.errors import BlobDamaged, NotFound, StokerError, StoreError
from stoker.spec.tree import Tree, TreeFile
from stoker.store.rows import (
    AddCheckpoint,
    AddEvent,
    Change,
    CheckpointRow,
    DropPart,
    EventRow,
    PartRow,
    Point,
    PutPart,
    UpdateCheckpoint,
)
from stoker.task.formats import Ending
from stoker.transfer.merge import merge


@dataclass
class Assembled:
    """What `take` made of what was found."""

    changes: list[Change] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    """Complete now. They are in `changes` too."""
    freed: set[str] = field(default_factory=set)
    """Trees that nobody needs any more, once the changes are recorded."""


class Assembly:
    """The checkpoints of one attempt. Used by one thread at a time; reads and writes trees, so not in the loop's own.
    All that must survive a restart is in the changes it returns; if they could not be recorded, make another one from
    what the store has."""

    def __init__(
        self, blobs: BlobStore, *, run: str, attempt: int, latest: Mapping[str, float] | None = None
    ) -> None:
        """`latest`: what was reported last in earlier attempts."""
        self._blobs = blobs
        self._run = run
        self._attempt = attempt
        self._generation = 0
        self._world_size = 1
        self._members: list[str] = []
        self._gathering = Completion({})
        self._latest = dict(latest or {})
        self._endings: dict[str, Ending] = {}
        """Of tasks whose last parts are on their way."""
        self._warned: set[str] = set()

    def begin(
        self,
        generation: int,
        members: Mapping[str, int],
        *,
        world_size: int | None = None,
        known: Sequence[PartRow] = (),
    ) -> Assembled:
        """A generation of the world begins, or is found running after a restart. `members`: task -> generation of its
        body, in the order of the ranks. `world_size`: how many processes train; None: one per member. `known`: the
        attempt's parts in the store, after a restart. Everything of earlier generations is forgotten."""
        old = self._gathering
        fresh = Completion(members)
        if self._members == list(members):
            fresh.know(old.writers())
        rows = {_key(row): row for row in [*known, *(part.row for part in old.forget())]}
        self._gathering, self._generation, self._members = fresh, generation, list(members)
        self._world_size = world_size or max(1, len(members))
        self._endings, self._warned = {}, set()
        done = Assembled()
        parts = []
        for row in sorted(rows.values(), key=lambda row: row.created_at):
            part = self._part(row)
            if part is None:
                done.changes.append(DropPart(row))
            else:
                parts.append(part)
        self._apply(fresh.restore(parts), done)
        return done

    def replace(self, task: str, generation: int) -> Assembled:
        """A task comes back alone, with a body of another generation."""
        done = Assembled()
        self._apply(self._gathering.replace(task, generation), done)
        self._endings.pop(task, None)
        if task not in self._members:
            self._members.append(task)
        return done

    def leave(self, task: str) -> None:
        """Nobody waits for it any more."""
        self._gathering.leave(task)

    def take(self, found: Mapping[str, Intake], *, lost: Collection[str] = ()) -> Assembled:
        """What the looks at some or all tasks found. Judges the checkpoints that they have seen by what the run had reported
        by then. `lost`: tasks of which nothing more will come; the look that says so is the last one, or came before."""
        done = Assembled()
        points = self._points(found)
        for task, intake in found.items():
            done.checkpoints += intake.checkpoints
            status = intake.status
            if status is not None and intake.heard:
                pending = [*status.pending, *intake.untaken]
                self._gathering.see(task, status.generation, status.scans, pending)
        for task, intake in found.items():
            for one in intake.seen:
                one.row = score(one.row, points, self._latest)
            for row in intake.parts:
                self._add(row, done)
            for name in intake.rejected:
                self._gathering.refuse(task, intake.generation, name)
            if (ending := _ending(intake)) is not None:
                self._endings[task] = ending
            if task in self._endings and not intake.untaken:
                ending = self._endings.pop(task)
                self._gathering.end(task, ending.generation, how_it_ended(ending))
        for task in lost:
            self._gathering.lose(task)
        self._settle(done)
        self._latest.update({point.key: point.value for point in points})
        return done

    @property
    def waiting(self) -> list[str]:
        """Names of checkpoints of which something is missing."""
        return sorted({_name(round_, self._members) for round_ in self._gathering.waiting})

    # -- parts -----------------------------------------------------------------------------------------------

    def _points(self, found: Mapping[str, Intake]) -> list[Point]:
        """What the run as a whole reported; of single tasks only their own checkpoints would know."""
        return [
            point for task, intake in found.items() for point in intake.points if f"@{task}" not in point.key
        ]

    def _add(self, row: PartRow, done: Assembled) -> None:
        part = self._part(row)
        if part is None:
            return
        done.changes.append(PutPart(row))
        self._apply(self._gathering.add(part), done)

    def _part(self, row: PartRow) -> WrittenPart | None:
        """None: its list of files is gone, so it is of no use."""
        try:
            return WrittenPart(row, tuple(file.path for file in self._blobs.tree(row.digest).files))
        except (NotFound, BlobDamaged):
            return None

    def _apply(self, settled: Settled, done: Assembled) -> None:
        for round_ in settled.reopened:
            done.changes += [PutPart(replace(part.row, checkpoint=None)) for part in round_.parts.values()]
        for checkpoint in settled.withdrawn:
            done.changes.append(UpdateCheckpoint(checkpoint, {"kept": False}))
            text = "a checkpoint is taken back: a task has written a part of it that was not in"
            done.changes.append(self._event("warning", text, {"id": checkpoint}))
        for part in settled.dropped:
            done.changes.append(DropPart(part.row))
            done.freed.add(part.row.digest)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _settle(self, done: Assembled) -> None:
        settled = self._gathering.settle()
        for round_ in settled.complete:
            try:
                row = self._merge(round_, done)
            except StoreError:
                raise
            except StokerError as exc:
                said = refusals.said(_name(round_, self._members), exc)
                done.changes.append(self._event("warning", *said))
                self._gathering.call(round_, "")
                continue
            if round_.replaces and round_.replaces != row.id:
                done.changes.append(UpdateCheckpoint(round_.replaces, {"kept": False}))
            self._gathering.call(round_, row.id)
            done.checkpoints.append(row)
            done.changes.append(AddCheckpoint(row))
            done.changes += [PutPart(replace(part.row, checkpoint=row.id)) for part in round_.parts.values()]
            step = f" at step {row.step}" if row.step is not None else ""
            text = f"checkpoint {row.name}{step} kept"
            done.changes.append(self._event("checkpoint", text, {"id": row.id}))
        settled.complete = []
        self._apply(settled, done)

    def _merge(self, round_: Round, done: Assembled) -> CheckpointRow:
        parts = _in_order(round_, self._members)
        files: dict[int, dict[str, TreeFile]] = {}
        for part in parts:
            mine = files.setdefault(self._place(part.row.task), {})
            mine |= {file.path: file for file in self._blobs.tree(part.row.digest).files}
        merged = merge([(place, Tree.of(mine.values())) for place, mine in sorted(files.items())])
        if merged.apart:
            self._warn(round_, merged.apart, done)
        assert round_.last is not None
        last, first = round_.last.row, parts[0].row
        metrics: dict[str, Any] = {}
        for part in reversed(parts):
            metrics |= part.row.metrics
        return CheckpointRow(
            id=f"ck-{self._run}-{self._attempt}-{last.generation}-{last.task}-{last.number}",
            run=self._run,
            attempt=self._attempt,
            generation=self._generation,
            name=first.name,
            digest=self._blobs.put_tree(merged.tree),
            size=merged.tree.size,
            how=first.how,
            created_at=max(part.row.created_at for part in parts),
            written_at=max(part.row.written_at for part in parts),
            step=next((part.row.step for part in parts if part.row.step is not None), None),
            metrics=metrics,
            world_size=self._world_size,
        )

    def _place(self, task: str) -> int:
        return self._members.index(task) if task in self._members else len(self._members)

    def _warn(self, round_: Round, paths: Sequence[str], done: Assembled) -> None:
        if round_.group in self._warned:
            return
        self._warned.add(round_.group)
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        text = (
            f"tasks wrote different bytes to {paths[0]}{more} of checkpoint {_name(round_, self._members)}: "
            "the first one's is kept there, the others' under task-N/; each task gets its own back"
        )
        done.changes.append(self._event("warning", text))

    def _event(self, kind: str, text: str, data: dict[str, Any] | None = None) -> AddEvent:
        return AddEvent(EventRow(self._run, time.time(), kind, text, data or {}))


def how_it_ended(ending: Ending) -> str:
    """As `Completion.end` wants it: whether it may have been cut off while it was about to write."""
    if ending.kind == "exit" and ending.code == 0:
        return "done"
    return "stopped" if ending.kind == "stopped" and ending.signal != signal.SIGKILL else "lost"


def _ending(intake: Intake) -> Ending | None:
    """The journal's word, once; after a restart only the status still says it. By then the journal was read."""
    if intake.ending is not None or intake.more or intake.status is None:
        return intake.ending
    try:
        return Ending.from_json(intake.status.ending or {}) if intake.status.phase == "ended" else None
    except TypeError:
        return None  # user code can write this file


def _key(row: PartRow) -> tuple[int, str, int]:
    return row.generation, row.task, row.number


def _in_order(round_: Round, members: Sequence[str]) -> list[WrittenPart]:
    order = {task: place for place, task in enumerate(members)}
    return sorted(
        round_.parts.values(), key=lambda part: (order.get(part.row.task, len(order)), part.row.name)
    )


def _name(round_: Round, members: Sequence[str]) -> str:
    return _in_order(round_, members)[0].row.name
