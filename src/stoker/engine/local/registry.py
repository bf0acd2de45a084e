"""The tasks of this machine as the engine knows them, and the proof that one is gone.

A task counts as gone only when its launcher and everything beneath it are: a PID namespace ends with its init, a
cgroup is empty or not, and without both every process says in its environment which task it belongs to. What is
left of a dead launcher is killed before anybody may start it anew.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.engine.local import cgroups, containers, directories, processes
from stoker.engine.local.directories import Place
from stoker.engine.local.processes import Identity
from stoker.task import layout
from stoker.task.formats import TaskInfo

RESTARTED = "the machine was restarted"
NEVER_STARTED = "its launcher was never started"
_ROUNDS = 40
_PAUSE = 0.025
"""A killed process is gone within this many looks, unless the kernel holds it (a dead network disk, a GPU)."""


@dataclass
class Known:
    """One task. Belongs to the event loop; `settle` may work on it in a thread while nothing else does."""

    place: Place
    path: str
    info: TaskInfo
    group: dict[str, Any] | None = None
    identity: Identity | None = None
    """None: no launcher was started yet."""
    pidfd: int | None = None
    starting: bool = False
    ended: bool = False
    """Its launcher was seen to end."""
    proof: str = ""
    """Final: launcher and tree are gone."""
    settling: asyncio.Task[None] | None = None
    """Who proves that just now."""
    stuck: tuple[int, ...] = ()
    """Processes that did not die when killed."""
    container: str = ""
    """Its name, for a task that is in one."""
    waiting: str = ""
    """What a task that is `starting` waits for."""
    cause: str = ""
    """With `proof`: the word for how it went, where more is known than that it is gone."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lock(self) -> str:
        return f"{self.path}/{layout.LOCK}"


class Registry:
    """Every task directory beneath `tasks`, with its launcher. Scans once, then follows.

    Only the engine makes task directories in a home, so a look at the top directory's time tells whether
    somebody else did.
    """

    def __init__(self, tasks: Path, home_group: str) -> None:
        self.tasks = tasks
        self._home_group = home_group
        self._mounts = cgroups.mounts(processes.read_text("/proc/self/mountinfo"))
        self._known: dict[Place, Known] = {}
        self._attempts: dict[tuple[str, int], dict[str, Known]] = {}
        self._by_pidfd: dict[int, Known] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._scanned = -1

    def __iter__(self) -> Iterator[Known]:
        return iter(list(self._known.values()))

    def get(self, place: Place) -> Known | None:
        return self._known.get(place)

    def of(self, run: str, attempt: int) -> list[Known]:
        return [
            known for place, known in self._known.items() if place.run == run and place.attempt == attempt
        ]

    def refresh(self) -> list[Known]:
        """Find runs that were not known; their tasks. Raises OSError when the home cannot be read."""
        try:
            changed = self.tasks.stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed == self._scanned:
            return []
        runs = {place.run for place in self._known}
        found = [self.adopt(place, path) for place, path in directories.scan(self.tasks, skip=runs)]
        self._scanned = changed
        return found

    def refresh_attempt(self, run: str, attempt: int) -> list[Known]:
        """The same for one attempt: what an earlier server left of it."""
        parent = directories.path_of(self.tasks, Place(run, attempt, "any")).parent
        places = directories.scan_attempt(run, parent)
        return [self.adopt(place, path) for place, path in places if place not in self._known]

    def adopt(self, place: Place, path: Path) -> Known:
        """Take up a directory as it lies there."""
        info = directories.read_info(path) or TaskInfo(place.run, place.attempt, place.task)
        known = Known(place, str(path), info)
        known.group = cgroups.trusted(info.cgroup, self._home_group, self._mounts)
        if info.container is not None:
            known.container = containers.name_of(self._home_group, place, info.incarnation)
        self.add(known)
        record = directories.read_record(path)
        if record is not None and not known.container:
            # Whoever removed task.json, the container is this task's.
            name, mine = str(record.get("container", "")), containers.name_of(self._home_group, place, 0)
            known.container = name if name.startswith(mine.removesuffix("0")) else ""
        identity = Identity.from_json(record) if record is not None else None
        if identity is not None:
            self.started(known, identity)
        return known

    def add(self, known: Known) -> None:
        place = known.place
        self._known[place] = known
        self._attempts.setdefault((place.run, place.attempt), {})[place.task] = known

    def started(self, known: Known, identity: Identity) -> None:
        """Its launcher is this process; from here on its death is noticed."""
        known.identity = identity
        known.starting = False
        known.pidfd = processes.open_pidfd(identity)
        if known.pidfd is not None and self._epoll is not None:
            self._by_pidfd[known.pidfd] = known
            self._epoll.register(known.pidfd, select.EPOLLIN)

    def look(self) -> None:
        """Mark those whose launcher has ended since the last look: one system call for all."""
        if self._epoll is not None and self._by_pidfd:
            for fd, _ in self._epoll.poll(0, len(self._by_pidfd)):
                self._by_pidfd[fd].ended = True

    def is_alive(self, known: Known) -> bool:
        """Whether its launcher lives. Call `look` before."""
        if known.starting:
            return True
        if known.identity is None or known.ended or known.proof:
            return False
        if known.pidfd is None and not processes.is_alive(known.identity, known.lock):
            known.ended = True
        return not known.ended

    def forget(self, known: Known) -> None:
        place = known.place
        self._known.pop(place, None)
        tasks = self._attempts.get((place.run, place.attempt), {})
        tasks.pop(place.task, None)
        if not tasks:
            self._attempts.pop((place.run, place.attempt), None)
        self.release(known)

    def release(self, known: Known) -> None:
        """Close what is open for a task."""
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


