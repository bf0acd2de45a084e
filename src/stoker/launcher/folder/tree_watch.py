"""Changes in the whole working folder, reported by inotify with their paths.

Single writes are not reported: a log that is appended to would wake the launcher for every line. Every write ends with the close
of the file, also when its writer is killed.
"""

from __future__ import annotations

import os
from typing import Callable, Dict, List, NamedTuple, Optional

from stoker.linux import inotify

MOST_WATCHES = 4096
"""Directories that are watched. In a larger tree only the known state files are looked at."""
_MASK = (
    inotify.IN_CREATE
    | inotify.IN_CLOSE_WRITE
    | inotify.IN_MOVED_TO
    | inotify.IN_MOVED_FROM
    | inotify.IN_DELETE
    | inotify.IN_ONLYDIR
    | inotify.IN_DONT_FOLLOW
)


class TreeChange(NamedTuple):
    path: str
    kind: str
    """arrived (renamed into place) | created | closed | gone"""
    directory: bool


class TreeWatch:
    """`overflowed`: the kernel has dropped events, so one scan is needed. `blind`: not all changes are reported (no inotify, or
    too many directories), so regular scans are needed. `enters`: whether a directory (its path) is watched."""

    def __init__(self, root: str, enters: Callable[[str], bool], limit: int = MOST_WATCHES) -> None:
        self.root = root
        self.overflowed = False
        self.blind = False
        self._enters = enters
        self._limit = limit
        self._inotify: Optional[inotify.Inotify] = None
        self._paths: Dict[int, str] = {}
        """By watch. The folder itself is ''."""
        self._watches: Dict[str, int] = {}
        self._departed: Dict[int, str] = {}
        """By cookie: directories that were renamed. One that does not arrive elsewhere has left the folder."""
        try:
            self._inotify = inotify.Inotify()
        except OSError:
            self.blind = True

    @property
    def active(self) -> bool:
        return self._inotify is not None

    def fileno(self) -> Optional[int]:
        return None if self._inotify is None else self._inotify.fileno()

    def add(self, path: str) -> None:
        """Watch one directory. Called before it is listed, so that no change is missed."""
        if self._inotify is None:
            return
        if len(self._paths) >= self._limit:
            self.blind = True
            return
        try:
            wd = self._inotify.add(os.path.join(self.root, path) if path else self.root, _MASK)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            self.blind = True
            return
        self._watches.pop(self._paths.get(wd, path), None)
        self._paths[wd], self._watches[path] = path, wd

    def read(self) -> List[TreeChange]:
        if self._inotify is None:
            return []
        changes: List[TreeChange] = []
        for event in self._inotify.read():
            if event.mask & inotify.IN_Q_OVERFLOW:
                self.overflowed = True
            elif event.mask & inotify.IN_IGNORED:
                path = self._paths.pop(event.wd, None)
                if path is not None and self._watches.get(path) == event.wd:
                    del self._watches[path]
            elif event.wd in self._paths:
                self._see(event, changes)
        for path in self._departed.values():
            self._drop(path)
        self._departed.clear()
        return changes

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def _see(self, event: inotify.Event, changes: List[TreeChange]) -> None:
        above = self._paths[event.wd]
        path = f"{above}/{event.name}" if above else event.name
        kind, directory = _kind(event.mask), bool(event.mask & inotify.IN_ISDIR)
        changes.append(TreeChange(path, kind, directory))
        if directory and kind in ("created", "arrived"):
            self._departed.pop(event.cookie, None)
            self._add_tree(path, kind, changes)
        elif directory and event.mask & inotify.IN_MOVED_FROM:
            self._departed[event.cookie] = path

    def _add_tree(self, path: str, kind: str, changes: List[TreeChange]) -> None:
        """Watch a new directory and those in it. Its files may have been written before the watch."""
        if not self._enters(path):
            return
        self.add(path)
        try:
            with os.scandir(os.path.join(self.root, path)) as entries:
                for entry in entries:
                    below = f"{path}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        self._add_tree(below, kind, changes)
                    elif entry.is_file(follow_symlinks=False):
                        changes.append(TreeChange(below, kind, False))
        except OSError:
            return  # removed or replaced meanwhile

    def _drop(self, path: str) -> None:
        for known in [known for known in self._watches if known == path or known.startswith(path + "/")]:
            wd = self._watches.pop(known)
            self._paths.pop(wd, None)
            if self._inotify is not None:
                self._inotify.remove(wd)


def _kind(mask: int) -> str:
    if mask & inotify.IN_MOVED_TO:
        return "arrived"
    if mask & (inotify.IN_MOVED_FROM | inotify.IN_DELETE):
        return "gone"
    return "created" if mask & inotify.IN_CREATE else "closed"
