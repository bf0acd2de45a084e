"""Finds files that a process has open for writing.

A writer that writes a file in place shows only by closing it that it is done. So a checkpoint is not complete while a process
has it open for writing, or mapped shared and writable. The kernel grants a read lease on a file only while no process can write
to it. The lease is released at once; a writer that opens the file meanwhile waits for microseconds. Where there are no
leases (some network file systems, files of other users), /proc is searched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from typing import Dict, Iterable, List, Optional, Set, Tuple

from stoker.launcher.checkpoints import snapshot
from stoker.linux.descriptors import Closing

Identity = Tuple[int, int]
"""Device and inode."""


def being_written(directory: str, members: Iterable[snapshot.FileState]) -> Set[int]:
    """Inodes of those files that any process has open for writing. Files removed meanwhile are skipped."""
    found: Set[int] = set()
    unknown: Dict[Identity, int] = {}
    try:
        root = snapshot.open_directory(directory)
    except OSError:
        return found
    with Closing(root):
        for member in members:
            try:
                fd = snapshot.open_file(root, member.path)
            except OSError:
                continue
            with Closing(fd):
                answer = _has_writer(fd)
                info = os.fstat(fd)
            if answer:
                found.add(member.ino)
            elif answer is None:
                unknown[(info.st_dev, info.st_ino)] = member.ino
    found.update(ino for _, ino in seen_in_processes(set(unknown)))
    return found


def _has_writer(fd: int) -> Optional[bool]:
    """Whether a process has the file open for writing; None where leases do not work."""
    if not hasattr(fcntl, "F_SETLEASE"):
        return None
    try:
        # A writer that opens the file now causes this signal, which has no effect.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as exc:
        return True if exc.errno == errno.EAGAIN else None
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        pass  # A writer has opened the file; closing the descriptor releases the lease.
    return False


def seen_in_processes(wanted: Set[Identity]) -> Set[Identity]:
    """Those of these files that a process has open for writing, as far as /proc shows it. Empty without /proc."""
    found: Set[Identity] = set()
    if not wanted:
        return found
    for pid in _processes():
        try:
            _find_open(f"/proc/{pid}", wanted, found)
            _find_mapped(f"/proc/{pid}", wanted, found)
        except OSError:
            # The process has ended, or belongs to another user.
            continue
    return found


def _processes() -> List[str]:
    try:
        return [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _find_open(process: str, wanted: Set[Identity], found: Set[Identity]) -> None:
    for fd in os.listdir(f"{process}/fd"):
        try:
            info = os.stat(f"{process}/fd/{fd}")
            identity = (info.st_dev, info.st_ino)
            if identity in wanted and _flags(f"{process}/fdinfo/{fd}") & os.O_ACCMODE:
                found.add(identity)
        except OSError:
            continue


def _flags(path: str) -> int:
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b"flags:"):
                return int(line.split()[1], 8)
    return 0


def _find_mapped(process: str, wanted: Set[Identity], found: Set[Identity]) -> None:
    with open(f"{process}/maps", "rb") as file:
        for line in file:
            fields = line.split(None, 5)
            if len(fields) < 6 or fields[1][1:2] != b"w" or fields[1][3:4] != b"s" or fields[4] == b"0":
                continue
            # Devices are not compared: for some file systems this number differs from that of stat.
            found.update(identity for identity in wanted if identity[1] == int(fields[4]))
