"""Turns what was read from tasks into changes of rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from stoker.control.checkpoints import retention
from stoker.control.context import Context
from stoker.control.ingest import refusals as refusing
from stoker.control.ingest.journal_reader import Intake
from stoker.control.policy import hold
from stoker.control.startup import salvage
from stoker.control.state import LiveRun, LiveTask
from stoker.engine.base import ASIDE_FOR, SetsAside
from stoker.errors import StokerError
from stoker.spec import refusals
from stoker.spec.run_transitions import RunEvent
from stoker.spec.states import RunState
from stoker.store.rows import (
    AddCheckpoint,
    AddEvent,
    Change,
    CheckpointRow,
    EventRow,
    PutTask,
    PutTransfer,
    TaskRow,
    UpdateAttempt,
    UpdateCheckpoint,
    UpdateRun,
)
from stoker.task import layout
from stoker.transfer import carry_outputs, merge_outputs, outputs_for

_MAX_LEFT = 3
"""Attempts before the last one whose files are left, at most: a run that is often preempted must not fill the disk."""


class Recorder:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._output_threads = ThreadPoolExecutor(4, thread_name_prefix="outputs")
        """Separate from the threads that read tasks: big outputs take long."""

    async def take_in(self, live: LiveRun, found: Mapping[str, Intake]) -> list[Change]:
        changes: list[Change] = []
        checkpoints: list[CheckpointRow] = []
        for name, intake in found.items():
            task = live.tasks[name]
            changes += intake.changes
            checkpoints += intake.checkpoints
            changes += self._status(live, task, intake)
        if live.assembly is not None and found:
            taken = [task for task in live.tasks.values() if task.over and not task.carrying]
            lost = [task.name for task in taken if task.gone is not None]
            done = await asyncio.to_thread(live.assembly.take, found, lost=lost)
            changes += done.changes
            checkpoints = done.checkpoints
            for task in taken:
                if task.part.on_loss == "ignore":
                    live.assembly.leave(task.name)
            self._ctx.dropped |= done.freed
        changes += [PutTransfer(one.row) for intake in found.values() for one in intake.seen]
        if checkpoints:
            live.progressed = live.fresh_checkpoint = True
            changes += self._retain(live, checkpoints)
        changes += self.warn(live, changes)
        started = [intake.started_at for intake in found.values() if intake.started_at is not None]
        if started and live.state is RunState.STARTING:
            changes += self._started(live, max(started))
        return changes

    def warn(self, live: LiveRun, changes: list[Change]) -> list[Change]:
        """Update the run's warnings about refused checkpoints. `changes`: those of this step."""
        warnings = refusing.after(live.row.warnings, live.redaction.changes(changes))
        if warnings == live.row.warnings:
            return []
        live.update(warnings=warnings)
        return [UpdateRun(live.id, {"warnings": warnings})]

    def refusals(
        self, live: LiveRun, changes: list[Change], values: dict[str, Any], *, again: bool = False
    ) -> str:
        """At the end of an attempt: keep its files if the run has no checkpoint because this attempt's were refused.

        Returns where the files will be; empty: nowhere. At the end of the run (not `again`) a warning repeats which
        checkpoints were refused, and `values` gets the run's warnings about the files."""
        found = refusals.read(live.row.warnings)
        text, where = found.summary, ""
        if not text:
            return ""
        kept = self._ctx.store.checkpoints(live.id, kept_only=True)
        if not kept and not any(isinstance(change, AddCheckpoint) for change in changes) and live.launched:
            where, found.files = self._files_left(live, changes, again=again)
        if again and not where:
            return ""
        if found.files:
            values["warnings"] = found.warnings()
            text += f"; no checkpoint of this run is kept: {found.files}"
        changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text)))
        return where

    def _files_left(self, live: LiveRun, changes: list[Change], *, again: bool) -> tuple[str, str]:
        """Where the files of this attempt stay, and a text about those of all attempts."""
        assert live.attempt is not None
        engine = self._ctx.fleet.engine(live.engine)
        days = f"{ASIDE_FOR / 86400:.0f} days"
        attempts = self._ctx.store.attempts(live.id)
        places = {row.number: place for row in attempts if (place := hold.files_of(row))}
        if not refusing.of_last_attempt(self._ctx.store.events(live.id), changes):
            return "", refusing.places(places, days)
        directories = [task.directory for task in live.tasks.values()]
        if not any(directory is not None and directory.exists() for directory in directories):
            gone = "its files are gone with the task that wrote them"
            return "", refusing.places(places, days) or gone
        if again and len(places) >= _MAX_LEFT:
            return "", ""
        if isinstance(engine, SetsAside):
            where = engine.aside(live.handle)
            return where, refusing.places({**places, live.attempt.number: where}, days)
        if again:
            return "", ""
        if all(salvage.shares(directory) for directory in directories):
            where = f"{layout.SHARED}/{live.id}"
            text = f"what attempt {live.row.attempt} wrote is left for {days} on the checkpoint claim, in {where}"
            return where, text
        return "", "what it wrote is removed with its pods; --keep-on-failure keeps them"

    def _status(self, live: LiveRun, task: LiveTask, found: Intake) -> list[Change]:
        changes: list[Change] = []
        status = found.status
        if status is not None and (status.phase != task.reported or status.usage != task.usage):
            task.reported, task.usage = status.phase, dict(status.usage)
            changes.append(PutTask(_row(live, task)))
        if found.ending is not None and found.ending.usage:
            task.usage = dict(found.ending.usage)
        if task.over and task.reported != "ended" and len(live.tasks) > 1:
            # Recorded at once: other tasks may run for long, and the status may be older than the ending.
            task.reported = "ended"
            changes.append(PutTask(_row(live, task)))
        return changes

    def _started(self, live: LiveRun, at: float) -> list[Change]:
        assert live.attempt is not None
        number = live.attempt.number
        first = live.row.started_at or at
        state = live.after(RunEvent.STARTED)
        changes: list[Change] = [
            UpdateRun(live.id, {"state": state, "started_at": first}),
            UpdateAttempt(live.id, number, {"state": "running", "started_at": at}),
            AddEvent(EventRow(live.id, at, "running", f"attempt {number} runs")),
        ]
        live.update(state=state, started_at=first)
        live.attempt = replace(live.attempt, state="running", started_at=at)
        if live.engine == self._ctx.fleet.home:
            lead = next(iter(live.tasks.values()))
            order = lead.directory.order() if lead.directory is not None and live.job.setup else None
            setup = order.setup["directory"] if order and order.setup else None
            record = self._ctx.packages.record(live.row, setup)
            if record is not None:
                changes.append(UpdateRun(live.id, {"record": record}))
                live.update(record=record)
        return changes

    def _retain(self, live: LiveRun, checkpoints: list[CheckpointRow]) -> list[Change]:
        rows = self._ctx.store.checkpoints(live.id, kept_only=True)
        # These checkpoints are not in the store yet: they are newer than all that are.
        newest = max((row.seq for row in rows), default=0)
        fresh = [replace(row, seq=newest + 1 + index) for index, row in enumerate(checkpoints)]
        known = {row.id for row in fresh}
        best = live.job.checkpoint.best
        dropped = retention.to_drop(
            [row for row in rows if row.id not in known] + fresh,
            keep=live.job.checkpoint.keep,
            metric=best.metric if best else None,
            mode=best.mode if best else "max",
        )
        self._ctx.dropped.update(row.digest for row in dropped)
        return [UpdateCheckpoint(row.id, {"kept": False}) for row in dropped]

    def last_rows(self, live: LiveRun) -> list[Change]:
        """The final rows of all tasks."""
        return [PutTask(_row(live, task)) for task in live.tasks.values()]

    async def outputs(self, live: LiveRun, changes: list[Change]) -> dict[str, Any] | None:
        """Transfer the outputs of all tasks and merge them into one tree. None: there are none."""
        if not any(task.ingester is not None for task in live.tasks.values()):
            return None
        carry = partial(self._carry, live)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._output_threads, carry)
        except (StokerError, OSError) as exc:
            text = f"outputs could not be kept: {exc}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text)))
            return None
        if found.get("apart"):
            text = f"tasks left different outputs under the same name: {', '.join(found['apart'][:5])}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text)))
        return found if found["files"] else None

    def _carry(self, live: LiveRun) -> dict[str, Any]:
        blobs, before = self._ctx.blobs, live.row.outputs
        carried: dict[int, tuple[str, int, int]] = {}
        for place, task in enumerate(live.tasks.values()):
            if task.ingester is not None:
                known = outputs_for(blobs, before, place) if before else None
                carried[place] = carry_outputs(task.ingester.directory, blobs, known=known)
        if live.alone:
            digest, files, size = carried[0]
            return {"digest": digest, "files": files, "bytes": size}
        return merge_outputs(blobs, {place: one[0] for place, one in carried.items()}, before)


def _row(live: LiveRun, task: LiveTask) -> TaskRow:
    assert live.attempt is not None
    code = task.verdict.exit_code if task.verdict is not None else None
    phase = "ended" if code is not None else task.reported or "starting"
    return TaskRow(
        live.id,
        live.attempt.number,
        task.name,
        incarnation=task.incarnation,
        phase=phase,
        exit_code=code,
        usage=task.usage,
    )
