"""Looking through a directory that belongs to somebody else.

It may hold links, devices, a million entries, or directories nested until the stack ends. So: one open
directory at a time, no recursion, every entry counted, links reported but never followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.errors import TooLarge
from stoker.spec.tree import MAX_PATH
from stoker.task.near import UnsafePath

MAX_DEPTH = 100
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Found:
    path: str
    """Relative, with undecodable bytes as surrogates."""
    size: int
    mode: int
    link: str | None = None


def open_beneath(root: str, path: str, *, create: bool = False) -> int:
    """A descriptor of a directory beneath `root`, through real directories only. The caller closes it."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in path.split("/") if path else ():
        if part in ("", ".", ".."):
            os.close(fd)
            raise UnsafePath(errno.EPERM, "not a path beneath the task directory", path)
        try:
            child = _open_child(fd, part, path, create)
        finally:
            os.close(fd)
        fd = child
    return fd


def walk(root: int, *, max_entries: int) -> Iterator[Found]:
    """Every regular file and link beneath the directory `root` (a descriptor). TooLarge past `max_entries`
    entries of any kind; deeper than MAX_DEPTH is TooLarge too."""
    waiting = [""]
    seen = 0
    while waiting:
        prefix = waiting.pop()
        fd = _reopen(root, prefix)
        if fd is None:
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    seen += 1
                    if seen > max_entries:
                        raise TooLarge(
                            f"more than {max_entries} entries",
                            hint="Pack small files into one, or write fewer.",
                        )
                    path = f"{prefix}/{entry.name}" if prefix else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if path.count("/") >= MAX_DEPTH or len(path) > MAX_PATH:
                            raise TooLarge(
                                f"directories are nested deeper than {MAX_DEPTH}: {path[:80]!r}..."
                            )
                        waiting.append(path)
                    elif (found := _found(fd, entry.name, path)) is not None:
                        yield found
        finally:
            os.close(fd)


def _open_child(fd: int, name: str, path: str, create: bool) -> int:
    try:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=fd)
    except FileNotFoundError:
        if not create:
            raise
        os.mkdir(name, 0o755, dir_fd=fd)
        return os.open(name, _OPEN_DIRECTORY, dir_fd=fd)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafePath(errno.EPERM, "not a directory", path) from exc
        raise


def _reopen(root: int, prefix: str) -> int | None:
    """A directory seen before, opened anew; None when it vanished or was swapped for a link meanwhile."""
    fd = os.dup(root)
    for part in prefix.split("/") if prefix else ():
        try:
            child = os.open(part, _OPEN_DIRECTORY, dir_fd=fd)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                return None
            raise
        finally:
            os.close(fd)
        fd = child
    return fd


def _found(fd: int, name: str, path: str) -> Found | None:
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            return Found(path, info.st_size, info.st_mode)
        if stat.S_ISLNK(info.st_mode):
            return Found(path, 0, 0, os.readlink(name, dir_fd=fd))
    except FileNotFoundError:
        return None
    return None
