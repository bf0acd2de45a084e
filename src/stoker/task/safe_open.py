"""Opens and lists a directory that user code controls.

It may contain links, devices, a million entries, or directories nested without end. So everything is opened component by
component from a descriptor, and links are reported but never followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import NamedTuple, Optional

from stoker.linux.descriptors import Closing
from stoker.task.local_directory import UnsafePath

MAX_DEPTH = 100
MAX_PATH = 4096
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooMany(ValueError):
    """The tree has more entries, or is deeper, than the limit."""


class Found(NamedTuple):
    path: str
    """Relative, with undecodable bytes as surrogates."""
    size: int
    mode: int
    link: Optional[str] = None
    mtime: float = 0.0
    ctime: float = 0.0
    """When it was last written, and when it last changed in any way; 0: not known."""


def open_beneath(root: str, path: str, *, create: bool = False, mode: int = 0o755) -> int:
    """A descriptor of a directory beneath `root`, through real directories only. The caller closes it."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in path.split("/") if path else ():
        if part in ("", ".", "..") or "\0" in part:
            os.close(fd)
            raise UnsafePath(errno.EPERM, "not a path beneath the task directory", path)
        with Closing(fd):
            child = _open_child(fd, part, path, create, mode)
        fd = child
    return fd


def check_depth(path: str) -> None:
    if path.count("/") >= MAX_DEPTH or len(path) > MAX_PATH:
        raise TooMany(f"directories are nested deeper than {MAX_DEPTH}: {path[:80]!r}...")


def reopen(root: int, prefix: str) -> Optional[int]:
    """Open a directory again; None when it was removed or replaced by a link meanwhile."""
    fd = os.dup(root)
    for part in prefix.split("/") if prefix else ():
        try:
            child = os.open(part, OPEN_DIRECTORY, dir_fd=fd)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                return None
            raise
        finally:
            os.close(fd)
        fd = child
    return fd


def look(fd: int, name: str, path: str) -> Optional[Found]:
    """The entry, if it is a regular file or a link."""
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            return Found(path, info.st_size, info.st_mode, None, info.st_mtime, info.st_ctime)
        if stat.S_ISLNK(info.st_mode):
            return Found(path, 0, 0, os.readlink(name, dir_fd=fd))
    except OSError as exc:
        # Removed, or no longer a link.
        if exc.errno not in (errno.ENOENT, errno.EINVAL):
            raise
    return None


def occupied(parent: int, name: str) -> bool:
    """Whether the directory `name` is there and not empty. UnsafePath when it is something else."""
    try:
        fd = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise _unsafe(exc, name) from exc
    with Closing(fd), os.scandir(fd) as entries:
        return next(entries, None) is not None


def _open_child(fd: int, name: str, path: str, create: bool, mode: int) -> int:
    try:
        return os.open(name, OPEN_DIRECTORY, dir_fd=fd)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=fd)
    except OSError as exc:
        raise _unsafe(exc, path) from exc
    try:
        return os.open(name, OPEN_DIRECTORY, dir_fd=fd)
    except OSError as exc:
        raise _unsafe(exc, path) from exc


def _unsafe(exc: OSError, path: str) -> OSError:
    if exc.errno in (errno.ELOOP, errno.ENOTDIR):
        return UnsafePath(errno.EPERM, "not a directory", path)
    return exc
