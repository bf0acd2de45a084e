"""Removes files of other users.

An entry is moved into the trash by one rename and deleted afterwards; after a crash in between it stays in the trash.
Deleting does not recurse: a directory inside is moved up, beside the directory it was found in. So neither depth nor
number of entries matters.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from typing import Iterator

from stoker.linux.descriptors import Closing
from stoker.task.safe_open import OPEN_DIRECTORY, open_beneath


class Trash:
    """May be used from any thread."""

    def __init__(self, directory: str, path: str) -> None:
        """`path`: the trash below the task directory, on the same file system as the entries that are thrown."""
        self._directory = directory
        self._path = path
        self._lock = threading.Lock()

    def throw(self, parent: int, name: str) -> None:
        """Move `name`, of any kind, out of the directory `parent` (a descriptor). An absent entry is success."""
        with self._open() as here:
            _move(parent, name, here)

    def empty(self) -> None:
        """Delete the content. Entries that user code keeps protecting stay in the trash."""
        with self._lock, self._open() as here:
            while _pass(here):
                pass

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        with Closing(open_beneath(self._directory, self._path, create=True, mode=0o700)) as fd:
            yield fd


def _move(parent: int, name: str, trash: int) -> None:
    target = os.urandom(12).hex()
    try:
        os.rename(name, target, src_dir_fd=parent, dst_dir_fd=trash)
    except FileNotFoundError:
        return
    except PermissionError:
        # Moving a directory requires write permission on it; its owner can grant that to itself.
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise
        os.chmod(name, 0o700, dir_fd=parent)
        os.rename(name, target, src_dir_fd=parent, dst_dir_fd=trash)


def _pass(trash: int) -> int:
    """Delete what can be deleted; how much that was. Directories that were moved up are left to the next pass."""
    with os.scandir(trash) as entries:
        return sum(_remove(trash, entry.name) for entry in entries)


def _remove(trash: int, name: str) -> bool:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=trash, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=trash)
            return True
        os.chmod(name, 0o700, dir_fd=trash)
        fd = os.open(name, OPEN_DIRECTORY, dir_fd=trash)
    except OSError:
        return False
    with Closing(fd):
        _take_apart(fd, trash)
    try:
        os.rmdir(name, dir_fd=trash)
    except OSError:
        return False
    return True


def _take_apart(fd: int, trash: int) -> None:
    with os.scandir(fd) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    _move(fd, entry.name, trash)
                else:
                    os.unlink(entry.name, dir_fd=fd)
