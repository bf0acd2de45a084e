"""Makes an attempt run: launchers, code, checkpoint, secrets, and last the orders.

Everything here may be repeated after a crash. The engine adopts what it started. A task without an order of the
generation has run nothing of it, so code and checkpoint are placed again. The generation and its checkpoint are recorded
before the first of several orders is written: all members start from the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.blobs import BlobStore
from stoker.control import run_secrets
from stoker.control.checkpoints import retention
from stoker.control.ingest import refusals
from stoker.control.policy.task_phases import TaskEvent, TaskPhase
from stoker.control.startup import attempt_spec, orders
from stoker.control.startup import world as worlds
from stoker.control.state import LiveRun, LiveTask
from stoker.engine.base import Engine, Handle
from stoker.errors import EngineError, StokerError, StoreError
from stoker.frameworks.base import World
from stoker.settings import Settings
from stoker.store import Store
from stoker.store.rows import AddEvent, Change, CheckpointRow, EventRow, UpdateCheckpoint, UpdateRun
from stoker.transfer import bring_code, bring_outputs, outputs_for, restore_checkpoint
from stoker.transfer.folder import folder_tree, folder_view, without_damaged
from stoker.transfer.merge import for_task, together

_TRANSIENT = (StoreError, EngineError)
"""A full or read-only disk, or a task that cannot be reached: the checkpoint is intact, and the restore is retried."""
_SCAN_EVERY = 0.5
"""Seconds between scans of the checkpoint directories of a world until its first checkpoint."""


@dataclass(frozen=True)
class Restored:
    """What a generation starts from."""

    row: CheckpointRow | None
    changes: tuple[Change, ...]


class AttemptLauncher:
    """Makes attempts run. Used by the control loop only."""

    def __init__(self, settings: Settings, store: Store, blobs: BlobStore) -> None:
        self._settings = settings
        self._store = store
        self._blobs = blobs

    async def submit(self, live: LiveRun, engine: Engine, bare: Mapping[str, str]) -> Handle:
        """Ask the engine for the attempt's tasks. `bare`: the engine's own names of their nodes. May be repeated."""
        assert live.attempt is not None
        values = run_secrets.load(self._settings.home, live.row.key) if live.job.secrets else {}
        values = {name: values[name] for name in live.job.secrets if name in values}
        plans = [
            attempt_spec.plan_of(live.row, task, bare[task.name], self._settings)
            for task in live.tasks.values()
        ]
        return await engine.submit(
            attempt_spec.attempt_of(live.row, live.job, live.attempt.number, plans, values)
        )

    async def reach(self, live: LiveRun, engine: Engine) -> list[LiveTask]:
        """Look for the missing task directories. Returns the tasks that still have none."""
        missing = []
        for task in live.tasks.values():
            if task.directory is None:
                directory = await engine.reach(live.handle, task.name)
                if directory.exists():
                    task.directory = directory
                    task.happened(TaskEvent.REACHED)
                    self._adopt(live, task)
                else:
                    missing.append(task)
        return missing

    def recall(self, live: LiveRun) -> None:
        """The generation does not begin. Tasks that have its order already (the connection to another task broke
        meanwhile) count as ordered, so that their bodies are stopped."""
        for task in live.tasks.values():
            if task.up and not task.ordered:
                self._adopt(live, task)

    def _adopt(self, live: LiveRun, task: LiveTask) -> None:
        """Take over the order that the task already has."""
        assert task.directory is not None
        order = task.directory.order()
        live.newest_order = max(live.newest_order, order.generation if order is not None else 0)
        if order is None or order.generation < task.generation or task.joining:
            return
        if task.phase is TaskPhase.READY or (task.phase is TaskPhase.ABSENT and not task.over):
            task.happened(TaskEvent.ORDERED)
            if order.verb == "stop":
                task.stop_sent = "kill" if order.kill else "stop"
                task.happened(TaskEvent.TOLD)

    def choose(self, live: LiveRun) -> CheckpointRow | None:
        """The checkpoint that the next generation starts from, unless it is damaged."""
        candidates, _ = self._candidates(live)
        return candidates[0] if candidates else None

    async def order(
        self,
        live: LiveRun,
        engine: Engine,
        tasks: Sequence[LiveTask],
        world: World | None,
        cpus: Mapping[str, float],
    ) -> Restored:
        """Bring checkpoint, code, outputs and secrets into these tasks, then write their orders. `cpus`: what each task
        may use, where that is known."""
        restored = await asyncio.to_thread(self._restore, live, tasks)
        restored = replace(
            restored, changes=(*await asyncio.to_thread(self._folder, live, tasks), *restored.changes)
        )
        if tasks[0].directory is not None and tasks[0].directory.shared_folder is not None:
            await asyncio.to_thread(self._place, live, tasks[0])  # one folder of all
        work = [
            asyncio.to_thread(self._order, live, engine, task, world, restored.row, cpus.get(task.name))
            for task in tasks
        ]
        if len(work) == 1:
            await work[0]
        else:
            await asyncio.gather(*work)
        return restored

    def _order(
        self,
        live: LiveRun,
        engine: Engine,
        task: LiveTask,
        world: World | None,
        resumed: CheckpointRow | None,
        cpu: float | None,
    ) -> None:
        assert live.attempt is not None and task.directory is not None
        run, job, directory = live.row, task.part.job, task.directory
        around = engine.surroundings(job)
        before = directory.order()
        tree = None
        place = list(live.tasks).index(task.name)
        if run.code:
            self._place(live, task)
            tree = self._blobs.tree(run.code) if job.setup else None
        if before is None and run.outputs:
            bring_outputs(self._blobs, outputs_for(self._blobs, run.outputs, place), directory)
        if before is None:
            values = orders.task_secrets(run, job, around, run_secrets.load(self._settings.home, run.key))
            if values:
                directory.write_secrets(values)
        body = worlds.body(live, task, world)
        order = orders.run_order(
            run,
            job,
            body,
            seq=before.seq + 1 if before else 1,
            generation=task.generation,
            around=around,
            timeout=_remaining(live),
            scan_every=None if live.alone else _SCAN_EVERY,
            hang_after=live.job.hang.after if live.job.hang else None,
            setup=orders.setup_plan(around.setups or str(self._settings.home.setups), job, run, tree, around),
            threads=orders.threads(cpu, worlds.processes(task, world)),
            resume_from=live.redaction.original(resumed.name) if resumed else None,
        )
        directory.write_order(order)

    def _place(self, live: LiveRun, task: LiveTask) -> None:
        """Place the working folder of a task that had no order yet, unless it is there. Later generations find it as they left
        it. Where each task has its own, it gets what the others kept."""
        assert task.directory is not None
        run, again = live.row, task.directory.order() is not None
        if run.code is None or (again and not run.folder):
            return
        view = None
        if run.folder:
            view = folder_view(self._blobs, run.folder, list(live.tasks).index(task.name))
        if again and (live.alone or task.directory.shared_folder is not None or task.folder == view):
            return
        bring_code(self._blobs, folder_tree(self._blobs, run.code, view), task.directory, replace=again)

    def _is_placed(self, live: LiveRun, task: LiveTask) -> bool:
        """Whether its working folder is placed for this generation."""
        if task.directory is None or task.directory.order() is None:
            return task.directory is not None
        return not live.alone and task.directory.shared_folder is None

    def _folder(self, live: LiveRun, tasks: Sequence[LiveTask]) -> list[Change]:
        """Check what was kept of the working folder, where it is to be placed. Damaged files are dropped, with a warning."""
        folder, now = live.row.folder, time.time()
        if not folder or not any(self._is_placed(live, task) for task in tasks):
            return []
        changes: list[Change] = []
        digest, damaged = without_damaged(self._blobs, str(folder["digest"]))
        if damaged:
            folder = {**folder, "digest": digest, "files": folder["files"] - len(damaged)}
            live.update(folder=folder)
            text = (
                f"stored files of the working folder are damaged and not restored: {', '.join(damaged[:5])}"
            )
            changes.append(UpdateRun(live.id, {"folder": folder}))
            changes.append(AddEvent(EventRow(live.id, now, "warning", text)))
        text = folder_text(folder, _subject(live, tasks))
        return [*changes, AddEvent(EventRow(live.id, now, "restored", text))]

    def _restore(self, live: LiveRun, tasks: Sequence[LiveTask]) -> Restored:
        """Restore the newest undamaged checkpoint. Damaged ones are dropped, with a warning."""
        changes: list[Change] = []
        candidates, others = self._candidates(live)
        if others:
            text = f"checkpoint {others[0].name} was written by {others[0].world_size} processes, not {live.world_size}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text, {"id": others[0].id})))
        for row in candidates:
            try:
                self._bring(live, tasks, row, retention.beside(candidates, row))
            except _TRANSIENT:
                raise
            except StokerError as exc:
                text, data = refusals.said(row.name, f"what was stored of it is damaged: {exc.message}")
                changes.append(UpdateCheckpoint(row.id, {"kept": False}))
                event = EventRow(live.id, time.time(), "warning", text, {"id": row.id, **data})
                changes.append(AddEvent(event))
                continue
            step = f" (step {row.step})" if row.step is not None else ""
            text = f"{_subject(live, tasks)} goes on from checkpoint {row.name}{step}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "restored", text, {"id": row.id})))
            return Restored(row, tuple(changes))
        return Restored(None, tuple(changes))

    def _bring(
        self, live: LiveRun, tasks: Sequence[LiveTask], row: CheckpointRow, more: Sequence[CheckpointRow]
    ) -> None:
        """Restore `row`, and `more` if those are undamaged, into the directory of each task."""
        names = live.redaction.original if live.redaction else None
        for task in tasks:
            assert task.directory is not None
            place = list(live.tasks).index(task.name)
            seen = [self._view(one, place) for one in (row, *more)]
            try:
                digest = together(self._blobs, seen)
                restore_checkpoint(self._blobs, digest, task.directory, task.generation, rename=names)
            except _TRANSIENT:
                raise
            except StokerError:
                if not more:
                    raise
                restore_checkpoint(self._blobs, seen[0], task.directory, task.generation, rename=names)

    def _view(self, row: CheckpointRow, place: int) -> str:
        return row.digest if row.world_size is None else for_task(self._blobs, row.digest, place)

    def _candidates(self, live: LiveRun) -> tuple[Sequence[CheckpointRow], Sequence[CheckpointRow]]:
        """The checkpoints it may start from, newest first, and newer ones that a world of another size wrote."""
        assert live.attempt is not None
        if live.row.attempt <= 1 and live.attempt.generation <= 1:
            return [], []
        rows = self._store.checkpoints(live.id, kept_only=True)
        same = live.job.checkpoint.world_size == "same"
        return retention.restorable(rows, world_size=live.world_size, same=same)


def _subject(live: LiveRun, tasks: Sequence[LiveTask]) -> str:
    assert live.attempt is not None
    if live.attempt.generation == 1:
        return f"attempt {live.attempt.number}"
    if len(tasks) < len(live.tasks) and len(tasks) == 1:
        return f"{tasks[0].name}, generation {tasks[0].generation},"
    return f"generation {live.attempt.generation}"


def folder_text(folder: Mapping[str, Any], subject: str) -> str:
    """What an attempt or generation finds in its working folder."""
    count = folder["files"]
    files = "1 file" if count == 1 else f"{count} files"
    text = f"{subject} goes on in the working folder of attempt {folder['attempt']}: {files}"
    if newest := folder.get("newest"):
        text += f", newest {newest}"
        if at := folder.get("newest_at"):
            seconds = max(0.0, folder["at"] - at)
            text += f", {seconds:.0f} s" if seconds < 600 else f", {seconds / 60:.0f} min"
            text += " before the end"
    return text


def _remaining(live: LiveRun) -> float | None:
    """Seconds left of the attempt's timeout, which goes on over generations."""
    assert live.attempt is not None
    if live.job.timeout is None or live.attempt.started_at is None:
        return live.job.timeout
    return max(1.0, live.job.timeout - max(0.0, time.time() - live.attempt.started_at))
