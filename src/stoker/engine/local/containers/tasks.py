"""Tasks in containers: pulls the image, starts the launcher in it, finds containers again, proves them gone.

A pull may take long, so a task is `starting` meanwhile, in the background, and has no directory yet. The container is
created after the pull, and started only by the server that created it. If that server died in between, the next one
removes the container, so that nothing starts that was given up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stoker.engine.base import Attempt
from stoker.engine.local.containers import commands
from stoker.engine.local.containers import runtime as runtimes
from stoker.engine.local.containers.commands import Container, Runtime
from stoker.engine.local.host import processes
from stoker.engine.local.host.gpus import Gpus
from stoker.engine.local.host.processes import Identity
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.records import TaskRecords
from stoker.engine.local.tasks.registry import LocalTask
from stoker.errors import EngineError, EngineUnavailable, Refused
from stoker.settings import Settings
from stoker.spec import Job
from stoker.spec.names import input_path
from stoker.task import container_layout
from stoker.task.formats import TaskInfo

log = logging.getLogger(__name__)

INPUTS = "/stoker/inputs"
"""Where a container has its inputs, each under its name; as in a pod."""
INSTALL = "Install podman, or leave `image` out to run in this Python environment."
ENDING = 5.0
"""Seconds that a runtime may take to notice that a container ended."""
PAUSES = (1.0, 60.0)
"""Seconds between two searches for leftover containers: at first, and at most."""

_NEEDS_PYTHON = "The image needs Python 3.9 or newer; name it with `python:`, or use `launcher: none`."


class ContainerTasks:
    """Belongs to one event loop. The runtime is searched for when the first task needs it: most homes never do.

    `keep` returns the containers of known tasks; any other container of this home is a leftover.
    """

    def __init__(
        self,
        settings: Settings,
        home: str,
        gpus: Gpus,
        open_files: tuple[int, int],
        keep: Callable[[], set[str]],
        records: TaskRecords,
    ) -> None:
        self._settings = settings
        self._home = home
        self._keep = keep
        self._records = records
        self._gpus = gpus
        self._open_files = open_files
        self._runtime: Runtime | None = None
        self._runtime_lock = asyncio.Lock()
        self._reported: set[str] = set()
        self._tidying: asyncio.Task[None] | None = None
        self._search_until = 0.0
        """Leftover containers are searched for until then."""
        self._removing = asyncio.Lock()
        self._closed = False

    # -- which runtime ---------------------------------------------------------------------------------------

    async def runtime(self) -> Runtime:
        """Raises EngineError if there is none. Searched for at each call until one is found."""
        async with self._runtime_lock:
            if self._runtime is None:
                self._runtime = await asyncio.to_thread(runtimes.find)
        if self._runtime is None:
            raise EngineError(runtimes.MISSING, hint=INSTALL)
        return self._runtime

    def refuse(self, job: Job) -> None:
        """Refuse what a job requests of containers and this machine cannot do."""
        _refuse_inputs(job)
        if job.image is None:
            _refuse_without(job)
            return
        runtime = self._runtime
        if runtime is None and not runtimes.likely():
            raise Refused(runtimes.MISSING, hint=INSTALL, details={"key": "image"})
        if job.resources.gpu and runtime is not None and runtime.program == "podman" and not runtime.cdi:
            raise Refused(
                "podman cannot assign GPUs here: there is no CDI specification",
                hint="`nvidia-ctk cdi generate --output /etc/cdi/nvidia.yaml` creates one.",
                details={"key": "resources.gpu"},
            )
        _refuse_mounts(job)
        if job.launcher == "none" and (job.setup is not None or job.python is not None):
            key = "setup" if job.setup is not None else "python"
            raise Refused(
                f"`{key}` needs the launcher, and the job says `launcher: none`",
                hint=f"Leave out `{key}`, or `launcher: none`.",
                details={"key": key},
            )

    # -- pure ------------------------------------------------------------------------------------------------

    def info(self, runtime: Runtime, info: TaskInfo, attempt: Attempt) -> TaskInfo:
        """task.json of a task in a container."""
        job = attempt.job
        assert job is not None and job.image is not None
        image = str(attempt.image.get("reference") or job.image)
        found: dict[str, object] = {"runtime": runtime.program, "image": image}
        if job.launcher != "none":
            return replace(info, cgroup=None, pid_namespace=True, workdir=".", container=found)
        place = directories.TaskPlace(info.run, info.attempt, info.task)
        container = self._container(runtime, info, attempt, image, name=self.name(place, info.incarnation))
        found |= {"name": container.name, "run": commands.run(runtime, container), "memory": info.memory}
        found["client"] = runtimes.client_environment()
        found["args"] = list(job.args)
        # Only the runtime's client runs outside: it needs no limits, and its helper processes outlive it a little.
        return replace(
            info, cgroup=None, pid_namespace=False, cpu=None, memory=None, pids=None, container=found
        )

    def name(self, place: directories.TaskPlace, incarnation: int) -> str:
        return commands.name_of(self._home, place, incarnation)

    def _container(
        self, runtime: Runtime, info: TaskInfo, attempt: Attempt, image: str, *, name: str
    ) -> Container:
        assert attempt.job is not None
        place = directories.TaskPlace(info.run, info.attempt, info.task)
        processes_ = resource.getrlimit(resource.RLIMIT_NPROC)
        most = commands.MOST_PROCESSES
        return Container(
            name=name,
            image=image,
            labels=commands.labels_of(self._home, place, attempt.labels),
            cpu=info.cpu,
            memory=info.memory,
            pids=info.pids,
            shm=attempt.job.resources.shm,
            gpus=self._gpu_names(runtime, info.gpus or ()),
            open_files=self._open_files,
            processes=tuple(most if limit < 0 else min(limit, most) for limit in processes_),  # type: ignore[arg-type]
        )

    def _gpu_names(self, runtime: Runtime, ids: list[str] | tuple[str, ...]) -> tuple[str, ...]:
        """The runtime's names of the GPUs: their ids if its specification lists them, else their numbers."""
        if not runtime.cdi or all(one in runtime.cdi for one in ids):
            return tuple(ids)
        numbers = {seen.id: str(seen.index) for seen in self._gpus.read()}
        return tuple(numbers.get(one, one) for one in ids)

    # -- starting --------------------------------------------------------------------------------------------

    async def start(self, known: LocalTask, attempt: Attempt, bundle: str) -> Identity:
        """Start the launcher of a task in its container. After an EngineError nothing of it runs, except after
        EngineUnavailable: then its state is unknown."""
        runtime = await self.runtime()
        assert known.info.container is not None and attempt.job is not None
        reference = str(known.info.container["image"])
        known.waiting = f"looking for the image {reference}"
        image = await asyncio.to_thread(runtimes.image, runtime, reference)
        if image is None:
            known.waiting = f"pulling the image {reference}"
            await runtimes.pull(runtime, reference)
            image = await asyncio.to_thread(runtimes.image, runtime, reference)
        if image is None:
            raise runtimes.ImageUnavailable(f"the image {reference} was pulled but is not there")
        known.waiting = "starting the container"
        setups = str(self._settings.home.setups / f"image-{image.id[:24]}")
        job = attempt.job
        words = [*image.entrypoint, *(job.args or image.arguments)]
        known.info = replace(known.info, command=words, setups=setups)
        container = self._container(runtime, known.info, attempt, reference, name=known.container)
        mounts = [(known.path, "rw"), (bundle, "ro"), (setups, "rw")]
        if known.info.common is not None:
            mounts.append((known.info.common, "rw"))
        command = commands.launcher(bundle, known.path, job.python)
        binds = _binds(job, known.path)
        container = replace(
            container, user=(os.getuid(), os.getgid()), mounts=mounts, binds=binds, command=command
        )
        try:
            await runtimes.uninterrupted(asyncio.to_thread(_prepare, container, known))
            async with self._removing:  # a leftover of that name has been removed by now, or stays
                pass
            await runtimes.create(runtime, container)
            return await runtimes.uninterrupted(
                asyncio.to_thread(_start, runtime, container, known, self._records), final=True
            )
        except BaseException:  # cancelled or failed, and raised again
            self._search_leftovers()  # remove the container if it exists or still appears
            raise

    # -- afterwards ------------------------------------------------------------------------------------------

    async def settle(self, known: LocalTask) -> bool:
        """Remove the container of a task whose launcher is dead or was never seen. False: it is not known whether
        anything of it runs, so nothing is concluded."""
        try:
            runtime = await self.runtime()
            return await asyncio.to_thread(_settle, runtime, known, self._records)
        except EngineError as exc:
            self._warn_once(known.container, f"its container {known.container} cannot be examined: {exc}")
            self._search_leftovers()
            # A dead launcher is proof enough: it was init of the container.
            return known.identity is not None and known.info.pid_namespace

    def tidy(self) -> None:
        """Remove the leftovers of earlier servers once, in the background; own containers are settled one by one."""
        if self._tidying is None:
            self._search_leftovers()

    def _search_leftovers(self) -> None:
        self._search_until = time.monotonic() + runtimes.LATE_SECONDS
        if not self._closed and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._tidy())

    async def _tidy(self) -> None:
        pause, most = PAUSES
        while not await self._remove_leftovers() or time.monotonic() < self._search_until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def _remove_leftovers(self) -> bool:
        """False: some leftovers still exist."""
        try:
            runtime = await self.runtime()
        except EngineError:
            return not runtimes.likely()  # no runtime, no containers; or its daemon is not up yet
        try:
            names = await asyncio.to_thread(runtimes.names, runtime, self._home)
        except EngineError as exc:
            self._warn_once(self._home, f"leftover containers cannot be listed: {exc}")
            return False
        removed = True
        for name in names:
            async with self._removing:
                if name not in self._keep():
                    try:
                        await runtimes.uninterrupted(asyncio.to_thread(runtimes.remove, runtime, name))
                    except EngineError as exc:
                        self._warn_once(name, f"the leftover container {name} cannot be removed: {exc}")
                        removed = False
        return removed

    def _warn_once(self, about: str, words: str) -> None:
        if about not in self._reported:
            self._reported.add(about)
            log.warning(words)

    async def close(self) -> None:
        """Remaining leftovers are left to the next server."""
        self._closed = True
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)

    async def update(self, known: LocalTask, cpu: float | None, memory: int | None) -> str | None:
        try:
            runtime = await self.runtime()
            await asyncio.to_thread(runtimes.update, runtime, known.container, cpu, memory)
        except EngineError as exc:
            return f"its container cannot be changed while it runs: {exc.message}"
        return None