def settle(dead: list[Known]) -> None:
    """Prove that tasks whose launchers have ended are gone, killing what they left. Blocks; run it in a thread.

    Removes the cgroups of those proven gone and then sets their `proof`: once that is there, the task may be started
    anew in a group of the same name. One that never started leaves its group to the start that is still to come, which
    may be under way. Sets `stuck` on those with processes that would not die.
    """
    for known in dead:
        if known.identity is None:
            known.proof = NEVER_STARTED
        elif known.identity.boot_id != processes.boot_id():
            _prove(known, RESTARTED)
    _kill_leftovers([known for known in dead if not known.proof])


def _prove(known: Known, proof: str) -> None:
    if known.group is not None:
        cgroups.remove(known.group)
    known.proof = proof


def _kill_leftovers(waiting: list[Known]) -> None:
    for round_ in range(_ROUNDS):
        left = _leftovers(waiting)
        for known in waiting:
            pids = left.get(known.path, [])
            if (
                processes.LINUX
                and known.identity is not None
                and processes.is_alive(known.identity, known.lock)
            ):
                pids = [known.identity.pid, *pids]  # it was killed and has not died yet
            known.stuck = tuple(pids)
            if pids:
                _kill(known, pids)
            else:
                assert known.identity is not None
                _prove(known, f"launcher {known.identity.pid} is gone")
        waiting = [known for known in waiting if not known.proof]
        if not waiting:
            return
        if round_ < _ROUNDS - 1:
            time.sleep(_PAUSE)


def _leftovers(waiting: list[Known]) -> dict[str, list[int]]:
    found = {known.path: cgroups.procs(known.group) for known in waiting if known.group is not None}
    without = {known.path for known in waiting if not known.info.pid_namespace}
    for path, pids in processes.of_tasks(without).items():
        found.setdefault(path, []).extend(pid for pid in pids if pid not in found[path])
    return found


def _kill(known: Known, pids: list[int]) -> None:
    if known.group is not None:
        cgroups.kill(known.group)
    processes.kill(pids)
