"""The local engine: tasks are process trees on this machine that outlive the server."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from stoker.engine.base import Attempt, Handle, Needs, Node, Observation, Presence, Surroundings
from stoker.engine.change_feed import Key
from stoker.engine.local import doctor
from stoker.engine.local import shell as shell_commands
from stoker.engine.local.containers.runtime import ImageUnavailable
from stoker.engine.local.containers.tasks import INPUTS, ContainerTasks
from stoker.engine.local.host import capacity as host_capacity
from stoker.engine.local.host import cgroups, processes
from stoker.engine.local.host import resize as resizing
from stoker.engine.local.host.gpus import Gpus
from stoker.engine.local.host.isolation import Isolation
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.engine.local.tasks.records import TaskRecords
from stoker.engine.local.tasks.registry import DIRECTORY_LOST, RECORD_LOST, LocalTask, TaskRegistry
from stoker.engine.local.tasks.starter import Starter
from stoker.engine.local.tasks.task_info import group_name, render
from stoker.engine.local.tasks.terminator import Terminator
from stoker.errors import Conflict, EngineError, EngineUnavailable, NotFound, Refused
from stoker.linux import syscalls
from stoker.linux.process import boot_id
from stoker.settings import Settings
from stoker.spec import Job, refuse_unsupported
from stoker.task.formats import TaskInfo
from stoker.task.local_directory import LocalTaskDir

log = logging.getLogger(__name__)

DEFAULT_CPU = 1.0
OPEN_FILES = 65_536
"""Enough for a pidfd per task. The server's own soft limit is raised to this, within the hard limit."""


