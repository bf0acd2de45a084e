"""The volume for checkpoints that tasks share: a directory per run, and in it one per task, its part (see layout).

The courier lists the parts of lost tasks and removes parts that are not needed any more. It sees the parts of its own
run. If its container does not run the user's image, it sees those of all runs of its server. Its file permissions are
those of its user, which is also the user of the tasks that own the parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Iterator, List

from stoker.courier.trash import Trash
from stoker.linux.descriptors import Closing
from stoker.task import layout
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import open_beneath

MOST = 10_000
"""The most names that are listed."""


class SharedVolume:
    """May be used from any thread, and on one volume by many couriers."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._local = LocalTaskDir(root)
        # One per user: a user cannot move files into a directory that another one created.
        self._trash = f".trash-{os.getuid()}"

    def names(self) -> List[str]:
        """`RUN/PART` of each part, and `RUN` of a run without parts."""
        found: List[str] = []
        for run in self._names(""):
            if layout.is_run(run) and len(found) < MOST:
                parts = [name for name in self._names(run) if layout.part_of(f"{run}/{name}")]
                found += [f"{run}/{name}" for name in sorted(parts)] or [run]
        return found[:MOST]

    def path(self, name: str) -> str:
        """The directory of a part. Raises FileNotFoundError and UnsafePath."""
        if layout.part_of(name) is None:
            raise _unsafe(name)
        os.close(open_beneath(self._root, name))
        return os.path.join(self._root, name)

    def open(self, path: str) -> int:
        """Open a regular file in a part. The caller closes it."""
        _check(path)
        return self._local.open(path)

    def discard(self, path: str) -> None:
        """Remove a part or an entry in it, or a run without parts. An absent one is success."""
        run = path.split("/")[0]
        if not (path == run and layout.is_run(run)):
            _check(path)
            self._throw(path, Trash(self._root, f"{run}/{self._trash}"))
        # Other couriers create them again. A run's directory may be a mount, or may belong to another user.
        for name in (f"{run}/{self._trash}", run):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(self._root, name))

    def _throw(self, path: str, trash: Trash) -> None:
        folder, _, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError):
            with Closing(open_beneath(self._root, folder)) as parent:
                trash.throw(parent, name)
            trash.empty()

    def _names(self, folder: str) -> Iterator[str]:
        """Sorted names; empty if the directory is not readable."""
        with contextlib.suppress(OSError), Closing(open_beneath(self._root, folder)) as fd:
            yield from sorted(os.listdir(fd))


def _check(path: str) -> None:
    if layout.part_of("/".join(path.split("/")[:2])) is None:
        raise _unsafe(path)


def _unsafe(path: str) -> UnsafePath:
    return UnsafePath(errno.EPERM, "not a part of the shared volume", path)
