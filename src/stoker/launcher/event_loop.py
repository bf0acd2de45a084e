"""The events that the launcher waits for: signals, a replaced order, output in pipes."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Any, Callable, List, Optional

from stoker.linux import inotify
from stoker.task import layout

POLL = 1.0
"""Seconds between two reads of order.json where inotify does not work."""
SAFETY_NET = 5.0
"""The same where it works. A removed directory is noticed within this time in any case."""

_EVENTS = inotify.IN_CLOSE_WRITE | inotify.IN_MOVED_TO | inotify.IN_DELETE_SELF | inotify.IN_MOVE_SELF


class EventLoop:
    """Waits for signals, orders and readable descriptors."""

    def __init__(self, directory: str) -> None:
        self._wake, writer = os.pipe()
        for fd in (self._wake, writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        ignore: Callable[[int, Any], None] = lambda number, frame: None  # noqa: E731
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, ignore)
        # `launch` in a container blocks these until the handlers are set.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._watched: List[int] = []
        self.inotify: Optional[inotify.Inotify] = None
        try:
            watch = inotify.Inotify()
            watch.add(directory, _EVENTS)
            self._poll.register(watch.fileno(), select.POLLIN)
            self.inotify = watch
        except OSError:
            # Not Linux, or no watches left for this user: the order is read every second instead.
            pass
        self.poll_at = 0.0
        """When to check the order and the directory without an event."""
        self.schedule_poll()

    def watch(self, readers: List[int]) -> None:
        if readers != self._watched:
            for fd in self._watched:
                if fd not in readers:
                    self._poll.unregister(fd)
            for fd in readers:
                self._poll.register(fd, select.POLLIN)
            self._watched = readers

    def schedule_poll(self, seconds: Optional[float] = None) -> None:
        self.poll_at = time.monotonic() + (seconds or (SAFETY_NET if self.inotify else POLL))

    def wait(self, seconds: float) -> List[Any]:
        """The events: `order`, `gone`, `term`, `child`, or a readable descriptor."""
        found: List[Any] = []
        for fd, _ in self._poll.poll(seconds * 1000 + 0.5):
            if fd == self._wake:
                numbers = os.read(self._wake, 4096)
                found.append("child")
                if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                    found.append("term")
            elif self.inotify is not None and fd == self.inotify.fileno():
                found.extend(_meaning(event) for event in self.inotify.read())
            else:
                found.append(fd)
        return found


def _meaning(event: inotify.Event) -> str:
    if event.mask & (inotify.IN_DELETE_SELF | inotify.IN_MOVE_SELF):
        return "gone"
    return "order" if event.name == layout.ORDER or event.mask & inotify.IN_Q_OVERFLOW else ""
