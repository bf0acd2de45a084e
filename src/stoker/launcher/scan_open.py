"""Is any process we can see writing to these files?

Closing is the only sign that a writer gives when it is done with a file it writes in place, so a checkpoint
that somebody still holds open for writing, or has mapped shared and writable, is not complete. Processes of
other users cannot be looked into; their files are not ours either.
"""

from __future__ import annotations

import os
from typing import Iterable, Set, Tuple

Identity = Tuple[int, int]
"""Device and inode."""


def being_written(files: Iterable[Identity], proc: str = "/proc") -> Set[Identity]:
    """Those of these files that are open for writing anywhere. None where there is no /proc."""
    wanted = set(files)
    found: Set[Identity] = set()
    if not wanted:
        return found
    try:
        pids = [name for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return found
    for pid in pids:
        try:
            _find_open(f"{proc}/{pid}", wanted, found)
            _find_mapped(f"{proc}/{pid}", wanted, found)
        except OSError:
            # It ended while we looked, or belongs to somebody else.
            continue
    return found


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
