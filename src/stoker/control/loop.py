"""The control loop, which owns all live runs.

Each live run has at most one step under way. Steps of different runs overlap, and their changes share transactions.
Nothing is done before it is recorded: on a store error the loop drops its state in memory and starts a new session from
the database, as after a crash.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from stoker.blobs import BlobStore
from stoker.control import maintenance
from stoker.control.committer import Committer
from stoker.control.context import Context
from stoker.control.fleet import Fleet, FleetMember
from stoker.control.ingest.checkpoint_transfer import Abandoned
from stoker.control.ingest.installed_packages import InstalledPackages
from stoker.control.logs.reader import LogArchive
from stoker.control.notifier import Notifier
from stoker.control.placement.admission import Admission
from stoker.control.placement.engine_watcher import EngineWatcher
from stoker.control.placement.node_health import NodeHealth
from stoker.control.placement.unknown_tasks import UnknownTasks
from stoker.control.policy import hold
from stoker.control.runs import debug_hold
from stoker.control.runs.cleanup import Cleanup
from stoker.control.runs.reconcile import Reconciler
from stoker.control.startup import adoption
from stoker.control.startup.attempt_launcher import AttemptLauncher
from stoker.control.state import LiveRun, LiveTask, numbers_of
from stoker.engine.base import Engine, Observation
from stoker.errors import Conflict, EngineError, EngineUnavailable, StoreError
from stoker.frameworks.roles import parts_of
from stoker.settings import Settings
from stoker.spec import Job
from stoker.spec.states import RunState
from stoker.store import Store
from stoker.store.rows import (
    AttemptRow,
    RunRow,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_START = 15.0
"""Seconds that `start` waits until the runs are loaded; it returns in any case."""
_LAST_STEPS = 5.0
"""Seconds that steps under way have at shutdown. The next server does the rest."""
_FIRST_DELAY = 0.2
_HEALTHY_AFTER = 60.0
"""Seconds of a session after which the delay before the next one is the first delay again."""
_STOP_AGAIN = 60.0
"""Seconds until the engine is asked again to end a task that did not end (it waits inside the kernel)."""
_THREADS = 64
"""For reading tasks and for the store. Enough that a few slow calls (huge checkpoint, dead disk) delay no others."""


class _SessionOver(Exception):
    """Raised to end a session and its tasks."""


class ControlLoop:
    """Runs in its own thread. `start`, `shutdown`, `notify`, `ask` and `observe_from_anywhere` may be called from any
    thread; everything else belongs to the loop's."""

    def __init__(
        self, settings: Settings, store: Store, blobs: BlobStore, fleet: Fleet, notifier: Notifier
    ) -> None:
        self.context = ctx = Context(
            settings=settings,
            store=store,
            blobs=blobs,
            fleet=fleet,
            notifier=notifier,
            wakeups=self,
            archive=LogArchive(settings.home),
            packages=InstalledPackages(store),
            committer=Committer(store),
        )
        self.trouble: str | None = None
        """Why the loop decides nothing at the moment; None: it works."""
        self.node_health = NodeHealth(ctx)
        self.unknown_tasks = UnknownTasks(ctx)
        self.cleanup = Cleanup(ctx)
        self.backups = maintenance.Backups(settings, store)
        self.sweeper = maintenance.Sweeper(store, blobs, settings.home, ctx.dropped)
        self._admission = Admission(ctx)
        self._reconciler = Reconciler(
            ctx, AttemptLauncher(settings, store, blobs), self.node_health, self.cleanup
        )
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._session: asyncio.TaskGroup | None = None
        self._loaded = False
        """This session has loaded all runs. Notices that arrive earlier are handled when loading has finished."""
        self._schedule = asyncio.Event()
        self._watchers: dict[str, EngineWatcher] = {}
        self._notices: list[RunRow] = []

    # -- from any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="control", daemon=True)
        self._thread.start()
        self._ready.wait(timeout=_START)

    def shutdown(self) -> None:
        if self._loop is not None and self._stopping is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=30)
        self.context.packages.shutdown()
        self.context.ports.close()

    def notify(self, row: RunRow) -> None:
        """A run was submitted, or its desired state has changed."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take_notice, row)

    def ask(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float = 30.0) -> T:
        """Run something in the loop's thread and wait for its answer."""
        assert self._loop is not None, "the loop has not been started"
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(timeout)

    # -- the loop --------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="control"))
        self._stopping = asyncio.Event()
        delay = _FIRST_DELAY
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                await self._run_session()
            except* _SessionOver:
                log.info("the control loop ends; tasks go on")
            except* StoreError as group:
                delay = await self._pause(f"cannot record: {_innermost(group)}", delay, began)
            except* Exception as group:  # any error: a new session is better than a server without a loop
                log.exception("unexpected error")
                delay = await self._pause(f"unexpected error: {_innermost(group)}", delay, began)
        for member in self.context.fleet:
            await member.engine.close()

    async def _pause(self, trouble: str, delay: float, began: float) -> float:
        """Wait before the next session. Returns the delay before the one after it."""
        assert self._stopping is not None
        if time.monotonic() - began > _HEALTHY_AFTER:
            delay = _FIRST_DELAY
        self._ready.set()
        self.trouble = trouble
        log.error("%s; beginning again from the database in %.1f s", trouble, delay)
        try:
            await asyncio.wait_for(self._stopping.wait(), delay)
        except TimeoutError:
            pass
        return min(delay * 2, 30.0)

    async def _run_session(self) -> None:
        """One session: from loading the database to the first error or the shutdown."""
        self._reset()
        try:
            await self._serve()
        finally:
            self._session, self._loaded = None, False
            self.context.transfers.close()

    async def _serve(self) -> None:
        assert self._stopping is not None
        async with asyncio.TaskGroup() as group:
            self._session = group
            group.create_task(self.context.committer.run())
            for member in self.context.fleet:
                self._watchers[member.name] = self._watcher(member)
                self._watchers[member.name].begin(group)
            await self._load()
            # Not before all runs that hold places are loaded.
            group.create_task(self._admission.watch(self._schedule))
            self.trouble = None
            self._ready.set()
            for watcher in self._watchers.values():
                watcher.attend(group)
            group.create_task(self._tick())
            group.create_task(self.backups.run())
            group.create_task(self.sweeper.run())
            await self._stopping.wait()
            working = [live.working for live in self.context.runs.values() if live.working is not None]
            if working:
                await asyncio.wait(working, timeout=_LAST_STEPS)
            self.context.transfers.close()  # before the group waits for tasks that wait for transfers
            raise _SessionOver

    def _reset(self) -> None:
        self.context.begin_session()
        self.cleanup.begin_session()
        self.context.scheduler.set_nodes(self.node_health.trusted())
        self._schedule = asyncio.Event()
        self._watchers = {}

    async def _load(self) -> None:
        # Only this machine is waited for: a cluster may be unreachable for hours, and its runs are loaded anyway.
        await self._watchers[self.context.fleet.home].known.wait()
        for attempt in await asyncio.to_thread(self.context.store.unfinished_attempts):
            if attempt.state == "ended" and not attempt.removed:
                await self._take_ended(attempt)
        seen = await self._first_look()
        rows = await asyncio.to_thread(self.context.store.live)
        for row in [*rows, *await adoption.resumed(self.context, {row.id for row in rows}, seen)]:
            row = await adoption.adopt_newer(self.context, row, Job.from_json(row.job), seen.get(row.id, ()))
            await self._adopt(row, seen.get(row.id, ()))
        self._loaded = True
        notices, self._notices = self._notices, []
        for row in notices:
            self._take_notice(row)
        self._schedule.set()

    async def _first_look(self) -> dict[str, list[Observation]]:
        """The tasks on this machine, by run, before any decision: a restored database may not know all of them."""
        engine = self.context.fleet.engine(self.context.fleet.home)
        found: dict[str, list[Observation]] = {}
        try:
            for one in await engine.observe():
                found.setdefault(one.run, []).append(one)
        except EngineUnavailable as exc:
            log.warning("%s: cannot observe: %s", engine.name, exc)
        return found

    async def _adopt(self, row: RunRow, seen: Sequence[Observation]) -> None:
        live = self._live_run(row)
        self.context.runs[row.id] = live
        if live.state.holds:
            attempt = await asyncio.to_thread(self.context.store.attempt, row.id, row.attempt)
            attempt = adoption.at_newest_incarnations(attempt, seen)
            live.begin(attempt)
            leaving = [place.number for place in attempt.placement.values() if place.leaving]
            request = self.context.fleet.request(row, live.job)
            self.context.scheduler.adopt(request, live.places, numbers_of(attempt), leaving)
            self._admission.adopt(live, attempt)
        self.kick(live)

    def _live_run(self, row: RunRow) -> LiveRun:
        job = Job.from_json(row.job)
        return LiveRun(row=row, job=job, parts=parts_of(job))

    async def _take_ended(self, attempt: AttemptRow) -> None:
        """Hold or clean up an ended attempt that the engine still has."""
        if hold.is_kept(attempt):
            row = await asyncio.to_thread(self.context.store.run, attempt.run)
            debug_hold.keep(self.context, row, Job.from_json(row.job), attempt, self.cleanup.begin)
        else:
            self.cleanup.begin(attempt)

    def _take_notice(self, row: RunRow) -> None:
        if not self._loaded:
            self._notices.append(row)
            return
        live = self.context.runs.get(row.id)
        if live is None:
            if row.state != RunState.QUEUED:
                return
            live = self.context.runs[row.id] = self._live_run(row)
        else:
            live.update(desired=row.desired)
        self.kick(live)

    # -- steps -----------------------------------------------------------------------------------------------

    def kick(self, live: LiveRun, task: str = "") -> None:
        """See `Wakeups.kick`. Ignored for a run that this session does not have (any more)."""
        if self.context.runs.get(live.id) is not live:
            return
        for one in [live.tasks[task]] if task in live.tasks else live.tasks.values():
            one.touched = True
        live.dirty = True
        if live.working is None:
            live.working = self._begin_task(self._work(live))

    def kick_later(self, live: LiveRun, delay: float) -> None:
        if live.timer is not None:
            live.timer.cancel()
        live.timer = asyncio.get_running_loop().call_later(delay, self.kick, live)

    async def _work(self, live: LiveRun) -> None:
        try:
            while live.dirty:
                live.dirty = False
                await self._reconciler.step(live)
        except StoreError:
            raise
        except EngineUnavailable as exc:
            log.warning("run %s: %s; trying again", live.id, exc)
            self.kick_later(live, 2.0)
        except Abandoned:
            log.debug("the session ends")
        except Exception:  # any error of one run must not stop the others; the step is tried again
            log.exception("run %s: unexpected error; trying again in 5 s", live.id)
            self.kick_later(live, 5.0)
        finally:
            live.working = None
            if live.dirty and live.id in self.context.runs and live.timer is None:
                self.kick(live)

    def _begin_task(
        self, work: Coroutine[Any, Any, None], *inner: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None] | None:
        """Start `work` in this session; without a session, or while it ends, `work` is dropped. `inner`: coroutines that
        `work` awaits. They are closed even if `work` is cancelled before it begins."""
        if self._session is not None:
            try:
                task = self._session.create_task(work)
            except RuntimeError:
                log.debug("the session ends")
            else:
                for coroutine in inner:
                    task.add_done_callback(lambda _, coroutine=coroutine: coroutine.close())  # type: ignore[misc]
                return task
        for coroutine in (work, *inner):
            coroutine.close()
        return None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except EngineError as exc:
                log.warning("%s", exc)

        self._begin_task(guarded(), work)

    def schedule_soon(self) -> None:
        self._schedule.set()

    def _watcher(self, member: FleetMember) -> EngineWatcher:
        return EngineWatcher(self.context, member, self.unknown_tasks, self.cleanup.is_unknown)

    def observe_from_anywhere(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.observe_soon)

    def observe_soon(self) -> None:
        for watcher in self._watchers.values():
            watcher.observe.set()

    def nodes_changed(self) -> None:
        self.context.scheduler.set_nodes(self.node_health.trusted())
        self.schedule_soon()

    # -- engines ---------------------------------------------------------------------------------------------

    async def join(self, engine: Engine) -> None:
        """Add an engine, or replace the one of the same name."""
        await self._discard(engine.name)
        member = self.context.fleet.add(engine)
        if self._session is not None:
            watcher = self._watchers[engine.name] = self._watcher(member)
            watcher.begin(self._session)
            if self._loaded:
                watcher.attend(self._session)
        self._requeue()

    async def part(self, name: str) -> None:
        """Remove an engine. Conflict: runs are on it."""
        here = [
            live.id for live in self.context.runs.values() if live.attempt is not None and live.engine == name
        ]
        if here:
            raise Conflict(
                f"{len(here)} run(s) are on cluster {name}: {', '.join(sorted(here)[:5])}",
                hint="Wait for them, or stop them first.",
            )
        await self._discard(name)
        self.nodes_changed()
        self._requeue()

    async def _discard(self, name: str) -> None:
        watcher = self._watchers.pop(name, None)
        if watcher is not None:
            watcher.leave()
        member = self.context.fleet.discard(name)
        if member is not None:
            await member.engine.close()

    def _requeue(self) -> None:
        """The engines have changed: kick queued runs, except those whose start is being recorded."""
        for live in self.context.runs.values():
            if live.state is RunState.QUEUED and not self.context.scheduler.holds(live.id):
                self.kick(live)

    # -- time ------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """End launchers that do not stop in time: no event announces them."""
        while True:
            await asyncio.sleep(self.context.settings.control.poll)
            now = time.monotonic()
            for live in list(self.context.runs.values()):
                late = [
                    task
                    for task in live.tasks.values()
                    if task.stop_deadline and now > task.stop_deadline and not task.stopped
                ]
                if late:
                    for task in late:
                        task.stop_deadline = now + _STOP_AGAIN
                    self.spawn(self._end(live, late))
                    self.observe_soon()

    async def _end(self, live: LiveRun, late: Sequence[LiveTask]) -> None:
        for task in late:
            task.forced = True
        try:
            names = [task.name for task in late]
            await self.context.fleet.engine(live.engine).stop(live.handle, grace=timedelta(0), tasks=names)
        except EngineError:
            for task in late:
                task.forced = False  # the engine did not end them
            raise


def _innermost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups."""
    inner = group.exceptions[0]
    return _innermost(inner) if isinstance(inner, BaseExceptionGroup) else inner
