"""Bringing an attempt up: launcher, code, checkpoint, secrets, and last the order to run.

Everything here may be done again after a crash: the engine adopts what it started, and while there is no
order nothing has run, so code and checkpoint are simply placed anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.blobs import BlobStore
from stoker.control import fleet, orders, retention, secrets
from stoker.control.live import TASK, LiveRun
from stoker.courier import bring_code, bring_outputs, restore_checkpoint
from stoker.engine.base import Engine, Handle, Surroundings, TaskDir
from stoker.errors import StokerError
from stoker.settings import Settings
from stoker.store import Store
from stoker.store.rows import AddEvent, Change, CheckpointRow, EventRow, UpdateCheckpoint


@dataclass(frozen=True)
class Launched:
    handle: Handle
    directory: TaskDir
    resumed_from: CheckpointRow | None
    changes: tuple[Change, ...]


class Launcher:
    """Makes attempts run. Used by the control loop only."""

    def __init__(self, settings: Settings, store: Store, blobs: BlobStore) -> None:
        self._settings = settings
        self._store = store
        self._blobs = blobs

    async def submit(self, live: LiveRun, engine: Engine, bare: str) -> Handle:
        """Ask the engine for the attempt's tasks. `bare`: its own name of the node. May be repeated."""
        assert live.attempt is not None
        values = secrets.load(self._settings.home, live.row.key) if live.job.secrets else {}
        gpus = live.places[0].gpus
        plan = fleet.plan_of(live.job, TASK, 0, bare, gpus, self._settings)
        attempt = fleet.attempt_of(live.row, live.job, live.attempt.number, (plan,), values)
        return await engine.submit(attempt)

    async def launch(self, live: LiveRun, engine: Engine, handle: Handle) -> Launched | None:
        """Bring everything in and give the order; None while the directory is not there yet."""
        directory = await engine.reach(handle, TASK)
        if not directory.exists():
            return None
        if directory.order() is not None:
            return Launched(handle, directory, None, ())
        around = engine.surroundings(live.job)
        resumed, changes = await asyncio.to_thread(self._prepare, live, directory, around)
        return Launched(handle, directory, resumed, tuple(changes))

    def _prepare(
        self, live: LiveRun, directory: TaskDir, around: Surroundings
    ) -> tuple[CheckpointRow | None, list[Change]]:
        assert live.attempt is not None
        run, job = live.row, live.job
        generation = live.attempt.generation
        tree = None
        if run.code:
            bring_code(self._blobs, run.code, directory)
            tree = self._blobs.tree(run.code) if job.setup else None
        resumed, changes = self._restore(live, directory, generation)
        if run.outputs:
            bring_outputs(self._blobs, run.outputs["digest"], directory)
        values = secrets.load(self._settings.home, run.key)
        if values:
            directory.write_secrets(values)
        order = orders.run_order(
            run,
            job,
            seq=1,
            generation=generation,
            around=around,
            setup=orders.setup_plan(around.setups or str(self._settings.home.setups), job, run, tree, around),
            resume_from=resumed.name if resumed else None,
        )
        directory.write_order(order)
        return resumed, changes

    def _restore(
        self, live: LiveRun, directory: TaskDir, generation: int
    ) -> tuple[CheckpointRow | None, list[Change]]:
        """The newest checkpoint whose bytes are still what they were; the damaged ones are let go, aloud."""
        changes: list[Change] = []
        if live.row.attempt <= 1:
            return None, changes
        for row in self._candidates(live):
            try:
                restore_checkpoint(self._blobs, row.digest, directory, generation)
            except StokerError as exc:
                text = f"checkpoint {row.name} is damaged and was not offered: {exc.message}"
                changes.append(UpdateCheckpoint(row.id, {"kept": False}))
                changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text, {"id": row.id})))
                continue
            step = f" (step {row.step})" if row.step is not None else ""
            text = f"attempt {live.row.attempt} goes on from checkpoint {row.name}{step}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "restored", text, {"id": row.id})))
            return row, changes
        return None, changes

    def _candidates(self, live: LiveRun) -> Sequence[CheckpointRow]:
        return retention.newest(self._store.checkpoints(live.id, kept_only=True))
