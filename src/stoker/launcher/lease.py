"""The lease: how long a task in a pod goes on without contact to the server.

Every authenticated request makes the task's courier replace the file `contact`, at most every ten seconds. The launcher
checks that file and counts by its own clock, which goes on while the machine is suspended. The server counts the same silence
from its side, and gives a task up only after the lease and a tenth more (`fencing.LEASE_MARGIN`). So, for `lease` seconds:

1.  A change of the file was made at some time since the last check. The lease is counted from that *last check*, the earliest
    possible time. So the launcher's lease never ends later than the server assumes.
2.  `lease` seconds later the body is ended, with its grace, and the launcher with it.
3.  Except when the launcher itself was stopped, starved or suspended with the machine, so that its last check is long ago.
    Then silence proves nothing: the courier may have been suspended too. The server has `REPRIEVE` seconds more. A change
    that is found in that time, between two checks close to each other, counts as any other.
4.  A task that must never run twice (`exclusive`) has no such reprieve, because it may have been replaced. It is ended at the
    first check that is too late, even if there was contact all the time.

A launcher that is started again in the same directory begins a new lease: it runs no body.
"""

from __future__ import annotations

import os
import time
from typing import Any, Optional

REPRIEVE = 120.0
"""Seconds that a server has to reach a task again that was suspended. It tries at least once a minute."""
CHECK_EVERY = 5.0
"""Seconds between two checks, or less for a short lease."""
MISSED_CHECKS = 4.0
"""After this many missed checks the launcher counts as having been stopped."""


class Lease:
    """Checked by the launcher's loop. Pure: the caller reads the clock and the file."""

    def __init__(self, seconds: float, now: float, *, exclusive: bool = False) -> None:
        self.seconds = seconds
        self.every = min(CHECK_EVERY, seconds / 10)
        self._exclusive = exclusive
        self._since = now
        """The earliest time at which the lease can have begun."""
        self._checked = now
        self._seen: Any = None
        self._reprieve: Optional[float] = None
        """The lease does not end before this time."""

    def look(self, now: float, contact: Any) -> bool:
        """Whether the lease is over. `contact`: a value that differs each time the file is replaced."""
        before, self._checked = self._checked, now
        away = now - before > MISSED_CHECKS * self.every
        if contact != self._seen:
            self._seen, self._since = contact, before
            if not away:
                self._reprieve = None
        if now - self._since < self.seconds:
            return False
        if away and not self._exclusive:
            self._reprieve = now + min(REPRIEVE, self.seconds)
        return self._reprieve is None or now >= self._reprieve

    @property
    def due(self) -> float:
        """When to check again."""
        return self._checked + self.every


def clock() -> float:
    """A monotonic clock, if possible one that goes on while the machine is suspended."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def contact(path: str) -> Any:
    """Identifies the present version of the file."""
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size
