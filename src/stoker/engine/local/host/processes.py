"""Processes of this machine and their identity: a pid alone is reused, a pid with boot id and start time is not."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.linux.descriptors import Closing
from stoker.linux.process import boot_id

LINUX = sys.platform.startswith("linux")
SHORT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of opening an existing file: descriptors or memory are short."""
_BATCH = 256
"""Processes that are opened at a time."""
_DEAD = ("Z", "X", "x")
"""States of a process that has ended, in /proc/PID/stat."""


@dataclass(frozen=True)
class Identity:
    boot_id: str
    pid: int
    start_time: int
    """Clock ticks since boot: field 22 of /proc/PID/stat."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Identity | None:
        """None if the record is invalid: a record in a task directory belongs to user code."""
        try:
            pid, start = int(raw["pid"]), int(raw.get("start_time") or 0)
        except (KeyError, TypeError, ValueError):
            return None
        return cls(str(raw.get("boot_id", "")), pid, start) if pid > 1 else None


def identity_of(pid: int) -> Identity | None:
    """The identity of a living process; None: there is none."""
    fields = stat_fields(pid) if pid > 1 else []
    return Identity(boot_id(), pid, int(fields[19])) if fields and fields[0] not in _DEAD else None


def is_alive(identity: Identity, lock: str) -> bool:
    """Whether exactly this process still runs. `lock`: the file that it holds locked, the only proof without /proc."""
    if not LINUX:
        return _is_locked(lock)
    if identity.boot_id != boot_id():
        return False
    fields = stat_fields(identity.pid, strict=True)
    return bool(fields) and fields[0] not in _DEAD and int(fields[19]) == identity.start_time


def open_pidfd(identity: Identity) -> int | None:
    """A descriptor that becomes readable when the process ends. None: it has ended, or pidfds are not supported."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    # Checked after opening: if the pid has this start time now, the descriptor is of that process.
    fields = stat_fields(identity.pid)
    if not fields or int(fields[19]) != identity.start_time or identity.boot_id != boot_id():
        os.close(fd)
        return None
    return fd


def send(identity: Identity, number: int, pidfd: int | None = None) -> bool:
    """Signal exactly this process. False: it has ended."""
    try:
        if pidfd is not None and hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(pidfd, number)
            return True
        fd = open_pidfd(identity)
        if fd is None:
            if hasattr(os, "pidfd_open") or (LINUX and not _same(identity)):
                return False
            os.kill(identity.pid, number)
            return True
        with Closing(fd):
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    return True


def kill(pids: Sequence[int], members: Callable[[], Container[int]]) -> None:
    """SIGKILL to those of `pids` that `members` contains. `members` is called after the processes were opened: from
    then on a number cannot become another process's."""
    for at in range(0, len(pids), _BATCH):
        opened = {pid: _opened(pid) for pid in pids[at : at + _BATCH]}
        try:
            current = members()
            for pid, fd in opened.items():
                if pid in current and fd is not None:
                    _kill_one(pid, fd)
        finally:
            for fd in opened.values():
                if fd is not None and fd >= 0:
                    os.close(fd)


def _opened(pid: int) -> int | None:
    """None: it has ended. Negative: pidfds are not supported."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    except OSError as exc:
        return None if exc.errno == errno.ESRCH else -1


def _kill_one(pid: int, fd: int) -> None:
    try:
        if fd >= 0:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It has ended, or it is a set-uid program: the next look shows what is left.
        pass


def holders(path: str) -> list[int]:
    """Living processes that have exactly this file open. A file with two names is no proof: user code can add a name to
    any file of its owner."""
    try:
        wanted = Path(path).lstat()
    except OSError:
        return []
    if not LINUX or not stat.S_ISREG(wanted.st_mode) or wanted.st_nlink != 1:
        return []
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and int(name) != os.getpid() and _has_open(name, wanted)
    ]


def _has_open(pid: str, wanted: os.stat_result) -> bool:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False  # gone, or of another user
    for name in names:
        try:
            found = Path(f"/proc/{pid}/fd/{name}").stat()
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


def task_directory(pid: int) -> str | None:
    """The task of a process, from the environment it was started with."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    for entry in data.split(b"\0"):
        if entry.startswith(b"STOKER_TASK_DIR="):
            return os.fsdecode(entry[16:])
    return None


def of_tasks(directories: set[str]) -> dict[str, list[int]]:
    """Living processes of these tasks, from the environment they were started with. One pass over /proc for all."""
    found: dict[str, list[int]] = {}
    if not directories or not LINUX:
        return found
    for name in os.listdir("/proc"):
        if name.isdigit() and (directory := task_directory(int(name))) in directories:
            found.setdefault(str(directory), []).append(int(name))
    return found


def stat_fields(pid: int, *, strict: bool = False) -> list[str]:
    """/proc/PID/stat from its third field (the state) on; empty when there is no such process."""
    text = read_text(f"/proc/{pid}/stat", strict=strict)
    return text[text.rfind(")") + 2 :].split()


def read_text(path: str, *, strict: bool = False) -> str:
    """A small file of the kernel; empty if it cannot be read (a process or cgroup that has ended). `strict`: raise when
    descriptors or memory are short, for callers that conclude from an absence."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError as exc:
        if strict and exc.errno in SHORT_OF_RESOURCES:
            raise
        return ""


def _same(identity: Identity) -> bool:
    fields = stat_fields(identity.pid)
    return bool(fields) and int(fields[19]) == identity.start_time


def _is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
