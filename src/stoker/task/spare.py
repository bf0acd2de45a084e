"""Work that can wait, done beside a training that should not notice it.

Priorities are not enough for that. Kernels weigh a process only against those of its own session or control group, and
where threads of a training wait for each other, every CPU second that is taken from one is lost by all. So whoever
hashes gigabytes asks every few seconds what the machine has to spare while it does nothing itself: where that is a CPU,
it goes as fast as it can; where not, it contents itself with a small share of one.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Optional

SHARE = 0.03
"""Of one CPU, where none is free. Two gigabytes are hashed in three quarters of a minute then."""
PERIOD = 5.0
"""Seconds between two looks."""
LOOK = 0.3
"""Seconds a look takes, in which nothing is done. The kernel counts in hundredths."""
ENOUGH = 0.7
"""CPUs that were idle meanwhile, for one to be called free: others do a little now and then."""
_NAP = 0.1

Pause = Callable[[], None]
"""Called between two pieces of such work, by the thread that does it."""


def none() -> None:
    """Nobody has to be given way to."""


class Spare:
    """`pause` is a Pause. `hurried`: whether somebody waits for the work now, asked each time."""

    def __init__(self, hurried: Callable[[], bool] = bool) -> None:
        self._hurried = hurried
        self._free = False
        self._began = self._used = 0.0
        self._until = 0.0

    def pause(self) -> None:
        if self._hurried():
            return
        if time.monotonic() >= self._until:
            self._free = self._look()
            self._began, self._used = time.monotonic(), time.thread_time()
            self._until = self._began + PERIOD
        elif not self._free:
            self._rest(self._began + (time.thread_time() - self._used) / SHARE)

    def _look(self) -> bool:
        """Whether a CPU is free; also where nobody can say."""
        before, began = _Seen(), time.monotonic()
        self._rest(began + LOOK)
        return before.spare(_Seen(), time.monotonic() - began) >= ENOUGH

    def _rest(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0 and not self._hurried():
            time.sleep(min(left, _NAP))


class _Seen:
    """What the kernel had counted by now: of the machine, and where this is a container, of that."""

    def __init__(self) -> None:
        self.idle = _idle()
        self.limit = _limit()
        self.used = _used() if self.limit is not None else None

    def spare(self, later: "_Seen", seconds: float) -> float:
        """CPUs that were free between these two."""
        found = float("inf")
        if self.idle is not None and later.idle is not None:
            found = (later.idle - self.idle) / seconds
        if self.limit is not None and self.used is not None and later.used is not None:
            found = min(found, self.limit - (later.used - self.used) / seconds)
        return found


def _idle() -> Optional[float]:
    """Seconds that CPUs of this machine had nothing to do, or only waited for a disk."""
    words = _read("/proc/stat").partition("\n")[0].split()
    try:
        return (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return None


def _limit() -> Optional[float]:
    """CPUs this container may use. The file is not there outside of one, and says `max` where there is no limit."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    try:
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def _used() -> Optional[float]:
    """CPU seconds of this container."""
    for line in _read("/sys/fs/cgroup/cpu.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec" and value.isdigit():
            return int(value) / 1e6
    return None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
