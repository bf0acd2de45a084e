"""The launcher's small dealings with the task directory itself: its lock, its identity, its JSON files."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from typing import Any, Dict, Optional, Tuple

from stoker.launcher import linux
from stoker.task import layout


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


def read_json(path: str) -> Optional[Dict[str, Any]]:
    try:
        value = json.loads(linux.read_text(path) or "null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def version() -> str:
    """Stoker's, from the package that is loaded anyway. It is not imported by name because it offers the SDK,
    which the launcher does not know."""
    return str(sys.modules["stoker"].__version__)
