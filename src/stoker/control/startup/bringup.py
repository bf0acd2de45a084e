"""Brings tasks up: asks the engine for them, waits until all are up, and starts a generation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from stoker.control import run_secrets
from stoker.control.checkpoints.assembly import Assembly
from stoker.control.context import Context
from stoker.control.ingest import refusals
from stoker.control.ingest.ingester import Ingester
from stoker.control.ingest.journal_reader import JournalReader, speaker
from stoker.control.ingest.redaction import Redaction
from stoker.control.placement import elastic
from stoker.control.policy import outcome
from stoker.control.policy.task_phases import TaskEvent
from stoker.control.startup import adoption, orders
from stoker.control.startup import world as worlds
from stoker.control.startup.attempt_launcher import AttemptLauncher
from stoker.control.startup.gang_timeout import GangTimeout
from stoker.control.startup.salvage import Salvage
from stoker.control.state import LiveRun, LiveTask
from stoker.engine.base import Engine
from stoker.errors import EngineUnavailable, StokerError, StoreError
from stoker.frameworks.base import World
from stoker.frameworks.roles import has_world
from stoker.spec.states import Cause
from stoker.store.rows import AddCheckpoint, AddEvent, Change, EventRow, PartRow, UpdateAttempt, UpdateRun
from stoker.task import layout
from stoker.task.layout import SharedPart

log = logging.getLogger(__name__)


class BringUp:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context, launcher: AttemptLauncher) -> None:
        self._ctx = ctx
        self._launcher = launcher
        self._gang_timeout = GangTimeout(ctx)
        self._salvager = Salvage(ctx.store, ctx.blobs)

    async def bring(self, live: LiveRun) -> outcome.Outcome | None:
        """One step towards every task having its order. A verdict: the attempt ended before it began."""
        if live.submitted and all(task.ordered and task.ingester for task in live.tasks.values()):
            return None
        try:
            engine = self._ctx.fleet.engine(live.engine)
            if not live.submitted:
                await self._submit(live, engine)
            missing = await self._launcher.reach(live, engine)
            await adoption.catch_up(self._ctx, live)
            await self._adopt(live)
            members = [task for task in live.tasks.values() if not task.joining]
            missing = [task for task in missing if not task.joining]
            if missing or (waiting := [task for task in members if not task.ordered]):
                return await self._start(live, engine, missing, waiting if not missing else members)
            if len(members) < len(live.tasks):
                self._ctx.wakeups.kick_later(live, 1.0)
        except (EngineUnavailable, StoreError):
            raise
        except (StokerError, OSError) as exc:
            if isinstance(exc, OSError) and live.engine != self._ctx.fleet.home:
                # The connection to a remote task broke. What arrived stays; the rest follows when the task answers.
                log.info("run %s: a task does not answer: %s; trying again", live.id, exc)
                return self._not_up(live)
            return await self._drop_joining(live, exc)
        return None

    async def _drop_joining(self, live: LiveRun, exc: Exception) -> outcome.Outcome | None:
        """Bring-up failed. Joining tasks are dropped first, since their failure must not end a world that trains."""
        joining = [task for task in live.tasks.values() if task.joining]
        if not joining:
            return self._failed(live, exc)
        text = (
            f"{', '.join(task.name for task in joining)} cannot join: {getattr(exc, 'message', None) or exc}"
        )
        await elastic.drop(self._ctx, live, joining, text)
        live.dirty = True
        return None

    async def _submit(self, live: LiveRun, engine: Engine) -> None:
        assert live.attempt is not None
        bare = {
            task.name: self._ctx.fleet.bare(live.engine, task.place.node or "")
            for task in live.tasks.values()
        }
        handle = await self._launcher.submit(live, engine, bare)
        live.attempt = replace(live.attempt, handle=dict(handle))
        live.submitted = True

    async def _adopt(self, live: LiveRun) -> None:
        """Start reading the tasks that an earlier server gave an order."""
        found = [task for task in live.tasks.values() if task.ordered and task.ingester is None]
        if found:
            await self._read(live, found)
            await self._ctx.committer.commit(live.redaction.changes(await self._assemble(live, found)))

    async def _start(
        self, live: LiveRun, engine: Engine, missing: Sequence[LiveTask], waiting: Sequence[LiveTask]
    ) -> outcome.Outcome | None:
        assert live.attempt is not None
        if any(task.gone is not None and not task.ordered for task in waiting) or live.closing is not None:
            self._launcher.recall(live)
            return self._not_up(live)
        pause = live.form_at - time.monotonic()
        if any(task.telling is not None and not task.telling.done() for task in waiting):
            # An order to stop that arrives after the next order would end the new body.
            pause = max(pause, 0.2)
        if pause > 0:
            self._ctx.wakeups.kick_later(live, pause)
            return None
        world: World | None = None
        if not missing and has_world(live.job, live.parts):
            first = engine.surroundings(live.job).port
            world = await asyncio.to_thread(worlds.world, live, self._ctx.settings.home, first)
        if missing or (world is None and has_world(live.job, live.parts)):
            return self._not_up(live)
        if not await self._none_has_run(live, engine, waiting):
            return self._not_up(live)
        if len(live.tasks) > 1:
            await self._record_choice(live)
        taken = await self._salvage(live, waiting[0])
        restored = await self._launcher.order(live, engine, waiting, world, self._cpus(live, waiting))
        for task in waiting:
            task.happened(TaskEvent.ORDERED)
            task.wait = None
        live.first_up = None
        values: dict[str, Any] = {"handle": dict(live.handle)}
        if new := [task for task in waiting if not task.had_order]:
            for task in new:
                task.place = replace(task.place, ordered=task.incarnation)
            values["placement"] = {**live.attempt.placement, **{task.name: task.place for task in new}}
        if restored.row is not None:
            values["resumed_from"] = restored.row.id
        live.attempt = replace(live.attempt, **values)
        await self._read(live, [task for task in waiting if task.ingester is None])
        changes: list[Change] = [*restored.changes, UpdateAttempt(live.id, live.attempt.number, values)]
        changes += await self._assemble(live, waiting)
        if live.attempt.generation > 1:
            text = f"generation {live.attempt.generation} starts: {_names(waiting, live)}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "generation", text)))
            changes.append(UpdateRun(live.id, {"reason": ""}))
            live.update(reason="")
        # A crash before this commit loses nothing: names are deterministic.
        await self._ctx.committer.commit(self._with_warnings(live, live.redaction.changes(changes)))
        self._sweep(live, waiting[0], taken)
        return None

    async def _none_has_run(self, live: LiveRun, engine: Engine, tasks: Sequence[LiveTask]) -> bool:
        """Whether none of these tasks has run. A task with a recorded order, but none in its directory, has lost its
        files: it is ended, and becomes a lost task. The same generation is never started twice."""
        lost = [
            task.name
            for task in tasks
            if task.had_order and task.directory and task.directory.order() is None
        ]
        if lost:
            log.warning("run %s: the files of %s are lost: ended", live.id, ", ".join(lost))
            await self._record_lost_files(live, lost)
            self._ctx.wakeups.spawn(engine.stop(live.handle, grace=timedelta(0), tasks=lost))
            self._ctx.wakeups.observe_soon()
        return not lost

    async def _record_lost_files(self, live: LiveRun, tasks: Sequence[str]) -> None:
        """Record the warning once: this runs again until the tasks have ended."""
        assert live.attempt is not None
        text = f"{', '.join(tasks)} had an order, and {layout.ORDER} is gone or cannot be read: ended, to be replaced"
        if live.lost_files != text:
            live.lost_files = text
            await self._ctx.committer.commit([AddEvent(EventRow(live.id, time.time(), "warning", text))])

    async def _salvage(self, live: LiveRun, task: LiveTask) -> list[SharedPart]:
        """Record checkpoints that a lost attempt left on a shared volume, before a checkpoint is chosen."""
        await self._load_secrets(live)
        changes, taken = await asyncio.to_thread(self._salvager.take, live, task)
        if any(isinstance(change, AddCheckpoint) for change in changes):
            # The lost attempt made progress, so earlier faults do not count.
            counted = {"faults": min(1, live.row.faults)}
            changes.append(UpdateRun(live.id, counted))
            live.update(**counted)
        if changes:
            await self._ctx.committer.commit(self._with_warnings(live, live.redaction.changes(changes)))
        return taken

    def _with_warnings(self, live: LiveRun, changes: Sequence[Change]) -> list[Change]:
        """The changes, with an update of the run's warnings if they need one."""
        warnings = refusals.after(live.row.warnings, changes)
        if warnings == live.row.warnings:
            return [*changes]
        live.update(warnings=warnings)
        return [*changes, UpdateRun(live.id, {"warnings": warnings})]

    def _cpus(self, live: LiveRun, tasks: Sequence[LiveTask]) -> dict[str, float]:
        """The CPUs that each task may use: its limit, else its node's."""
        found = {}
        for task in tasks:
            node = self._ctx.fleet.node(live.engine, task.place.node or "")
            cpu = task.part.job.resources.cpu or (node.cpu if node is not None else None)
            if cpu:
                found[task.name] = cpu
        return found

    async def _load_secrets(self, live: LiveRun) -> None:
        """Load the secrets to redact, before anything its tasks wrote is taken in."""
        named = live.job.secrets or orders.shell_secrets(live.row.record)
        if named and not live.redaction:
            values = await asyncio.to_thread(run_secrets.load, self._ctx.settings.home, live.row.key)
            live.redaction = Redaction(values)

    def _sweep(self, live: LiveRun, task: LiveTask, taken: Sequence[SharedPart]) -> None:
        """Remove useless parts from a shared volume, in the background."""
        others = list(self._ctx.runs)
        self._ctx.wakeups.spawn(asyncio.to_thread(self._salvager.sweep, live, task, taken, others))

    async def _record_choice(self, live: LiveRun) -> None:
        """Record the checkpoint, so that all members start from it even if the server dies between two orders."""
        assert live.attempt is not None
        chosen = await asyncio.to_thread(self._launcher.choose, live)
        values: dict[str, Any] = {"resumed_from": chosen.id if chosen else None}
        await self._ctx.committer.commit([UpdateAttempt(live.id, live.attempt.number, values)])
        live.attempt = replace(live.attempt, **values)

    async def _assemble(self, live: LiveRun, started: Sequence[LiveTask]) -> list[Change]:
        """Have the parts of these tasks' checkpoints put together: of a new world, or of tasks that return to it."""
        assert live.attempt is not None
        if live.alone:
            return []
        number, store = live.attempt.number, self._ctx.store
        members = {task.name: task.generation for task in live.tasks.values() if task.ordered}
        known: list[PartRow] = []
        if live.assembly is None:
            known = await asyncio.to_thread(store.checkpoint_parts, live.id, number)
            latest = await asyncio.to_thread(store.latest_metrics, live.id)
            live.assembly = Assembly(self._ctx.blobs, run=live.id, attempt=number, latest=latest)
        elif not any(task.part.on_loss == "world" for task in started):
            done = [live.assembly.replace(task.name, task.generation) for task in started]
            return [change for one in done for change in one.changes]
        begin = partial(live.assembly.begin, world_size=live.world_size, known=known)
        return (await asyncio.to_thread(begin, live.attempt.generation, members)).changes

    async def _read(self, live: LiveRun, tasks: Sequence[LiveTask]) -> None:
        """Start reading these tasks."""
        assert live.attempt is not None
        if not tasks:
            return
        await self._load_secrets(live)
        store = self._ctx.store
        cursors = await asyncio.to_thread(store.cursors, live.id, live.attempt.number)
        again = live.row.attempt > 1 or live.attempt.generation > 1
        latest = await asyncio.to_thread(store.latest_metrics, live.id) if again else {}
        known = await asyncio.to_thread(store.checkpoint_transfers, live.id, live.attempt.number)
        for task in tasks:
            assert task.directory is not None
            reader = JournalReader(
                self._ctx.settings.home,
                task.directory,
                run=live.id,
                attempt=live.attempt.number,
                task=task.name,
                incarnation=task.incarnation,
                generation=task.generation,
                cursors=cursors,
                latest=latest,
                alone=live.alone,
                speaks=live.alone or task.name == speaker(list(live.tasks)),
                logs=self._ctx.settings.logs,
                redaction=live.redaction,
            )
            task.ingester = Ingester(
                reader,
                self._ctx.blobs,
                self._ctx.transfers,
                rename=live.redaction.text if live.redaction else None,
                arrived=self._kicker(live, task.name),
            )
            if known:
                await asyncio.to_thread(task.ingester.resume, known)
            task.wait = None

    def _kicker(self, live: LiveRun, task: str) -> Callable[[], None]:
        """A function that kicks the task from any thread."""
        loop = asyncio.get_running_loop()

        def kick() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: the next server goes on
                loop.call_soon_threadsafe(self._ctx.wakeups.kick, live, task)

        return kick

    def _not_up(self, live: LiveRun) -> outcome.Outcome | None:
        """Some tasks are not up yet, such as pods that wait for a node or an image. A verdict: the attempt ends before it
        begins."""
        down = [task for task in live.tasks.values() if not task.ordered and not task.joining]
        for task in down:
            if task.gone is not None and not task.over:
                task.verdict = outcome.gone(task.gone, task.seen, desired=live.row.desired, last_lines=[])
        if live.closing is not None:
            for task in down:
                if not task.over:
                    task.verdict = live.closing
                    task.happened(TaskEvent.CANCELLED)
            return None
        for task in down:
            if task.wait is not None and task.wait.over:
                return outcome.hopeless(task.wait.cause, task.wait.text, task.wait.patience, task.seen)
        late = self._gang_timeout.judge(live)
        if late is None:
            self._ctx.wakeups.kick_later(live, 1.0)
        return late

    def _failed(self, live: LiveRun, exc: Exception) -> outcome.Outcome:
        log.warning("run %s: attempt could not be brought up: %s", live.id, exc)
        reason = getattr(exc, "message", None) or str(exc)
        return outcome.Outcome(
            Cause.ENGINE_ERROR, None, f"could not be started: {reason}", {"message": reason}
        )

    async def let_go(self, live: LiveRun) -> None:
        """End the tasks of an attempt that never began."""
        if any(task.gone is None for task in live.tasks.values()):
            await self._ctx.fleet.engine(live.engine).stop(live.handle, grace=timedelta(0))


def _names(tasks: Sequence[LiveTask], live: LiveRun) -> str:
    return "all tasks" if len(tasks) == len(live.tasks) else ", ".join(task.name for task in tasks)
