"""The launcher's small dealings with the task directory itself: its lock, its identity, its JSON files."""

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
"""Bytes of a JSON file that are read. The order of a task in a world of thousands is a few megabytes."""


class DirectoryGone(Exception):
    """The task directory was removed: nobody wants this task any more."""


def take_lock(directory: str) -> Optional[int]:
    """The exclusive right to work on a task directory; None when somebody has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(os.path.join(directory, layout.LOCK), flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def identity(directory: str) -> Optional[Tuple[int, int]]:
    """Which directory this is; None when there is none. One that is mounted here stays in sight after it was
    deleted outside: then it has no name left."""
    try:
        info = os.stat(directory)
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if info.st_nlink else None


def read_json(path: str, *, mounted: bool = False) -> Optional[Dict[str, Any]]:
    """None where there is no such object. User code owns the directory: a pipe, or a file without end, must not hold up
    the launcher, and no link is followed. `mounted`: from a Secret of Kubernetes, whose files are links."""
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
    """Also where user code put a directory in its place: that is moved aside, or the end of the body could not be told."""
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
    """Stoker's, from the package that is loaded anyway. It is not imported by name because it offers the SDK,
    which the launcher does not know."""
    return str(sys.modules["stoker"].__version__)
