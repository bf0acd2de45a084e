"""The lease: how long a task goes on by itself when nobody asks for it any more.

Whoever has the right key to the task's courier and asks anything, makes the courier replace the file `contact`
(at most every ten seconds). The launcher looks at it and counts by its own clock, which goes on while the machine
sleeps. The server counts the same silence from its own side and gives a task up only after the lease and a tenth
more (fence.LEASE_MARGIN). So the rule, for `lease` seconds:

1.  A change that is seen was made at some moment since the last look. The lease begins anew at the *last look*,
    the earliest it can have been: counted so, ours never ends later than the server thinks.
2.  `lease` seconds after that the body is ended, with its grace, and the launcher with it.
3.  Unless the launcher itself was away: its last look is long ago because it was stopped, starved or frozen with the
    whole machine. Then silence proves nothing (the courier may have slept as well, and the server finds it again
    only now), so the server has `REPRIEVE` seconds more. A change seen in that time, between two looks close to each
    other, counts as any other.
4.  A task that must never run twice (`exclusive`) has no such reprieve: its place may have been given away. It is
    ended at the first look that is too late, though it may have been asked for all the time.

A launcher that is started again in the same directory begins a new lease: it runs nothing, it only holds.
"""

from __future__ import annotations

import os
import time
from typing import Any, Optional

REPRIEVE = 120.0
"""Seconds that a server has to find a task again that was asleep: its own tries come at most a minute apart."""
LOOK = 5.0
"""Seconds between two looks, or less for a short lease."""
AWAY = 4.0
"""So many looks missed: the launcher was away."""


class Lease:
    """Asked by the launcher's loop. Pure: the caller reads the clock and the file."""

    def __init__(self, seconds: float, now: float, *, exclusive: bool = False) -> None:
        self.seconds = seconds
        self.every = min(LOOK, seconds / 10)
        self._exclusive = exclusive
        self._since = now
        """When the lease began, at the earliest."""
        self._looked = now
        self._seen: Any = None
        self._reprieve: Optional[float] = None
        """Not before this time."""

    def look(self, now: float, contact: Any) -> bool:
        """Whether it has run out. `contact`: whatever is another one each time the file is replaced."""
        before, self._looked = self._looked, now
        away = now - before > AWAY * self.every
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
        """When to look again."""
        return self._looked + self.every


def clock() -> float:
    """Monotonic, and goes on while the machine is suspended where the system has such a clock."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def contact(path: str) -> Any:
    """The file as it stands now."""
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size
