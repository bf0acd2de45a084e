"""The tasks of this machine as the engine knows them, and the proof that a task is gone.

A task counts as gone only when its launcher and all processes below it are. A PID namespace ends with its init; a cgroup
can be read for processes. Without both, each process names its task in its environment. What is left of a dead launcher
is killed before the task may be started again.

The process and the group of a task are in the engine's own records, where no run can write. A launcher whose record is
lost is found by the lock that it holds in its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.engine.local.containers import commands
from stoker.engine.local.host import cgroups, processes
from stoker.engine.local.host.processes import Identity
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.engine.local.tasks.records import TaskRecord, TaskRecords, of_earlier_version
from stoker.engine.local.tasks.task_info import group_name
from stoker.linux.process import boot_id
from stoker.task import layout
from stoker.task.formats import TaskInfo

RESTARTED = "the machine was restarted"
NEVER_STARTED = "its launcher was never started"
UNRECORDED = "nothing of it runs, and the record of its launcher is lost"
DIRECTORY_LOST = "its task directory was lost, and nothing of it runs"
RECORD_LOST = "its launcher is gone, and so is the engine's record of it"
_ROUNDS = 40
_PAUSE = 0.025
"""A killed process is gone within this many checks, unless it waits in the kernel (a dead network disk, a GPU)."""


@dataclass
class LocalTask:
    """One task. Belongs to the event loop; `settle` may use it in a thread while no other code does."""

    place: TaskPlace
    path: str
    info: TaskInfo
    group: dict[str, Any] | None = None
    recorded: bool = True
    """`info` was written by the engine. Otherwise it is from task.json, which user code may have changed."""
    identity: Identity | None = None
    """None: no launcher was started yet, or it is `unidentified`."""
    unidentified: bool = False
    """A launcher was started, but its record is lost or unreadable."""
    pidfd: int | None = None
    starting: bool = False
    ended: bool = False
    """Its launcher was seen to end."""
    proof: str = ""
    """Final: the launcher and all its processes are gone."""
    settling: asyncio.Task[None] | None = None
    """The work that is proving it at the moment."""
    stuck: tuple[int, ...] = ()
    """Processes that did not die after SIGKILL."""
    container: str = ""
    """The name of its container, if it has one."""
    waiting: str = ""
    """What a task that is `starting` waits for."""
    cause: str = ""
    """With `proof`: the cause, if more is known than that it is gone."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lock(self) -> str:
        return f"{self.path}/{layout.LOCK}"


