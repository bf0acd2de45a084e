"""Watches task directories: inotify for their files, a pidfd for each launcher.

It gives notices only. The control loop finds what is missed (no inotify, an overflow of its queue) at its next check.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.engine.change_feed import ChangeFeed, Key
from stoker.linux.inotify import (
    IN_DONT_FOLLOW,
    IN_IGNORED,
    IN_MODIFY,
    IN_MOVED_TO,
    IN_ONLYDIR,
    IN_Q_OVERFLOW,
    Inotify,
)
from stoker.task import layout

log = logging.getLogger(__name__)

POLL = 0.5
"""Seconds between checks of the files of each task where they cannot be watched."""
INTERVAL = 0.05
"""Seconds between two notices for one task; the first is given at once."""
_FILES = frozenset({layout.STATUS, layout.JOURNAL})


@dataclass
class _Watched:
    root: int = -1
    numbers: list[int] = field(default_factory=list)
    pidfd: int | None = None
    directory: str = ""
    """Set if its files are polled instead of watched."""
    seen: tuple[int, ...] = ()
    last: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Watcher:
    """Belongs to one event loop and is created inside it. `died` is called at once when a launcher's pidfd reports its end.

    The pidfds belong to the caller; the watcher does not close them.
    """

    def __init__(self, died: Callable[[Key], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._died = died
        self._watched: dict[Key, _Watched] = {}
        self._by_number: dict[int, Key] = {}
        self._feeds: set[ChangeFeed] = set()
        self._polling: asyncio.TimerHandle | None = None
        self.problem = ""
        """Why files are not watched; empty: they are."""
        try:
            self._inotify: Inotify | None = Inotify()
            self._loop.add_reader(self._inotify.fileno(), self._files_changed)
        except OSError as exc:
            self._inotify = None
            self._log_problem(exc)

    def subscribe(self) -> ChangeFeed:
        feed = ChangeFeed()
        self._feeds.add(feed)
        return feed

    def unsubscribe(self, feed: ChangeFeed) -> None:
        self._feeds.discard(feed)

    def add(self, key: Key, directory: str, pidfd: int | None) -> None:
        """Watch a live task. A second call for the same task has no effect."""
        if key in self._watched:
            return
        watched = self._watched[key] = _Watched(pidfd=pidfd)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._launcher_ended, key)
        if self._inotify is None:
            self._poll(watched, directory)
            return
        # Not IN_CREATE: the first write to a new file is reported anyway.
        flags = IN_MODIFY | IN_MOVED_TO | IN_ONLYDIR | IN_DONT_FOLLOW
        try:
            for name in ("", layout.LOG, layout.METRICS):
                number = self._inotify.add(f"{directory}/{name}", flags)
                watched.numbers.append(number)
                self._by_number[number] = key
                if not name:
                    watched.root = number
        except OSError as exc:
            self._log_problem(exc)
            self._poll(watched, directory)

    def drop(self, key: Key) -> None:
        """Stop watching. Must come before the pidfd is closed."""
        watched = self._watched.pop(key, None)
        if watched is None:
            return
        if watched.timer is not None:
            watched.timer.cancel()
        if watched.pidfd is not None:
            self._loop.remove_reader(watched.pidfd)
        for number in watched.numbers:
            if self._by_number.pop(number, None) is not None and self._inotify is not None:
                self._inotify.remove(number)

    def notify(self, key: Key) -> None:
        """Something about this task may have changed."""
        for reader in self._feeds:
            reader.put(key)

    def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        for key in list(self._watched):
            self.drop(key)
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None
        for reader in self._feeds:
            reader.close()

    # -- helpers ---------------------------------------------------------------------------------------------

    def _files_changed(self) -> None:
        assert self._inotify is not None
        touched: dict[Key, None] = {}
        for event in self._inotify.read():
            if event.mask & IN_Q_OVERFLOW:
                touched.update(dict.fromkeys(self._watched))
                continue
            key = self._by_number.get(event.wd)
            if key is None:
                continue
            if event.mask & IN_IGNORED:
                del self._by_number[event.wd]
                continue
            if event.wd != self._watched[key].root or event.name in _FILES:
                touched[key] = None
        for key in touched:
            self._notify_coalesced(key)

    def _poll(self, watched: _Watched, directory: str) -> None:
        watched.directory = directory
        watched.seen = _times(directory)
        if self._polling is None:
            self._polling = self._loop.call_later(POLL, self._poll_all)

    def _poll_all(self) -> None:
        for key, watched in list(self._watched.items()):
            if watched.directory and (seen := _times(watched.directory)) != watched.seen:
                watched.seen = seen
                self.notify(key)
        self._polling = self._loop.call_later(POLL, self._poll_all)

    def _notify_coalesced(self, key: Key) -> None:
        watched = self._watched.get(key)
        if watched is None or watched.timer is not None:
            return
        now = self._loop.time()
        wait = watched.last + INTERVAL - now
        if wait <= 0:
            watched.last = now
            self.notify(key)
        else:
            watched.timer = self._loop.call_later(wait, self._due, key)

    def _due(self, key: Key) -> None:
        watched = self._watched.get(key)
        if watched is not None:
            watched.timer = None
            watched.last = self._loop.time()
            self.notify(key)

    def _launcher_ended(self, key: Key) -> None:
        self.drop(key)
        self._died(key)
        self.notify(key)

    def _log_problem(self, exc: OSError) -> None:
        if not self.problem:
            self.problem = str(exc)
            log.warning("task directories are polled instead of watched: %s", exc)


def _times(directory: str) -> tuple[int, ...]:
    """Modification times of the files that are watched."""
    found = []
    for name in (layout.STATUS, layout.JOURNAL, layout.METRICS):
        try:
            found.append(os.stat(f"{directory}/{name}", follow_symlinks=False).st_mtime_ns)  # noqa: PTH116
        except OSError:
            found.append(0)
    return tuple(found)
