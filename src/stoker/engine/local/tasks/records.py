"""The engine's records of started tasks, kept where no run can write.

    engine/tasks/RUN.ATTEMPT.TASK.json    {"boot_id", "pid", "start_time", "guardian"?, "container"?, "task": TaskInfo}

The fork server writes a record before its launcher may do anything. A record therefore means that a launcher was started,
and no record means that nothing has run. User code owns the task directory, so no file in it decides which process or
control group is signalled. Earlier versions kept the record in the task directory, as engine.json. Such a record counts
only for a process that holds the lock of that directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.engine.local.host import processes
from stoker.engine.local.host.processes import Identity
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.settings import Home
from stoker.task import formats, layout
from stoker.task.formats import TaskInfo
from stoker.task.local_directory import LocalTaskDir, UnsafePath

_SUFFIX = ".json"
_LAUNCHER = "stoker-launcher"
"""The process name of a launcher."""


@dataclass(frozen=True)
class TaskRecord:
    """One task, at the incarnation that was started last."""

    identity: Identity | None
    info: TaskInfo | None = None
    container: str = ""


class TaskRecords:
    """The records of one home. Any thread may call it; each record has one writer at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, place: TaskPlace) -> Path:
        return self.directory / f"{place.run}.{place.attempt}.{place.task}{_SUFFIX}"

    def prepare(self) -> None:
        """Create the directory: the fork server writes into it but does not create it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, place: TaskPlace) -> TaskRecord | None:
        """None: no launcher was started. An unreadable record has no identity: a launcher was started, but its process
        is unknown."""
        try:
            raw = json.loads(self.path(place).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return TaskRecord(None)
        return _parsed(raw) if isinstance(raw, dict) else TaskRecord(None)

    def write(self, place: TaskPlace, identity: Identity, info: TaskInfo | None, container: str) -> None:
        """Record a launcher that was not started by this version's fork server. `info`: None if it is known only from
        the task directory."""
        value = {"boot_id": identity.boot_id, "pid": identity.pid, "start_time": identity.start_time}
        more = {"container": container, **({} if info is None else {"task": info.to_json()})}
        self.prepare()
        formats.write_json(str(self.path(place)), {**value, **more}, mode=0o600)

    def remove(self, place: TaskPlace) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path(place).unlink()

    def changed(self) -> int:
        """A number that changes when a record is added or removed."""
        try:
            return self.directory.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def places(self) -> Iterator[TaskPlace]:
        """Every task with a record."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return
        for name in names:
            run, _, rest = name.removesuffix(_SUFFIX).partition(".")
            attempt, _, task = rest.partition(".")
            if name.endswith(_SUFFIX) and attempt.isdecimal() and "." not in task:
                yield TaskPlace(run, int(attempt), task)


@dataclass(frozen=True)
class LivingLauncher:
    run: str
    identity: Identity
    holds: bool
    """Its training has ended; it only waits until its results are taken in."""


def launchers(home: Home) -> list[LivingLauncher]:
    """Every living launcher of this home, for a command without an engine."""
    records = TaskRecords(home.engine / "tasks")
    known = {
        home.tasks / place.run / str(place.attempt) / place.task: records.read(place)
        for place in records.places()
    }
    for directory in home.tasks.glob("*/*/*"):
        if directory not in known:
            known[directory] = of_earlier_version(directory)
    return [
        LivingLauncher(directory.parent.parent.name, record.identity, _has_ended(directory))
        for directory, record in sorted(known.items())
        if record is not None
        and record.identity is not None
        and processes.is_alive(record.identity, str(directory / layout.LOCK))
    ]


def end_holding(home: Home) -> None:
    """End the launchers whose training has ended. Everything they know is in their directories."""
    for living in launchers(home):
        if living.holds:
            processes.send(living.identity, signal.SIGKILL)


def _has_ended(directory: Path) -> bool:
    try:
        status = LocalTaskDir(str(directory)).status()
    except (UnsafePath, OSError):
        return False
    return status is not None and status.phase == "ended"


def of_earlier_version(directory: Path) -> TaskRecord | None:
    """engine.json in the task directory, where earlier versions kept the record. User code may have written it, so a
    living process counts only if it holds the lock of the directory. A launcher whose record is lost is also found by
    that lock."""
    raw = _engine_json(directory)
    record = _parsed(raw) if raw is not None else None
    identity = record.identity if record is not None else None
    if record is not None and identity is not None and not processes.is_alive(identity, ""):
        return record
    holders = processes.holders(str(directory / layout.LOCK))
    if identity is not None and identity.pid in holders:
        return record
    container = record.container if record is not None else ""
    for pid in holders:
        # The guardian holds the lock too.
        if processes.read_text(f"/proc/{pid}/comm").strip() == _LAUNCHER:
            return TaskRecord(processes.identity_of(pid), container=container)
    return TaskRecord(None, container=container) if holders or raw is not None else None


def _engine_json(directory: Path) -> dict[str, Any] | None:
    try:
        raw = LocalTaskDir(str(directory)).read(layout.ENGINE)
        value = json.loads(raw) if raw else None
    except (UnsafePath, OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else None


def _parsed(raw: dict[str, Any]) -> TaskRecord:
    info = None
    with contextlib.suppress(TypeError, ValueError):
        info = TaskInfo.from_json(raw["task"]) if isinstance(raw.get("task"), dict) else None
    return TaskRecord(Identity.from_json(raw), info, str(raw.get("container") or ""))
