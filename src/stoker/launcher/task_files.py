"""The launcher's access to the task directory: its lock, its identity, its JSON files."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import time
from typing import Any, Dict, Mapping, Optional, Tuple

from stoker.task import formats, layout

_LARGEST = 64 << 20
"""Largest JSON file that is read, in bytes. The order of a task in a world of thousands has a few megabytes."""


class DirectoryGone(Exception):
    """The task directory was removed: the task is over."""


def take_lock(directory: str) -> Optional[int]:
    """Take the exclusive lock of a task directory; None when another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(os.path.join(directory, layout.LOCK), flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def identity(directory: str) -> Optional[Tuple[int, int]]:
    """Device and inode of a directory; None when it does not exist. A mounted directory stays visible here after it was
    deleted outside; then its link count is 0."""
    try:
        info = os.stat(directory)
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if info.st_nlink else None


def read_json(path: str, *, mounted: bool = False) -> Optional[Dict[str, Any]]:
    """A JSON object from a file; None where there is none. User code owns the directory: no link is followed, and a pipe or
    an endless file must not block the launcher. `mounted`: from a Secret of Kubernetes, whose files are links."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags if mounted else flags | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            return None
        with open(fd, "rb", closefd=False) as file:
            value = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(fd)
    return value if isinstance(value, dict) else None


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write a JSON file. A directory that user code has put there is renamed, because the end of the body must be
    recorded."""
    try:
        formats.write_json(path, value)
    except IsADirectoryError:
        os.rename(path, f"{path}.{time.time_ns()}.aside")
        formats.write_json(path, value)


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def version() -> str:
    """Stoker's version, from the loaded package. It is not imported by name, because the package exports the SDK, which
    the launcher must not import."""
    return str(sys.modules["stoker"].__version__)
