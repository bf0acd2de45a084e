"""Memory that a body uses without having it mapped: files in /dev/shm and on other tmpfs, memfds, System V segments.

With a control group the kernel counts it. Without one it is found by scans: a file that a process of the body has open for
writing belongs to the body until it is deleted, even after it is closed. A file that is written and closed between two scans
is not found. A scan takes milliseconds, so it is done only when the machine's shared memory has grown.

A file that existed before the body does not belong to it: a data set in /dev/shm, or in a /tmp that is a tmpfs, is read by
many runs, and a control group is charged for none of it. Of such a file only the growth since then counts.
"""

from __future__ import annotations

import os
import re
import stat
import time
from typing import Dict, Iterable, List, Tuple

from stoker.linux import syscalls

Key = Tuple[int, int]
"""Device and inode."""
MEMFD = "/memfd:"
_SEGMENTS = "/proc/sysvipc/shm"
_MAPPING = re.compile(r"^\S+ \S+ \S+ (\w+):(\w+) (\d+) +(/.*)$", re.MULTILINE)
_BLOCK = 512
_COARSE = 0.05
"""Seconds by which the times of files may be behind the clock."""


class SharedMemory:
    """The shared memory of one body."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes at the last scan, mapped or not."""
        self._since = time.time() - _COARSE
        self._sizes: Dict[Key, int] = {}
        self._bases: Dict[Key, int] = {}
        """Bytes that a file had before the body."""
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
            if not self._add(path, sizes, key):
                del self._paths[key]
        own = set(pids)
        for pid in own:
            self._look_at(pid, sizes)
        self._segments = _segments(own, self._segments)
        self._sizes = sizes
        self._bases = {key: base for key, base in self._bases.items() if key in sizes}
        self.total = sum(sizes.values()) + sum(self._segments.values())

    def unmapped(self, pids: Iterable[int], shares: int) -> int:
        """Bytes found by the last scan that are in no process's resident memory, less what the processes have mapped of files
        that existed before the body. `shares`: how much shared memory is in their resident memory. A partly mapped file is
        counted too low rather than too high."""
        mapped = set()
        attached = set()
        others = 0
        for pid in pids if shares or self.total else ():
            strange = set()
            for major, minor, inode, path in _MAPPING.findall(syscalls.read_text(f"/proc/{pid}/maps")):
                key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
                mapped.add(key)
                if path.startswith("/SYSV"):
                    attached.add(int(inode))
                elif path.startswith(self._roots) and key not in self._sizes and self._was_there(path, key):
                    strange.add(key)
            others += _shares(syscalls.read_text(f"/proc/{pid}/smaps"), strange) if strange else 0
        inside = sum(size for key, size in self._sizes.items() if key in mapped)
        inside += sum(size for number, size in self._segments.items() if number in attached)
        return self.total - inside + max(0, inside - max(0, shares - others)) - others

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
                if not target.startswith((MEMFD, *self._roots)):
                    continue
                writable = bool(os.lstat(fd).st_mode & stat.S_IWUSR)
            except OSError:
                continue
            key = self._add(fd, sizes, written=writable or target.startswith(MEMFD))
            if key and not target.startswith(MEMFD) and not target.endswith(" (deleted)"):
                self._paths[key] = target

    def _add(
        self, path: str, sizes: Dict[Key, int], only: "Key | None" = None, written: bool = True
    ) -> "Key | None":
        """`written`: a process of the body has it open for writing. A file that none ever had open so does not belong to it."""
        try:
            info = os.stat(path)
        except OSError:
            return None
        key = (info.st_dev, info.st_ino)
        if only not in (None, key) or not (written or key in self._sizes):
            return None
        size = info.st_blocks * _BLOCK
        base = self._bases.setdefault(key, size if self._is_older(info) else 0)
        sizes[key] = max(0, size - base)
        return key

    def _is_older(self, info: os.stat_result) -> bool:
        """Than the body."""
        return info.st_mtime < self._since

    def _was_there(self, path: str, key: Key) -> bool:
        try:
            info = os.stat(path)
        except OSError:
            return False
        return (info.st_dev, info.st_ino) == key and self._is_older(info)


def _shares(smaps: str, keys: "set[Key]") -> int:
    """Bytes that a process has of these files in its resident memory."""
    total, key = 0, None
    for line in smaps.splitlines():
        word = line.partition(" ")[0]
        if not word.endswith(":"):
            found = _MAPPING.match(line)
            key = (os.makedev(int(found[1], 16), int(found[2], 16)), int(found[3])) if found else None
        elif word == "Pss:" and key in keys:
            total += int(line.split()[1]) * 1024
    return total


def tmpfs(mountinfo: str) -> Tuple[str, ...]:
    """Mount points of file systems in memory, each with a slash at the end."""
    found: List[str] = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        if tail.startswith("tmpfs "):
            found.append(head.split(" ")[4].rstrip("/") + "/")
    return tuple(found)


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