class TaskRegistry:
    """Every task directory below `tasks`, with its launcher. Scans once, then only what changed.

    Only engines create task directories in a home, so the modification time of the top directory shows whether
    another one did.
    """

    def __init__(self, tasks: Path, home_group: str, records: TaskRecords) -> None:
        self.tasks = tasks
        self.records = records
        self._home_group = home_group
        self._mounts = cgroups.mounts(processes.read_text("/proc/self/mountinfo"))
        self._known: dict[TaskPlace, LocalTask] = {}
        self._attempts: dict[tuple[str, int], dict[str, LocalTask]] = {}
        self._by_pidfd: dict[int, LocalTask] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._scanned = -1

    def __iter__(self) -> Iterator[LocalTask]:
        return iter(list(self._known.values()))

    def get(self, place: TaskPlace) -> LocalTask | None:
        return self._known.get(place)

    def of(self, run: str, attempt: int) -> list[LocalTask]:
        return [
            known for place, known in self._known.items() if place.run == run and place.attempt == attempt
        ]

    def refresh(self) -> list[LocalTask]:
        """Adopt the tasks of unknown runs and return them. Raises OSError when the home cannot be read."""
        try:
            changed = self.tasks.stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed == self._scanned:
            return []
        runs = {place.run for place in self._known}
        found = [self.adopt(place, path) for place, path in directories.scan(self.tasks, skip=runs)]
        if self._scanned == -1:
            # Only the engine writes records: a record without a directory means that the directory was deleted.
            lost = [place for place in self.records.places() if place not in self._known]
            found += [self.adopt(place, directories.path_of(self.tasks, place)) for place in lost]
        self._scanned = changed
        return found

    def refresh_attempt(self, run: str, attempt: int) -> list[LocalTask]:
        """Adopt the unknown tasks of one attempt, from an earlier server, and return them."""
        parent = directories.path_of(self.tasks, TaskPlace(run, attempt, "any")).parent
        places = directories.scan_attempt(run, parent)
        return [self.adopt(place, path) for place, path in places if place not in self._known]

    def adopt(self, place: TaskPlace, path: Path) -> LocalTask:
        """Take over a task that an earlier server started."""
        record = self.records.read(place)
        if record is None or record.identity is None:
            record = self._without_record(place, path) or record
        if record is not None and record.info is not None:
            info, recorded = record.info, True
        else:
            info, recorded = directories.read_info(path) or TaskInfo(*place.key()), False
        known = LocalTask(place, str(path), info, recorded=recorded)
        group = f"{self._home_group}/{group_name(*place.key())}"
        known.group = info.cgroup if recorded else cgroups.trusted(info.cgroup, group, self._mounts)
        if info.container is not None:
            known.container = commands.name_of(self._home_group, place, info.incarnation)
        self.add(known)
        if record is not None and not known.container:
            # The record may name a container although task.json is gone: it counts if the name is this task's.
            mine = commands.name_of(self._home_group, place, 0).removesuffix("0")
            known.container = record.container if record.container.startswith(mine) else ""
        if record is not None and record.identity is not None:
            self.started(known, record.identity)
        known.unidentified = record is not None and record.identity is None
        return known

    def _without_record(self, place: TaskPlace, path: Path) -> TaskRecord | None:
        """The launcher of an earlier version, or one whose record is lost. A living one is recorded now, so that later
        changes by user code have no effect."""
        found = of_earlier_version(path)
        if found is not None and found.identity is not None and processes.is_alive(found.identity, ""):
            # Without room, or read-only: the next server finds it in the same way.
            with contextlib.suppress(OSError):
                self.records.write(place, found.identity, None, found.container)
        return found

    def add(self, known: LocalTask) -> None:
        place = known.place
        self._known[place] = known
        self._attempts.setdefault((place.run, place.attempt), {})[place.task] = known

    def started(self, known: LocalTask, identity: Identity) -> None:
        """Record its launcher's process; from now on its end is noticed."""
        known.identity = identity
        known.starting = False
        known.pidfd = processes.open_pidfd(identity)
        if known.pidfd is not None and self._epoll is not None:
            self._by_pidfd[known.pidfd] = known
            self._epoll.register(known.pidfd, select.EPOLLIN)

    def look(self) -> None:
        """Mark tasks whose launcher has ended since the last call: one system call for all."""
        if self._epoll is not None and self._by_pidfd:
            for fd, _ in self._epoll.poll(0, len(self._by_pidfd)):
                self._by_pidfd[fd].ended = True

    def is_alive(self, known: LocalTask) -> bool:
        """Whether its launcher lives. Call `look` before."""
        if known.starting:
            return True
        if known.identity is None or known.ended or known.proof:
            return False
        if known.pidfd is None and not processes.is_alive(known.identity, known.lock):
            known.ended = True
        return not known.ended

    def forget(self, known: LocalTask) -> None:
        """Forget a task. The caller has proof that none of its processes runs."""
        place = known.place
        self.records.remove(place)
        self._known.pop(place, None)
        tasks = self._attempts.get((place.run, place.attempt), {})
        tasks.pop(place.task, None)
        if not tasks:
            self._attempts.pop((place.run, place.attempt), None)
        self.release(known)

    def release(self, known: LocalTask) -> None:
        """Close the descriptors of a task."""
        if known.pidfd is None:
            return
        if self._by_pidfd.pop(known.pidfd, None) is not None and self._epoll is not None:
            self._epoll.unregister(known.pidfd)
        os.close(known.pidfd)
        known.pidfd = None

    def close(self) -> None:
        for known in self:
            self.release(known)
        if self._epoll is not None:
            self._epoll.close()


def settle(dead: list[LocalTask]) -> None:
    """Prove that tasks whose launchers have ended are gone, and kill what they left. Blocks; run it in a thread.

    Removes the cgroups of those proven gone and then sets their `proof`: from then on the task may be started again in
    a group of the same name. A task that never started keeps its group, because its start may be under way. Sets
    `stuck` on tasks with processes that do not die.
    """
    for known in dead:
        if known.identity is None:
            if not known.unidentified:
                known.proof = NEVER_STARTED
        elif known.identity.boot_id != boot_id():
            _prove(known, RESTARTED)
    _kill_leftovers([known for known in dead if not known.proof])


def _prove(known: LocalTask, proof: str) -> None:
    if known.group is not None:
        cgroups.remove(known.group)
    known.proof = proof


def _kill_leftovers(waiting: list[LocalTask]) -> None:
    for round_ in range(_ROUNDS):
        left = _leftovers(waiting)
        for known in waiting:
            pids = left.get(known.path, [])
            if (
                processes.LINUX
                and known.identity is not None
                and processes.is_alive(known.identity, known.lock)
            ):
                processes.send(known.identity, signal.SIGKILL)  # it was killed but has not died yet
                pids = [known.identity.pid, *pids]
            known.stuck = tuple(pids)
            if pids:
                _kill(known, pids)
            elif known.identity is not None:
                _prove(known, f"launcher {known.identity.pid} is gone")
            else:
                _prove(known, UNRECORDED)
        waiting = [known for known in waiting if not known.proof]
        if not waiting:
            return
        if round_ < _ROUNDS - 1:
            time.sleep(_PAUSE)


def _leftovers(waiting: list[LocalTask]) -> dict[str, list[int]]:
    found = {known.path: cgroups.procs(known.group) for known in waiting if known.group is not None}
    without = {known.path for known in waiting if not known.info.pid_namespace or not known.recorded}
    for path, pids in processes.of_tasks(without).items():
        found.setdefault(path, []).extend(pid for pid in pids if pid not in found[path])
    for known in waiting:
        if known.unidentified:
            found.setdefault(known.path, []).extend(processes.holders(known.lock))
    return found


def _kill(known: LocalTask, pids: list[int]) -> None:
    if known.group is not None:
        cgroups.kill(known.group)
    processes.kill(pids, lambda: _leftovers([known]).get(known.path, ()))
