"""Follows tasks from their start to the proof that they are gone, and ends them."""

from __future__ import annotations

import asyncio
import logging
import signal

from stoker.engine.change_feed import Key
from stoker.engine.local.containers.tasks import ContainerTasks
from stoker.engine.local.host import processes
from stoker.engine.local.tasks import registry
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.engine.local.tasks.registry import LocalTask, TaskRegistry
from stoker.engine.local.tasks.watcher import Watcher
from stoker.errors import EngineError, EngineUnavailable
from stoker.task.local_directory import LocalTaskDir

log = logging.getLogger(__name__)

MARGIN = 5.0
"""Seconds beyond the grace period that a launcher has to end its processes before it is killed."""
KILL_SECONDS = 10.0
"""Seconds until the effect of a SIGKILL must be visible."""


class Terminator:
    """Belongs to one event loop; `begin` is called inside it."""

    def __init__(self, tasks: TaskRegistry, container_tasks: ContainerTasks) -> None:
        self._registry = tasks
        self._container_tasks = container_tasks
        self._watcher: Watcher | None = None
        self._ends: dict[Key, asyncio.Event] = {}

    @property
    def watcher(self) -> Watcher:
        assert self._watcher is not None
        return self._watcher

    def begin(self) -> None:
        """May be repeated."""
        if self._watcher is None:
            self._watcher = Watcher(self._launcher_died)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    def watch(self, known: LocalTask) -> None:
        """Watch a task whose launcher was started or found."""
        self._registry.look()
        if self._registry.is_alive(known):
            self.watcher.add(known.place.key(), known.path, known.pidfd)
        self.watcher.notify(known.place.key())

    def _launcher_died(self, key: Key) -> None:
        known = self._registry.get(TaskPlace(*key))
        if known is not None:
            known.ended = True
        if key in self._ends:
            self._ends[key].set()

    async def end(self, known: LocalTask, grace: float) -> None:
        """End a task in any state. Raises EngineError when that is not possible."""
        if known.container and known.identity is None:
            await self.settle([known])  # its container may still run
        if known.proof:
            return
        identity = known.identity
        if identity is not None and self._registry.is_alive(known):
            if grace > 0 and not await self._end_gracefully(known, identity, grace + MARGIN):
                log.warning("%s: launcher %d did not end its processes in time", known.path, identity.pid)
            processes.send(identity, signal.SIGKILL, known.pidfd)
            await self._wait_for_end(known, KILL_SECONDS)
        await self.settle([known])
        if not known.proof and known.identity is None:
            raise EngineUnavailable(f"it is not known whether the container {known.container} exists")
        if not known.proof:
            pid = known.stuck[0] if known.stuck else identity.pid if identity is not None else 0
            raise EngineError(
                f"process {pid} of {known.place.run} does not end",
                hint="It waits in the kernel for a network disk or a GPU that does not respond.",
            )

    async def _end_gracefully(self, known: LocalTask, identity: processes.Identity, seconds: float) -> bool:
        """Have the launcher end its body; the launcher then waits, so that nothing is lost, and is killed here.

        A launcher that was just started may not handle signals yet, and init of a PID namespace ignores signals that
        it does not handle. So SIGTERM is repeated until the launcher writes a status.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        directory = LocalTaskDir(known.path)
        signalled = 0.0
        while loop.time() < end:
            try:
                status, order = directory.status(), directory.order()
            except (OSError, TypeError):
                return True  # the directory is gone or damaged: there is nothing to wait for
            if order is None or (status is not None and status.phase == "ended"):
                return True
            if not signalled or (
                (status is None or status.phase == "ready") and loop.time() - signalled > 0.2
            ):
                processes.send(identity, signal.SIGTERM, known.pidfd)
                signalled = loop.time()
            if await self._wait_for_end(known, 0.03):
                return True
        return False

    async def _wait_for_end(self, known: LocalTask, seconds: float) -> bool:
        """Wait for the launcher's end. False: it still lives after `seconds`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        event = self._ends.setdefault(known.place.key(), asyncio.Event())
        try:
            while True:
                self._registry.look()
                if not self._registry.is_alive(known):
                    return True
                rest = end - loop.time()
                if rest <= 0:
                    return False
                try:
                    await asyncio.wait_for(event.wait(), rest if known.pidfd is not None else min(rest, 0.05))
                except TimeoutError:
                    pass
        finally:
            self._ends.pop(known.place.key(), None)

    async def settle(self, dead: list[LocalTask]) -> None:
        """Prove that these tasks are gone, whose launchers have ended or were never seen."""
        new = [known for known in dead if not known.proof and known.settling is None]
        for batch in [
            [known for known in new if not known.container],
            *([known] for known in new if known.container),
        ]:
            if batch:
                work = asyncio.create_task(self._settle(batch))
                for known in batch:
                    known.settling = work
        await _done({known.settling for known in dead if known.settling is not None})

    async def settled(self, known: LocalTask) -> None:
        """If the task is being settled, wait until that has finished."""
        await _done({known.settling} if known.settling is not None else set())

    async def _settle(self, dead: list[LocalTask]) -> None:
        try:
            sure = [
                known for known in dead if not known.container or await self._container_tasks.settle(known)
            ]
            await asyncio.to_thread(
                registry.settle, [known for known in sure if not self._found_running(known)]
            )
        except OSError as exc:
            raise EngineUnavailable(f"the processes of this machine cannot be read: {exc.strerror}") from exc
        finally:
            for known in dead:
                known.settling = None
        for known in sure:
            current = self._registry.get(known.place) is known  # else it was forgotten or started again
            if known.proof:
                if current:
                    self.watcher.drop(known.place.key())
                self._registry.release(known)
            elif current and self._found_running(known) and known.identity is not None:
                self._registry.started(known, known.identity)
                self.watch(known)

    def _found_running(self, known: LocalTask) -> bool:
        """Its container still runs: an earlier server died before it recorded it."""
        return known.identity is not None and not known.ended and known.pidfd is None

    def forget(self, known: LocalTask) -> None:
        if self._watcher is not None:
            self._watcher.drop(known.place.key())
        self._registry.forget(known)


async def _done(works: set[asyncio.Task[None]]) -> None:
    """Wait without cancelling the works: other callers wait for them too."""
    if works:
        done, _ = await asyncio.wait(works)
        for work in done:
            work.result()