def _prepare(container: Container, known: LocalTask) -> None:
    for path, mode in container.mounts:
        if mode == "rw" and path != known.path:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    directories.create(Path(known.path), known.info)
    for outside, _, _ in container.binds:
        if outside.startswith(f"{known.path}/"):
            Path(outside).mkdir(mode=0o700, parents=True, exist_ok=True)


def _start(runtime: Runtime, container: Container, known: LocalTask, records: TaskRecords) -> Identity:
    try:
        runtimes.start(runtime, container.name)
        found = runtimes.state(runtime, container.name)
        identity = processes.identity_of(found.pid) if found is not None and found.running else None
        if identity is None:
            output = runtimes.last_output(runtime, container.name).strip() or "no output"
            code = f" (exit code {found.exit_code})" if found is not None else ""
            raise runtimes.ImageUnavailable(
                f"the launcher does not run in the image {container.image}{code}: {output.splitlines()[-1]}",
                hint=_NEEDS_PYTHON,
            )
        records.write(known.place, identity, known.info, known.container)
    except (EngineError, OSError) as exc:
        log.info("%s: %s", container.name, exc)
        try:
            runtimes.remove(runtime, container.name)
        except EngineError as left:
            raise EngineUnavailable(f"the container {container.name} may run: {left.message}") from exc
        raise
    return identity


