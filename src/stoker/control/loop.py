"""The one loop that owns all live runs.

Each live run has at most one step under way; steps of different runs overlap, and what they record is gathered
into common transactions. Whatever the store cannot record is not done: on a store error the loop forgets all it
holds in memory and begins again from the database, as after a crash.
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
from stoker.control import chores
from stoker.control.archive import LogArchive
from stoker.control.commits import Committer
from stoker.control.hub import Hub
from stoker.control.launch import Launcher
from stoker.control.live import LiveRun
from stoker.control.packages import Packages
from stoker.control.steps import Steps
from stoker.engine.base import Engine, Node, Observation, Presence, Watches
from stoker.errors import EngineError, EngineUnavailable, StoreError
from stoker.scheduling import NodeShape, Scheduler, Start
from stoker.settings import Settings
from stoker.spec import Job
from stoker.spec.words import RunState
from stoker.store import Store
from stoker.store.rows import AddAttempt, AddEvent, AttemptRow, Change, EventRow, RunRow, UpdateRun

log = logging.getLogger(__name__)
T = TypeVar("T")

_UNLISTED = 3
"""Looks in a row that must not list an attempt before it counts as gone: a directory being made is not there yet."""
_START = 15.0
"""Seconds that `start` waits for the first look at engine and database; both may come later."""
_LAST_STEPS = 5.0
"""Seconds that steps under way have at the end. What they leave undone the next server does."""
_SAFETY_NET = 10.0
"""Seconds between unprompted looks at a running task when the engine watches by itself."""
_FIRST_DELAY = 0.2
_WELL = 60.0
"""Seconds without trouble after which the next one is the first again."""
_STUCK = 60.0
"""Seconds until a task that the engine could not end (it waits inside the kernel) is tried again."""
_THREADS = 32
"""For looks at tasks and for the store: a few slow ones (a huge checkpoint, a dead disk) hold up nobody else."""
_AT_ONCE = 10
"""How many tasks are looked at together, unprompted."""


class _Over(Exception):
    """Ends a session and everything in it."""


class Loop:
    """Runs in its own thread. `notify`, `preempt` and `ask` may be called from any thread; everything else belongs
    to the loop's."""

    def __init__(self, settings: Settings, store: Store, blobs: BlobStore, engine: Engine, hub: Hub) -> None:
        self.settings = settings
        self.store = store
        self.blobs = blobs
        self.engine = engine
        self.hub = hub
        self.trouble: str | None = None
        """Why nothing is being decided at the moment; None when all is well."""
        self.nodes: Sequence[Node] = ()
        self.runs: dict[str, LiveRun] = {}
        self.scheduler = Scheduler()
        self.committer = Committer(store)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._session: asyncio.TaskGroup | None = None
        self._schedule = asyncio.Event()
        self._observe = asyncio.Event()
        self._capacity_known = asyncio.Event()
        self._notices: list[RunRow] = []
        self._steps = Steps(self, Launcher(settings, store, blobs, engine))
        self.cleaning: set[tuple[str, int]] = set()
        self.archive = LogArchive(settings.home)
        self.packages = Packages(store)
        self.sweeper = chores.Sweeper(store, blobs)

    # -- from any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="control", daemon=True)
        self._thread.start()
        self._ready.wait(timeout=_START)

    def shutdown(self) -> None:
        if self._loop is not None and self._stopping is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=30)
        self.packages.shutdown()

    def notify(self, row: RunRow) -> None:
        """A run was submitted or people want something else of it."""
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
            except* _Over:
                log.info("the control loop ends; tasks go on")
            except* StoreError as group:
                delay = await self._begin_again(f"cannot record: {_first(group)}", delay, began)
            except* Exception as group:  # whatever it is: a server that decides nothing any more helps nobody
                log.exception("unexpected trouble")
                delay = await self._begin_again(f"unexpected trouble: {_first(group)}", delay, began)
        await self.engine.close()

    async def _begin_again(self, trouble: str, delay: float, began: float) -> float:
        """Wait before the next session; how long to wait before the one after it."""
        assert self._stopping is not None
        if time.monotonic() - began > _WELL:
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
        """From the database to the first store error or the end."""
        assert self._stopping is not None
        self._forget()
        async with asyncio.TaskGroup() as group:
            self._session = group
            group.create_task(self.committer.run())
            group.create_task(self._watch_capacity())
            group.create_task(self._watch_schedule())
            await self._load()
            self.trouble = None
            self._ready.set()
            group.create_task(self._watch_presence())
            group.create_task(self._watch_changes())
            group.create_task(self._tick())
            group.create_task(self._look_again())
            group.create_task(chores.backups(self.settings, self.store))
            group.create_task(self.sweeper.run())
            await self._stopping.wait()
            working = [live.working for live in self.runs.values() if live.working is not None]
            if working:
                await asyncio.wait(working, timeout=_LAST_STEPS)
            raise _Over

    def _forget(self) -> None:
        for live in self.runs.values():
            if live.timer is not None:
                live.timer.cancel()
        self.runs.clear()
        self.cleaning.clear()
        self.scheduler = Scheduler()
        self.scheduler.set_nodes([_shape(node) for node in self.nodes])
        self.committer = Committer(self.store)
        self._schedule, self._observe, self._capacity_known = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )

    async def _load(self) -> None:
        await self._capacity_known.wait()
        for row in await asyncio.to_thread(self.store.live):
            await self._adopt(row)
        for attempt in await asyncio.to_thread(self.store.unfinished_attempts):
            if attempt.state == "ended" and not attempt.removed:
                self.clean(attempt)
        notices, self._notices = self._notices, []
        for row in notices:
            self._take_notice(row)
        self._schedule.set()

    async def _adopt(self, row: RunRow) -> None:
        live = LiveRun(row=row, job=Job.from_json(row.job))
        self.runs[row.id] = live
        if live.state.holds:
            live.begin(await asyncio.to_thread(self.store.attempt, row.id, row.attempt))
            self.scheduler.adopt(live.request, live.places)
        self.kick(live)

    def _take_notice(self, row: RunRow) -> None:
        if self._session is None or self.trouble is not None:
            self._notices.append(row)
            return
        live = self.runs.get(row.id)
        if live is None:
            if row.state != RunState.QUEUED:
                return
            live = self.runs[row.id] = LiveRun(row=row, job=Job.from_json(row.job))
        else:
            live.update(desired=row.desired)
        self.kick(live)

    # -- steps -----------------------------------------------------------------------------------------------

    def kick(self, live: LiveRun) -> None:
        """There may be something to do for this run."""
        live.dirty = True
        if live.working is None and self._session is not None:
            live.working = self._session.create_task(self._work(live))

    def kick_later(self, live: LiveRun, delay: float) -> None:
        if live.timer is not None:
            live.timer.cancel()
        live.timer = asyncio.get_running_loop().call_later(delay, self.kick, live)

    async def _work(self, live: LiveRun) -> None:
        try:
            while live.dirty:
                live.dirty = False
                await self._steps.step(live)
        except StoreError:
            raise
        except EngineUnavailable as exc:
            log.warning("run %s: %s; trying again", live.id, exc)
            self.kick_later(live, 2.0)
        except Exception:  # one run's trouble, whatever it is, must not stop the others; it is tried again
            log.exception("run %s: unexpected trouble; trying again in 5 s", live.id)
            self.kick_later(live, 5.0)
        finally:
            live.working = None
            if live.dirty and live.id in self.runs and live.timer is None:
                self.kick(live)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Something of nobody's run, in the background. An engine that cannot do it is no reason to end."""

        async def guarded() -> None:
            try:
                await work
            except EngineError as exc:
                log.warning("%s", exc)

        if self._session is not None:
            self._session.create_task(guarded())

    def schedule_soon(self) -> None:
        self._schedule.set()

    def observe_soon(self) -> None:
        self._observe.set()

    async def _watch_schedule(self) -> None:
        while True:
            await self._schedule.wait()
            self._schedule.clear()
            starts = self.scheduler.decide()
            if starts:
                await self._begin(starts)

    async def _begin(self, starts: Sequence[Start]) -> None:
        """Record the intent, all starts in one transaction; then let each run's step act on it."""
        now = time.time()
        changes: list[Change] = []
        begun: list[tuple[LiveRun, AttemptRow]] = []
        isolation = {node.name: dict(node.isolation) for node in self.nodes}
        for start in starts:
            live = self.runs[start.id]
            placement = {
                f"worker-{index}": {
                    "node": place.node,
                    "gpus": list(place.gpus),
                    "cpu": live.ask.cpu,
                    "memory": live.ask.memory,
                    "isolation": isolation.get(place.node, {}),
                }
                for index, place in enumerate(start.places)
            }
            number = live.row.attempt + 1
            attempt = AttemptRow(
                run=live.id, number=number, created_at=now, engine=self.engine.name, placement=placement
            )
            changes.append(AddAttempt(attempt))
            changes.append(UpdateRun(live.id, {"state": RunState.STARTING, "attempt": number, "reason": ""}))
            changes.append(AddEvent(EventRow(live.id, now, "starting", f"attempt {number} starts")))
            begun.append((live, attempt))
        await self.committer.commit(changes)
        for live, attempt in begun:
            live.update(state=RunState.STARTING, attempt=attempt.number, reason="")
            live.begin(attempt)
            self.hub.publish(live.id)
            self.kick(live)

    # -- watching --------------------------------------------------------------------------------------------

    async def _watch_capacity(self) -> None:
        while True:
            try:
                nodes = await self.engine.capacity()
            except EngineUnavailable as exc:
                log.warning("capacity unknown: %s", exc)
            else:
                if nodes != self.nodes or not self._capacity_known.is_set():
                    self.nodes = nodes
                    self.scheduler.set_nodes([_shape(node) for node in nodes])
                    self.schedule_soon()
                self._capacity_known.set()
            await asyncio.sleep(5.0)

    async def _watch_changes(self) -> None:
        if not isinstance(self.engine, Watches):
            return
        async for run, attempt, _task in self.engine.changes():
            live = self.runs.get(run)
            if live is not None and live.attempt is not None and live.attempt.number == attempt:
                self.kick(live)

    async def _watch_presence(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._observe.wait(), self.settings.control.poll)
            except TimeoutError:
                pass
            self._observe.clear()
            try:
                before = {
                    (live.id, live.attempt.number)
                    for live in self.runs.values()
                    if live.launched and live.attempt
                }
                seen = await self.engine.observe()
            except EngineUnavailable as exc:
                log.warning("cannot observe: %s", exc)
                continue
            self._compare(before, seen)

    def _compare(self, before: set[tuple[str, int]], seen: Sequence[Observation]) -> None:
        listed = set()
        for observation in seen:
            listed.add((observation.run, observation.attempt))
            live = self.runs.get(observation.run)
            if live is None or live.attempt is None or live.attempt.number != observation.attempt:
                self._steps.orphan(observation)
            elif observation.presence is Presence.GONE and live.launched and live.gone is None:
                live.gone = observation.proof or "its launcher is gone"
                self.kick(live)
        for run, number in before - listed:
            live = self.runs.get(run)
            if live is None or live.attempt is None or live.attempt.number != number:
                continue
            live.missing += 1
            if live.missing >= _UNLISTED and live.gone is None:
                live.gone = "its task directory is gone"
                self.kick(live)

    async def _tick(self) -> None:
        """What no event announces: a launcher that does not stop."""
        while True:
            await asyncio.sleep(self.settings.control.poll)
            now = time.monotonic()
            for live in list(self.runs.values()):
                if live.stop_deadline is not None and now > live.stop_deadline and live.launched:
                    live.stop_deadline = now + _STUCK
                    self.spawn(self.engine.stop(live.handle, grace=timedelta(0)))
                    self.observe_soon()

    async def _look_again(self) -> None:
        """A change that nobody noticed: every task is looked at now and then, a few at a time. All at once would
        hold up everybody who waits for an answer."""
        interval = _SAFETY_NET if isinstance(self.engine, Watches) else self.settings.control.poll
        while True:
            holding = [live for live in self.runs.values() if live.state.holds]
            slices = [holding[at : at + _AT_ONCE] for at in range(0, len(holding), _AT_ONCE)] or [[]]
            for part in slices:
                await asyncio.sleep(interval / len(slices))
                for live in part:
                    if self.runs.get(live.id) is live and live.state.holds:
                        self.kick(live)

    def clean(self, attempt: AttemptRow) -> None:
        """Remove what the engine still holds of an ended attempt."""
        if self._session is not None and (attempt.run, attempt.number) not in self.cleaning:
            self.cleaning.add((attempt.run, attempt.number))
            self._session.create_task(self._steps.clean(attempt))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong, out of its wrappings."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _shape(node: Node) -> NodeShape:
    gpus = tuple(gpu.id for gpu in node.gpus if gpu.healthy)
    return NodeShape(name=node.name, cpu=node.cpu, memory=node.memory, gpus=gpus, ready=node.ready)
