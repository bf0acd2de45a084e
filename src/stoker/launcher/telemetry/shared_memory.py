"""Memory that a body uses without having it mapped: files in /dev/shm and on other tmpfs, memfds, System V segments.

With a control group the kernel counts it. Without one it is found by scans: a file that a process of the body has open belongs
to the body until it is deleted, even after it is closed. A file that is written and closed between two scans is not found. A
scan takes milliseconds, so it is done only when the machine's shared memory has grown.
"""

from __future__ import annotations

import os
import re
from typing import Dict, Iterable, List, Tuple

from stoker.linux import syscalls

Key = Tuple[int, int]
"""Device and inode."""
MEMFD = "/memfd:"
_SEGMENTS = "/proc/sysvipc/shm"
_MAPPING = re.compile(r"^\S+ \S+ \S+ (\w+):(\w+) (\d+) +(/.*)$", re.MULTILINE)
_BLOCK = 512


class SharedMemory:
    """The shared memory of one body."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes at the last scan, mapped or not."""
        self._sizes: Dict[Key, int] = {}
        self._paths: Dict[Key, str] = {}
        """Named files that were found open; they may have been closed since."""
        self._segments: Dict[int, int] = {}
        self._roots: Tuple[str, ...] = ()
        self._before = syscalls.shared_memory()

    def grown(self) -> int:
        """Bytes by which the shared memory of the whole machine has grown since the last scan. The body's has grown by at most
        as much."""
        now = syscalls.shared_memory()
        self._before = min(self._before, now)
        return now - self._before

    def look(self, pids: Iterable[int]) -> None:
        self._before = syscalls.shared_memory()
        self._roots = self._roots or tmpfs(syscalls.read_text("/proc/self/mountinfo"))
        sizes: Dict[Key, int] = {}
        for key, path in list(self._paths.items()):
            if not _add(path, sizes, key):
                del self._paths[key]
        own = set(pids)
        for pid in own:
            self._look_at(pid, sizes)
        self._segments = _segments(own, self._segments)
        self._sizes = sizes
        self.total = sum(sizes.values()) + sum(self._segments.values())

    def unmapped(self, pids: Iterable[int], shares: int) -> int:
        """Bytes found by the last scan that are in no process's resident memory. `shares`: how much shared memory is in it.
        A partly mapped file is counted too low rather than too high."""
        mapped = set()
        attached = set()
        for pid in pids if self.total else ():
            for major, minor, inode, path in _MAPPING.findall(syscalls.read_text(f"/proc/{pid}/maps")):
                mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
                if path.startswith("/SYSV"):
                    attached.add(int(inode))
        inside = sum(size for key, size in self._sizes.items() if key in mapped)
        inside += sum(size for number, size in self._segments.items() if number in attached)
        return self.total - inside + max(0, inside - shares)

    def _look_at(self, pid: int, sizes: Dict[Key, int]) -> None:
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            return  # it has ended
        for name in names:
            fd = f"{folder}/{name}"
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith((MEMFD, *self._roots)):
                key = _add(fd, sizes)
                if key and not target.startswith(MEMFD) and not target.endswith(" (deleted)"):
                    self._paths[key] = target


def tmpfs(mountinfo: str) -> Tuple[str, ...]:
    """Mount points of file systems in memory, each with a slash at the end."""
    found: List[str] = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        if tail.startswith("tmpfs "):
            found.append(head.split(" ")[4].rstrip("/") + "/")
    return tuple(found)


def _add(path: str, sizes: Dict[Key, int], only: "Key | None" = None) -> "Key | None":
    try:
        info = os.stat(path)
    except OSError:
        return None
    key = (info.st_dev, info.st_ino)
    if only not in (None, key):
        return None
    sizes[key] = info.st_blocks * _BLOCK
    return key


def _segments(pids: "set[int]", known: Dict[int, int]) -> Dict[int, int]:
    """System V segments that these processes have made, and those in `known` that still exist: number -> bytes."""
    lines = syscalls.read_text(_SEGMENTS).splitlines()
    names = lines[0].split() if lines else []
    found = {}
    for line in lines[1:]:
        row = dict(zip(names, line.split()))  # noqa: B905 - `strict` came with Python 3.10
        try:
            number, maker, size = int(row["shmid"]), int(row["cpid"]), int(row["rss"])
        except (KeyError, ValueError):
            return {}  # a kernel that does not provide this
        if maker in pids or number in known:
            found[number] = size
    return found
