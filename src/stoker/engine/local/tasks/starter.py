"""Starts a launcher: the directory, the limits, then the process, in this order and each only once."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path
from typing import Any

from stoker.engine.local.host import cgroups, isolation
from stoker.engine.local.host.gpus import Gpus
from stoker.engine.local.host.isolation import Isolation
from stoker.engine.local.host.processes import Identity
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.forkserver_client import (
    BUNDLES,
    DirectoryTaken,
    ForkServerClient,
    ForkServerDied,
)
from stoker.engine.local.tasks.records import TaskRecords
from stoker.engine.local.tasks.registry import LocalTask
from stoker.engine.local.tasks.task_info import group_name
from stoker.errors import EngineError, EngineUnavailable
from stoker.settings import Home, Settings
from stoker.task.formats import TaskInfo

TRIES = 3
"""How often a fork server may die during one start."""
DIRECTORY_SECONDS = 10.0
"""Seconds in which the launcher that holds a directory must be recorded, or end. The fork server of a killed server ends
by itself, together with the launchers that it has not released."""


class Starter:
    """Belongs to one event loop. `probe` is called first."""

    def __init__(
        self, settings: Settings, gpus: Gpus, open_files: tuple[int, int], records: TaskRecords
    ) -> None:
        self._settings = settings
        self._records = records
        self._home = settings.home
        self._gpus = gpus
        self._forks = ForkServerClient(self._home.engine, open_files=open_files, cover=cover_of(self._home))
        self._scoped = 0
        self.isolation = Isolation()

    async def probe(self) -> None:
        """Find out what the machine can enforce."""
        wanted = self._settings.local.isolation
        self.isolation = await asyncio.to_thread(isolation.probe, self._home.root, wanted)
        if self.isolation.wrap:
            await self.ensure()

    async def ensure(self) -> None:
        """Start a fork server if there is none."""
        pid = await self._forks.ensure(self.isolation.wrap)
        if self.isolation.wrap and pid != self._scoped:
            # Each fork server has its own scope, and tasks are limited in the scope they start in.
            name = cgroups.home_name(self._home.root)
            self.isolation = await asyncio.to_thread(isolation.in_scope, self.isolation, pid, name)
            self._scoped = pid

    async def start(self, known: LocalTask) -> Identity:
        """Start the launcher of a task that has none."""
        self._prepare(known)
        return await self._launch(known)

    @property
    def bundle(self) -> str:
        """The directory of the launcher's code, for processes whose Python lacks Stoker. After `ensure`."""
        assert self._forks.bundle is not None
        return self._forks.bundle

    async def close(self) -> None:
        await self._forks.close()

    def _prepare(self, known: LocalTask) -> None:
        try:
            self._records.prepare()
            self._home.setups.mkdir(mode=0o700, parents=True, exist_ok=True)  # it is visible to the task
            directories.create(Path(known.path), known.info)
            if self.isolation.tree is not None and known.info.cgroup is not None:
                cgroups.make(self.isolation.tree, group_name(*known.place.key()), self._limits(known.info))
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            raise EngineError(
                f"cannot prepare {known.place.task} of {known.place.run}: {exc.strerror} ({exc.filename})",
                hint=f"Make room on the disk of {self._home.root}." if full else None,
            ) from exc

    def _limits(self, info: TaskInfo) -> cgroups.Limits:
        return cgroups.Limits(info.cpu, info.memory, info.pids, self._gpus.denied(info.gpus or ()))

    async def _launch(self, known: LocalTask) -> Identity:
        deaths, until = 0, time.monotonic() + DIRECTORY_SECONDS
        while deaths < TRIES:
            await self.ensure()
            try:
                return await self._forks.launch(
                    known.path,
                    record=self._records.path(known.place),
                    task=known.info.to_json(),
                    pid_namespace=known.info.pid_namespace,
                    user_namespace=known.info.pid_namespace and self.isolation.user_namespace,
                    shown=[known.info.common] if known.info.common is not None else [],
                )
            except (DirectoryTaken, ForkServerDied, EngineError) as exc:
                # The answer may be lost while the launcher runs, or an earlier server's launcher runs: see the record.
                record = self._records.read(known.place)
                if record is not None and record.identity is not None:
                    return record.identity
                if isinstance(exc, EngineError):
                    raise
                deaths += isinstance(exc, ForkServerDied)
                if isinstance(exc, DirectoryTaken):
                    if time.monotonic() > until:
                        raise EngineUnavailable(
                            f"a process holds {known.lock}, but no launcher is recorded for it"
                        ) from exc
                    await asyncio.sleep(0.02)
        raise EngineError(
            f"the fork server died {TRIES} times during one start",
            hint=f"Its last messages are in {self._home.engine / 'forkserver.log'}.",
        )


def cover_of(home: Home) -> dict[str, Any]:
    """The home is hidden from tasks, with all that is or will be in it: keys, secrets, the database, other tasks' files,
    the records of launchers. A task needs the environments made by `setup`, and the launcher's code for PYTHONPATH."""
    return {
        "home": str(home.root),
        "names": list(home.names),
        "places": [str(home.root / name) for name in home.names if name != home.setups.name],
        "shown": [(str(home.setups), True), (str(home.engine / BUNDLES), False)],
    }