def _settle(runtime: Runtime, known: LocalTask, records: TaskRecords) -> bool:
    state = runtimes.state(runtime, known.container)
    if state is None:
        return True
    if known.identity is None and known.info.pid_namespace and state.running:
        # The server that started it died before it could record it.
        identity = processes.identity_of(state.pid)
        if identity is not None:
            records.write(known.place, identity, known.info, known.container)
            known.identity, known.ended = identity, False
            return True
    until = time.monotonic() + ENDING
    while state is not None and state.running and known.identity is not None and time.monotonic() < until:
        time.sleep(0.05)
        state = runtimes.state(runtime, known.container)
    if state is not None and state.out_of_memory:
        known.cause = "oom"
        known.evidence = {"exit_code": state.exit_code, "out_of_memory": True, "limit": known.info.memory}
    elif state is not None and state.exit_code == container_layout.NO_PYTHON and known.info.pid_namespace:
        # It was seen running in the moment before it ended.
        lines = runtimes.last_output(runtime, known.container).strip().splitlines()
        if lines and "no Python" in lines[-1]:
            known.cause = "image"
            known.evidence = {
                "message": f"the launcher does not run in the image: {lines[-1]}",
                "hint": _NEEDS_PYTHON,
            }
    runtimes.remove(runtime, known.container)
    return True


