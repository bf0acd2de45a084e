"""Changes in a checkpoint directory, reported by inotify for the whole tree."""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional, Tuple

from stoker.launcher.checkpoints import snapshot
from stoker.linux import inotify

_MASK = (
    inotify.IN_CREATE
    | inotify.IN_MODIFY
    | inotify.IN_CLOSE_WRITE
    | inotify.IN_MOVED_TO
    | inotify.IN_MOVED_FROM
    | inotify.IN_DELETE
    | inotify.IN_ONLYDIR
    | inotify.IN_DONT_FOLLOW
)


class DirectoryChange(NamedTuple):
    entry: str
    """The top-level entry that changed, or in which something changed."""
    kind: str
    """arrived (renamed into place) | created | written | closed | gone"""
    inside: bool
    """Whether the change was inside the entry, a directory, and not to the entry itself."""


class DirectoryWatch:
    """Watches one directory and everything in it. The watch ends when the directory itself is deleted.

    `overflowed`: the kernel has dropped events, so one full scan is needed. `blind`: not all changes are reported (no inotify, or
    more directories than the limit of watches), so regular full scans are needed.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.overflowed = False
        self.blind = False
        self._inotify: Optional[inotify.Inotify] = None
        self._tops: Dict[int, Tuple[str, str]] = {}
        """By watch: the top-level entry ('' for the directory itself) and the path."""
        self._watches: Dict[str, int] = {}
        self._departed: Dict[int, str] = {}
        """By cookie: directories that were renamed. One that arrives elsewhere in the tree keeps its watch, so that no write
        inside it is missed. Any other has left the tree."""
        try:
            self._inotify = inotify.Inotify()
            self._add(directory, "")
        except OSError:
            self.close()
            self.blind = True
            return
        for name in snapshot.entries(directory):
            self._add_tree(os.path.join(directory, name), name)

    @property
    def active(self) -> bool:
        return self._inotify is not None

    def fileno(self) -> Optional[int]:
        return None if self._inotify is None else self._inotify.fileno()

    def read(self) -> List[DirectoryChange]:
        if self._inotify is None:
            return []
        changes: List[DirectoryChange] = []
        for event in self._inotify.read():
            if event.mask & inotify.IN_Q_OVERFLOW:
                self.overflowed = True
            elif event.mask & inotify.IN_IGNORED:
                _, path = self._tops.pop(event.wd, ("", ""))
                self._watches.pop(path, None)
                if path == self.directory:
                    self._departed.clear()
                    self.close()
                    self.blind = True
                    break
            elif event.wd in self._tops:
                self._see(event, changes)
        for path in self._departed.values():
            self._drop_tree(path)
        self._departed.clear()
        return changes

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def _see(self, event: inotify.Event, changes: List[DirectoryChange]) -> None:
        top, path = self._tops[event.wd]
        entry, target = top or event.name, os.path.join(path, event.name)
        if event.mask & inotify.IN_ISDIR:
            if event.mask & (inotify.IN_CREATE | inotify.IN_MOVED_TO):
                self._departed.pop(event.cookie, None)
                self._add_tree(target, entry)
            elif event.mask & inotify.IN_MOVED_FROM:
                self._departed[event.cookie] = target
        changes.append(DirectoryChange(entry, _kind(event.mask), bool(top)))

    def _add_tree(self, path: str, top: str) -> None:
        """Watch a directory and those in it. The watch is set before the directory is listed, so that no change is missed."""
        if not os.path.isdir(path) or os.path.islink(path):
            return
        try:
            self._add(path, top)
            with os.scandir(path) as children:
                for child in children:
                    if child.is_dir(follow_symlinks=False):
                        self._add_tree(child.path, top)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            self.blind = True

    def _add(self, path: str, top: str) -> None:
        if self._inotify is not None:
            wd = self._inotify.add(path, _MASK)
            self._tops[wd] = (top, path)
            self._watches[path] = wd

    def _drop_tree(self, path: str) -> None:
        if self._inotify is None:
            return
        for known in [known for known in self._watches if known == path or known.startswith(path + os.sep)]:
            wd = self._watches.pop(known)
            self._tops.pop(wd, None)
            self._inotify.remove(wd)


def _kind(mask: int) -> str:
    if mask & inotify.IN_MOVED_TO:
        return "arrived"
    if mask & (inotify.IN_MOVED_FROM | inotify.IN_DELETE):
        return "gone"
    if mask & inotify.IN_CREATE:
        return "created"
    return "closed" if mask & inotify.IN_CLOSE_WRITE else "written"
