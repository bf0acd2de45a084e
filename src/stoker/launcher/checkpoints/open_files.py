"""Is anybody writing to these files?

Closing is the only sign that a writer gives when it is done with a file it writes in place, so a checkpoint
that somebody still holds open for writing, or has mapped shared and writable, is not complete. The kernel knows:
it grants a read lease on a file only while nobody can write to it. The lease is given back at once; a writer that
comes in between waits for microseconds. Where there are no leases (some network filesystems, other people's
files) the processes that we can see are looked through.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from typing import Dict, Iterable, List, Optional, Set, Tuple

from stoker.launcher.checkpoints import snapshot

Identity = Tuple[int, int]
"""Device and inode."""


def being_written(directory: str, members: Iterable[snapshot.FileState]) -> Set[int]:
    """Inodes of those that are open for writing, in any process. What vanished meanwhile is passed over."""
    found: Set[int] = set()
    unknown: Dict[Identity, int] = {}
    try:
        root = snapshot.open_directory(directory)
    except OSError:
        return found
    try:
        for member in members:
            try:
                fd = snapshot.open_file(root, member.path)
            except OSError:
                continue
            try:
                answer = _has_writer(fd)
                info = os.fstat(fd)
            finally:
                os.close(fd)
            if answer:
                found.add(member.ino)
            elif answer is None:
                unknown[(info.st_dev, info.st_ino)] = member.ino
    finally:
        os.close(root)
    found.update(ino for _, ino in seen_in_processes(set(unknown)))
    return found


def _has_writer(fd: int) -> Optional[bool]:
    """None: leases cannot tell here."""
    if not hasattr(fcntl, "F_SETLEASE"):
        return None
    try:
        # Should somebody want to write just now, this is the signal we get: one that does nothing.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as exc:
        return True if exc.errno == errno.EAGAIN else None
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        pass  # Somebody wanted to write: closing the descriptor gives the lease back.
    return False


def seen_in_processes(wanted: Set[Identity], proc: str = "/proc") -> Set[Identity]:
    """Those of these files that a process we may look into has open for writing. None where there is no /proc."""
    found: Set[Identity] = set()
    if not wanted:
        return found
    for pid in _processes(proc):
        try:
            _find_open(f"{proc}/{pid}", wanted, found)
            _find_mapped(f"{proc}/{pid}", wanted, found)
        except OSError:
            # It ended while we looked, or belongs to somebody else.
            continue
    return found


def _processes(proc: str) -> List[str]:
    try:
        return [name for name in os.listdir(proc) if name.isdigit()]
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
            # Devices are not compared: some filesystems show another number here than stat does.
            found.update(identity for identity in wanted if identity[1] == int(fields[4]))
