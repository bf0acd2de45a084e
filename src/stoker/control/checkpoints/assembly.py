"""Makes checkpoints of the run from what its tasks committed.

The rules are in `completion`, which is pure. This module handles the rows and the trees. How the control loop uses it:

    assembly = Assembly(blobs, run=..., attempt=..., latest=store.latest_metrics(run))
    done = assembly.begin(generation, {"worker-0": 1, "worker-1": 1}, world_size=2,
                          known=store.checkpoint_parts(run, attempt))     # commit done.changes
    ...
    found = {task: ingester.look() for each task}            # readers with alone=False
    done = assembly.take(found, lost={tasks proven to have ended, after they were collected})
    commit(changes of each Intake + done.changes)            # one transaction: each part counts exactly once
    done.checkpoints                                         # rows that became complete, as in Intake.checkpoints
    sweeper.dropped |= done.freed

Call `replace` for a member that restarts alone, and `leave` for one that is no longer waited for (`on_loss: ignore`).
Call `begin` for the next generation once all bodies have ended and their last looks were taken. It forgets incomplete
checkpoints. With one member a checkpoint is complete at once.
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
    """Result of `begin`, `replace` or `take`."""

    changes: list[Change] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    """Newly complete. They are in `changes` too."""
    freed: set[str] = field(default_factory=set)
    """Trees that are no longer needed once the changes are recorded."""


class Assembly:
    """The checkpoints of one attempt. Used by one thread at a time. It reads and writes trees, so it must not run in the
    control loop's thread. Everything that must survive a restart is in the returned changes. If they could not be
    recorded, make a new instance from the store."""

    def __init__(
        self, blobs: BlobStore, *, run: str, attempt: int, latest: Mapping[str, float] | None = None
    ) -> None:
        """`latest`: the last metrics of earlier attempts."""
        self._blobs = blobs
        self._run = run
        self._attempt = attempt
        self._generation = 0
        self._world_size = 1
        self._members: list[str] = []
        self._completion = Completion({})
        self._latest = dict(latest or {})
        self._endings: dict[str, Ending] = {}
        """Of tasks whose last parts are still being transferred."""
        self._warned: set[str] = set()

    def begin(
        self,
        generation: int,
        members: Mapping[str, int],
        *,
        world_size: int | None = None,
        known: Sequence[PartRow] = (),
    ) -> Assembled:
        """Start a generation, or continue a running one after a restart. Everything of earlier generations is forgotten.

        `members`: task -> generation of its body, in the order of the ranks. `world_size`: number of training processes;
        None: one per member. `known`: the attempt's parts in the store, after a restart."""
        old = self._completion
        fresh = Completion(members)
        if self._members == list(members):
            fresh.know(old.writers())
        rows = {_key(row): row for row in [*known, *(part.row for part in old.forget())]}
        self._completion, self._generation, self._members = fresh, generation, list(members)
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
        """The task restarts alone, with a body of another generation."""
        done = Assembled()
        self._apply(self._completion.replace(task, generation), done)
        self._endings.pop(task, None)
        if task not in self._members:
            self._members.append(task)
        return done

    def leave(self, task: str) -> None:
        """Stop waiting for the task."""
        self._completion.leave(task)

    def take(self, found: Mapping[str, Intake], *, lost: Collection[str] = ()) -> Assembled:
        """Take in the looks at some or all tasks, and score the new checkpoints by the metrics reported so far.

        `lost`: tasks that will write nothing more. Their last look is in `found`, or was taken before."""
        done = Assembled()
        points = self._points(found)
        for task, intake in found.items():
            done.checkpoints += intake.checkpoints
            status = intake.status
            if status is not None and intake.heard:
                pending = [*status.pending, *intake.untaken]
                self._completion.see(task, status.generation, status.scans, pending)
        for task, intake in found.items():
            for one in intake.seen:
                one.row = score(one.row, points, self._latest)
            for row in intake.parts:
                self._add(row, done)
            for name in intake.rejected:
                self._completion.refuse(task, intake.generation, name)
            if (ending := _ending(intake)) is not None:
                self._endings[task] = ending
            if task in self._endings and not intake.untaken:
                ending = self._endings.pop(task)
                self._completion.end(task, ending.generation, how_it_ended(ending))
        for task in lost:
            self._completion.lose(task)
        self._settle(done)
        self._latest.update({point.key: point.value for point in points})
        return done

    @property
    def waiting(self) -> list[str]:
        """Names of incomplete checkpoints."""
        return sorted({_name(round_, self._members) for round_ in self._completion.waiting})

    # -- parts -----------------------------------------------------------------------------------------------

    def _points(self, found: Mapping[str, Intake]) -> list[Point]:
        """Metrics of the run as a whole. Metrics of a single task (`loss@worker-1`) do not score a checkpoint."""
        return [
            point for task, intake in found.items() for point in intake.points if f"@{task}" not in point.key
        ]

    def _add(self, row: PartRow, done: Assembled) -> None:
        part = self._part(row)
        if part is None:
            return
        done.changes.append(PutPart(row))
        self._apply(self._completion.add(part), done)

    def _part(self, row: PartRow) -> WrittenPart | None:
        """None: its list of files is missing or damaged, so the part is unusable."""
        try:
            return WrittenPart(row, tuple(file.path for file in self._blobs.tree(row.digest).files))
        except (NotFound, BlobDamaged):
            return None

    def _apply(self, settled: Settled, done: Assembled) -> None:
        for round_ in settled.reopened:
            done.changes += [PutPart(replace(part.row, checkpoint=None)) for part in round_.parts.values()]
        for checkpoint in settled.withdrawn:
            done.changes.append(UpdateCheckpoint(checkpoint, {"kept": False}))
            text = "a checkpoint is withdrawn: a task has written another part of it"
            done.changes.append(self._event("warning", text, {"id": checkpoint}))
        for part in settled.dropped:
            done.changes.append(DropPart(part.row))
            done.freed.add(part.row.digest)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _settle(self, done: Assembled) -> None:
        settled = self._completion.settle()
        for round_ in settled.complete:
            try:
                row = self._merge(round_, done)
            except StoreError:
                raise
            except StokerError as exc:
                warning = refusals.said(_name(round_, self._members), exc)
                done.changes.append(self._event("warning", *warning))
                self._completion.call(round_, "")
                continue
            if round_.replaces and round_.replaces != row.id:
                done.changes.append(UpdateCheckpoint(round_.replaces, {"kept": False}))
            self._completion.call(round_, row.id)
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
    """The state for `Completion.end`. `lost`: the body may have been interrupted before it wrote its part."""
    if ending.kind == "exit" and ending.code == 0:
        return "done"
    return "stopped" if ending.kind == "stopped" and ending.signal != signal.SIGKILL else "lost"


def _ending(intake: Intake) -> Ending | None:
    """From the journal, once. After a restart, from the status: the journal has already been read by then."""
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