def _binds(job: Job, directory: str) -> list[tuple[str, str, str]]:
    """The job's mounts and inputs. Scratch folders are in the task directory and removed with it."""
    found = []
    for number, (inside, source) in enumerate(job.mounts.items()):
        outside = f"{directory}/scratch-{number}" if source == "empty" else source.removesuffix(":ro")
        found.append((outside, inside, "ro" if source.endswith(":ro") else "rw"))
    for name, uri in job.inputs.items():
        if (path := input_path(uri)) is not None:
            found.append((path, f"{INPUTS}/{name}", "ro"))
    return found


def _refuse_inputs(job: Job) -> None:
    for name, uri in job.inputs.items():
        path = input_path(uri)
        if path is not None and not Path(path).exists():
            raise Refused(
                f"there is no {path} on this machine, for the input {name}",
                hint="Check the path; it is written in full.",
                details={"key": f"inputs.{name}"},
            )
    if job.inputs and job.launcher == "none":
        raise Refused(
            "`inputs` needs the launcher on this machine, and the job says `launcher: none`",
            hint="Leave out `inputs`, or `launcher: none`.",
            details={"key": "inputs"},
        )


def _refuse_mounts(job: Job) -> None:
    if not job.mounts:
        return
    if job.launcher == "none":
        # Without the launcher it is undefined as which user the image writes there.
        raise Refused(
            "`mounts` needs the launcher on this machine, and the job says `launcher: none`",
            hint="Leave out `mounts`, or `launcher: none`.",
            details={"key": "mounts"},
        )
    for inside, source in job.mounts.items():
        folder = source.removesuffix(":ro")
        if source != "empty" and not Path(folder).is_dir():
            raise Refused(
                f"there is no folder {folder} to mount at {inside}",
                hint="Create it, or name another.",
                details={"key": f"mounts.{inside}"},
            )


def _refuse_without(job: Job) -> None:
    """Refuse keys that concern an image in a job without one."""
    room = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    here = room.f_blocks * room.f_frsize if room is not None else 0
    wants = {
        "launcher": job.launcher == "none",
        "python": job.python is not None,
        "args": bool(job.args),
        "mounts": bool(job.mounts),
        "resources.shm": (job.resources.shm or 0) > here,
    }
    found = [key for key, asked in wants.items() if asked]
    if not found:
        return
    hint = f"Leave `{found[0]}` out, or name an image."
    if found[0] == "resources.shm":
        hint = (
            "Make /dev/shm bigger (mount -o remount,size=...), or name an image: its container has its own."
        )
    if found[0] == "mounts":
        hint = (
            "Without an image a run sees the files of this machine: link the folder into the working folder (ln -s), "
            "or name it with --input NAME=file:///PATH."
        )
    raise Refused(f"`{found[0]}` needs an image here", hint=hint, details={"key": found[0], "keys": found})