class LocalEngine:
    """Implements Engine, Watches, Drills, Resizes and Shows. One per home and server; used from one event loop.

    Everything in memory can be found again by the next server from directories, records and /proc.
    `close` ends only the fork server.
    """

    name = "local"

    def __init__(self, settings: Settings, collect: Callable[[str, int], None] | None = None) -> None:
        """`collect`: settles the directory of a task whose launcher is dead (`stoker.launcher.recovery.collect`)."""
        self.settings = settings
        self._collect = collect
        self.home = settings.home
        self._gpus = Gpus()
        records = TaskRecords(self.home.engine / "tasks")
        self._starter = Starter(settings, self._gpus, _raise_open_files(), records)
        name = cgroups.home_name(self.home.root)
        self._registry = TaskRegistry(self.home.tasks, name, records)
        self._container_tasks = ContainerTasks(
            settings, name, self._gpus, _raise_open_files(), self._container_names, records
        )
        self._terminator = Terminator(self._registry, self._container_tasks)
        self._starts: dict[Key, asyncio.Task[None]] = {}
        """Containers that are being started."""
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self._first: asyncio.Task[None] | None = None
        self._gpu_lock = asyncio.Lock()

    # -- Engine ----------------------------------------------------------------------------------------------

    def needs(self, job: Job) -> Needs:
        """A run that requests no CPU reserves one core but is not limited to it: alone, it may use every core."""
        resources = job.resources
        cpu = DEFAULT_CPU if resources.cpu is None else resources.cpu
        return Needs(cpu, resources.memory or 0, resources.gpu or 0, frozenset({self.name}))

    def refuse(self, job: Job) -> None:
        if not self.settings.local.enabled:
            raise Refused(
                "this server runs nothing on its own machine ([local] enabled is false)",
                hint="Name a cluster with --cluster; `stoker cluster ls` shows them. [server] cluster is the default.",
                details={"key": "cluster"},
            )
        refuse_unsupported(job, self.name)
        self._container_tasks.refuse(job)

    def surroundings(self, job: Job) -> Surroundings:
        """Images are read from the local runtime: no registry needs to have them."""
        if job.image is not None:
            return Surroundings(inherit=True, inputs=INPUTS)
        return Surroundings(here=True)

    async def capacity(self) -> Sequence[Node]:
        await self._ready()
        if not self.settings.local.enabled:
            return []
        self._look()
        owned = {
            gpu for known in self._registry if self._registry.is_alive(known) for gpu in known.info.gpus or ()
        }
        async with self._gpu_lock:
            gpus = await asyncio.to_thread(self._gpus.look, owned)
        node = Node(
            name="local",
            cpu=host_capacity.cpus(self.settings.local),
            memory=host_capacity.memory(self.settings.local),
            gpus=tuple(gpus),
            isolation=self._starter.isolation.summary(),
            boot_id=boot_id(),
            tags=frozenset({self.name}),
        )
        return [node]

    async def submit(self, attempt: Attempt) -> Handle:
        places = [TaskPlace(attempt.run, attempt.number, plan.name) for plan in attempt.tasks]
        paths = [directories.path_of(self.home.tasks, place) for place in places]
        await self._ready()
        async with self._lock(attempt.run, attempt.number):
            self._look(attempt.run, attempt.number)
            await self._starter.ensure()
            infos = render(attempt, self._starter.isolation)
            if _shares_folder(attempt):
                common = str(directories.common_of(paths[0].parent))
                infos = [replace(info, common=common) for info in infos]
            infos = self._with_guard(places, infos)
            seen = [attempt.seen_by(plan) for plan in attempt.tasks]
            if any(one.job is not None and one.job.image is not None for one in seen):
                runtime = await self._container_tasks.runtime()
                self._container_tasks.tidy()
                infos = [
                    self._container_tasks.info(runtime, info, one) if one.job and one.job.image else info
                    for info, one in zip(infos, seen, strict=True)
                ]
            await _all(
                self._submit(place, path, info, one, plan.started)
                for place, path, info, one, plan in zip(
                    places, paths, infos, seen, attempt.tasks, strict=True
                )
            )
        return {"engine": self.name, "run": attempt.run, "attempt": attempt.number}

    def _with_guard(self, places: Sequence[TaskPlace], infos: Sequence[TaskInfo]) -> list[TaskInfo]:
        """The first task of an attempt guards its working folder. A task that is started again keeps what it had."""
        known = {
            task.place.task: task.info.guards for task in self._registry.of(places[0].run, places[0].attempt)
        }
        first = None if any(known.values()) else infos[0].task
        return [replace(info, guards=known.get(info.task, False) or info.task == first) for info in infos]

    async def observe(self) -> Sequence[Observation]:
        await self._ready()
        self._look()
        try:
            dead = [
                known for known in self._registry if not known.proof and not self._registry.is_alive(known)
            ]
        except OSError as exc:
            raise EngineUnavailable(f"the processes of this machine cannot be read: {exc.strerror}") from exc
        if dead:
            await self._terminator.settle(dead)
        return [self._observation(known) for known in self._registry if not self._vanished(known)]

    async def stop(self, handle: Handle, *, grace: timedelta, tasks: Sequence[str] = ()) -> None:
        run, attempt = _parsed(handle)
        await self._ready()
        async with self._lock(run, attempt):
            self._look(run, attempt)
            wanted = [
                known for known in self._registry.of(run, attempt) if not tasks or known.place.task in tasks
            ]
            await _all(self._stop(known, grace.total_seconds()) for known in wanted)

    async def reach(self, handle: Handle, task: str) -> LocalTaskDir:
        path = directories.path_of(self.home.tasks, TaskPlace(*_parsed(handle), task))
        return LocalTaskDir(str(path), self._collect, directories.shared_folder(path.parent))

    async def remove(self, handle: Handle) -> None:
        await self._clear(handle, directories.discard)

    def aside(self, handle: Handle) -> str:
        return str(directories.aside(self._path(handle)))

    async def set_aside(self, handle: Handle) -> None:
        await self._clear(handle, directories.set_aside)

    def _path(self, handle: Handle) -> Path:
        return directories.path_of(self.home.tasks, TaskPlace(*_parsed(handle), "any")).parent

    async def _clear(self, handle: Handle, away: Callable[[Path], None]) -> None:
        """Forget an ended attempt and remove its directory."""
        run, attempt = _parsed(handle)
        await self._ready()
        async with self._lock(run, attempt):
            self._look(run, attempt)
            tasks = self._registry.of(run, attempt)
            await self._terminator.settle([known for known in tasks if not self._registry.is_alive(known)])
            if alive := [known.place.task for known in tasks if not known.proof]:
                raise Conflict(f"{run} attempt {attempt} still has {', '.join(alive)}", hint="Stop it first.")
            path = self._path(handle)
            try:
                await asyncio.to_thread(away, path)
            except OSError as exc:
                raise EngineError(f"cannot remove {exc.filename or path}: {exc.strerror}") from exc
            for known in tasks:
                self._forget(known)

    async def close(self) -> None:
        """Called when the server ends; tasks continue."""
        await self._cancel_starts(list(self._starts))
        await self._container_tasks.close()
        self._terminator.close()
        await self._starter.close()
        self._registry.close()

    # -- Watches, Drills -------------------------------------------------------------------------------------

    async def changes(self) -> AsyncIterator[Key]:
        await self._ready()
        feed = self._terminator.watcher.subscribe()
        try:
            async for key in feed:
                yield key
        finally:
            self._terminator.watcher.unsubscribe(feed)

    async def hurt(self, handle: Handle, task: str, how: str) -> str:
        if how not in ("process", "launcher"):
            raise EngineError(f"cannot hurt a task by {how!r}", hint="Choices: process, launcher.")
        known, identity = await self._alive(handle, task)
        if how == "launcher":
            processes.send(identity, signal.SIGKILL, known.pidfd)
            return f"killed launcher {identity.pid}"
        children = syscalls.children(identity.pid)
        bodies = [child for child in children if processes.task_directory(child) == known.path]
        if known.info.pid_namespace and not bodies:
            # Its environment cannot be read. In a PID namespace a launcher has no other children.
            bodies = children
        if bodies:
            processes.kill(bodies[:1], lambda: syscalls.children(identity.pid))
            return f"killed process {bodies[0]}"
        raise NotFound(f"{task} of {known.place.run} has no training process")

    # -- Resizes, Shows --------------------------------------------------------------------------------------

    async def resize(self, handle: Handle, task: str, *, cpu: float | None, memory: int | None) -> str | None:
        known, identity = await self._alive(handle, task)
        if known.container and known.info.pid_namespace:
            reason = await asyncio.to_thread(resizing.refuse_container, identity.pid, memory)
            return reason or await self._container_tasks.update(known, cpu, memory)
        return await asyncio.to_thread(
            resizing.resize, known.group, self._starter.isolation, cpu=cpu, memory=memory
        )

    def manifest(self, attempt: Attempt) -> str | None:
        return None

    async def check(self) -> Sequence[Mapping[str, Any]]:
        """The facts of `doctor`."""
        await self._ready()
        facts = await asyncio.to_thread(doctor.doctor_facts, self.settings, self._starter.isolation)
        oks = {doctor.Health.OK: True, doctor.Health.WARN: None, doctor.Health.FAIL: False}
        return [
            {"name": fact.name, "ok": oks[fact.status], "text": fact.text, "hint": fact.fix} for fact in facts
        ]

    async def shell(self, handle: Handle, task: str) -> Mapping[str, Any]:
        known, identity = await self._alive(handle, task)
        await self._starter.ensure()
        if not known.container:
            return {"argv": shell_commands.argv(identity.pid, known.path, self._starter.bundle)}
        if not known.info.pid_namespace:
            raise EngineError(f"{task} of {known.place.run} runs without a launcher and cannot be entered")
        return {
            "argv": shell_commands.container_argv(
                await self._container_tasks.runtime(), known, self._starter.bundle
            )
        }

    async def _alive(self, handle: Handle, task: str) -> tuple[LocalTask, processes.Identity]:
        place = TaskPlace(*_parsed(handle), task)
        await self._ready()
        self._look(place.run, place.attempt)
        known = self._registry.get(place)
        if known is None or known.identity is None or not self._registry.is_alive(known):
            raise NotFound(f"{task} of {place.run} is not running")
        return known, known.identity

    # -- what is known ---------------------------------------------------------------------------------------

    @property
    def isolation(self) -> Isolation:
        """What is enforced and how; known after the first call."""
        return self._starter.isolation

    async def _ready(self) -> None:
        """Probe the machine and find existing tasks, once per server. A failure is tried again."""
        if self._first is None or (
            self._first.done() and (self._first.cancelled() or self._first.exception())
        ):
            self._first = asyncio.create_task(self._initialise())
        await asyncio.shield(self._first)

    async def _initialise(self) -> None:
        await self._starter.probe()
        self._terminator.begin()
        self._look()
        await asyncio.to_thread(self._tidy)
        if any(self._container_names()):
            self._container_tasks.tidy()  # only for homes that have containers: podman leaves files behind

    def _container_names(self) -> set[str]:
        """Containers of tasks that may still run."""
        return {known.container for known in self._registry if not known.proof}

    def _tidy(self) -> None:
        """Remove what earlier servers left unfinished."""
        keep = {group_name(*known.place.key()) for known in self._registry}
        try:
            directories.discard_unfinished(self.home.tasks)
            directories.discard_old(self.home.tasks)
            cgroups.remember(self.home.engine / "cgroups.json", self._starter.isolation.tree, keep)
        except OSError as exc:
            log.warning("leftovers of earlier tasks could not be removed: %s", exc)

    def _look(self, run: str | None = None, attempt: int = 0) -> None:
        """Adopt unknown tasks, of one attempt or of the whole home, and mark launchers that have ended."""
        try:
            found = self._registry.refresh() if run is None else self._registry.refresh_attempt(run, attempt)
        except OSError as exc:
            raise EngineUnavailable(f"{self.home.tasks} cannot be read: {exc.strerror}") from exc
        self._registry.look()
        for known in found:
            if self._registry.is_alive(known):
                self._terminator.watcher.add(known.place.key(), known.path, known.pidfd)

    def _observation(self, known: LocalTask) -> Observation:
        presence = Presence.GONE
        proof = known.proof
        if proof and known.cause == "image":
            proof = str(known.evidence.get("message") or proof)
        if not proof:
            presence = Presence.ALIVE if self._registry.is_alive(known) else Presence.SILENT
            if known.stuck:
                proof = f"process {known.stuck[0]} does not die"
        return Observation(
            run=known.place.run,
            attempt=known.place.attempt,
            task=known.place.task,
            incarnation=known.info.incarnation,
            presence=presence,
            proof=proof,
            handle={"engine": self.name, "run": known.place.run, "attempt": known.place.attempt},
            cause=known.cause if presence is Presence.GONE else "",
            evidence=known.evidence,
            waiting=known.waiting if known.starting else "",
            gpus=tuple(known.info.gpus or ()) if known.recorded else (),
        )

    def _vanished(self, known: LocalTask) -> bool:
        """Whether it is dead and another program removed its directory: then nothing is left to observe."""
        if not known.proof or known.cause or Path(known.path).is_dir():
            return False
        self._forget(known)
        return True

    def _forget(self, known: LocalTask) -> None:
        """Also removes the cgroup of a task that never started; other cgroups went when the end was proven."""
        self._terminator.forget(known)
        if known.identity is None and known.group is not None:
            cgroups.remove(known.group)

    # -- starting --------------------------------------------------------------------------------------------

    async def _submit(
        self, place: TaskPlace, path: Path, info: TaskInfo, attempt: Attempt, started: bool
    ) -> None:
        if (known := self._registry.get(place)) is not None:
            await self._terminator.settled(known)  # the new start must not be mistaken for the old task
            known = self._registry.get(place)
        if known is not None and (known.info.incarnation > info.incarnation or known.starting):
            return
        if known is not None and (known.identity is not None or known.unidentified):
            if known.info.incarnation == info.incarnation:
                await self._end_without_directory(known)
                return
            await self._archive(known, path)
        elif started:
            await self._settle_lost(known, place, path, info)
            return
        known = LocalTask(place, str(path), info, group=info.cgroup, starting=True)
        self._registry.add(known)
        if info.container is not None:
            known.container = self._container_tasks.name(place, info.incarnation)
            if info.pid_namespace:
                self._starts[place.key()] = asyncio.create_task(self._start_container(known, attempt))
                return
        try:
            self._registry.started(known, await self._starter.start(known))
        except BaseException:  # cancelled or failed: in both cases it may be tried again
            known.starting = False
            raise
        self._terminator.watch(known)

    async def _end_without_directory(self, known: LocalTask) -> None:
        """End a launcher whose directory was deleted: it cannot get orders, and its output is lost."""
        if Path(known.path).is_dir() or known.cause:
            return
        if not known.proof:
            log.warning("%s was deleted: its processes are ended", known.path)
            await self._terminator.end(known, 0)
        known.cause, known.proof = "lost", f"its task directory was deleted; {known.proof}"

    async def _settle_lost(
        self, known: LocalTask | None, place: TaskPlace, path: Path, info: TaskInfo
    ) -> None:
        """The task ran before and the record of its launcher is lost: find and end what still runs of it."""
        if known is None:
            known = LocalTask(place, str(path), info, group=info.cgroup)
            if info.container is not None:
                known.container = self._container_tasks.name(place, info.incarnation)
            self._registry.add(known)
        known.recorded, known.unidentified, known.proof = False, not known.container, ""
        await self._terminator.settle([known])
        if known.identity is not None:  # its container still runs
            await self._end_without_directory(known)
        elif known.proof:
            known.cause, known.proof = "lost", RECORD_LOST if path.is_dir() else DIRECTORY_LOST

    async def _start_container(self, known: LocalTask, attempt: Attempt) -> None:
        """In the background, because a pull may take long. A failure becomes the task's end."""
        try:
            self._registry.started(
                known, await self._container_tasks.start(known, attempt, self._starter.bundle)
            )
        except asyncio.CancelledError:
            known.starting = False
            raise
        except EngineUnavailable as exc:
            log.warning("%s: %s", known.path, exc)
            known.starting = False  # the next `observe` finds out what happened
            self._terminator.watcher.notify(known.place.key())
        except (EngineError, OSError) as exc:
            known.starting = False
            known.cause = "image" if isinstance(exc, ImageUnavailable) else "engine-error"
            known.proof = exc.message if isinstance(exc, EngineError) else str(exc)
            known.evidence = {"message": known.proof, "hint": getattr(exc, "hint", None) or ""}
            self._terminator.watcher.notify(known.place.key())
        else:
            self._terminator.watch(known)
        finally:
            known.waiting = ""
            self._starts.pop(known.place.key(), None)

    async def _stop(self, known: LocalTask, grace: float) -> None:
        await self._cancel_starts([known.place.key()])
        await self._terminator.end(known, grace)

    async def _cancel_starts(self, keys: list[Key]) -> None:
        tasks = [self._starts[key] for key in keys if key in self._starts]
        for task in tasks:
            task.cancel()
        if tasks:
            # Unlike gather, wait does not cancel the tasks a second time if this coroutine is cancelled.
            await asyncio.wait(tasks)

    async def _archive(self, known: LocalTask, path: Path) -> None:
        if not self._registry.is_alive(known):
            await self._terminator.settle([known])
        if not known.proof:
            raise Conflict(
                f"{known.place.task} of {known.place.run} is still running at incarnation {known.info.incarnation}",
                hint="Stop it first.",
            )
        self._terminator.forget(known)
        directories.archive(path, known.info.incarnation)

    def _lock(self, run: str, attempt: int) -> asyncio.Lock:
        return self._locks.setdefault((run, attempt), asyncio.Lock())


def _shares_folder(attempt: Attempt) -> bool:
    """Whether its tasks work in one folder: those of a job that may have several. Without a launcher there is none."""
    job = attempt.job
    return job is not None and job.launcher != "none" and (job.workers.max > 1 or bool(job.roles))


def _parsed(handle: Handle) -> tuple[str, int]:
    return str(handle["run"]), int(handle["attempt"])


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all, then raise the first error: nothing is left half done in the background."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


@cache
def _raise_open_files() -> tuple[int, int]:
    """Raise the server's own soft limit, once; returns the old limits, for the tasks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft, hard
