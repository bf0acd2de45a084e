"""Work that can wait, done beside a training that should not notice it.

Priorities are not enough for that. Kernels weigh a process only against those of its own session or control group, and
where threads of a training wait for each other, every CPU second that is taken from one is lost by all. So whoever
hashes gigabytes asks every few seconds what the machine has to spare while it does nothing itself: where that is a CPU,
it goes as fast as it can; where not, it contents itself with a small share of one.
"""

from __future__ import annotations

import os
import random
import time
from typing import Callable, Dict, Optional, Tuple

from stoker.task import groups

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
        self.rested = 0.0
        """Seconds in which nothing was done."""
        self._free = False
        self._began = self._used = 0.0
        self._until = 0.0

    def pause(self) -> None:
        if self._hurried():
            return
        if time.monotonic() >= self._until:
            self._free = self._look()
            self._began, self._used = time.monotonic(), time.thread_time()
            # Workers of one run save at the same time, and should not all find the same idle CPU.
            self._until = self._began + PERIOD * random.uniform(0.6, 1.4)
        elif not self._free:
            self._rest(self._began + (time.thread_time() - self._used) / SHARE)

    def _look(self) -> bool:
        """Whether a CPU is free; also where nobody can say."""
        before, began = _Seen(), time.monotonic()
        self._rest(began + LOOK)
        return before.spare(_Seen(), time.monotonic() - began) >= ENOUGH

    def _rest(self, until: float) -> None:
        began = time.monotonic()
        while (left := until - time.monotonic()) > 0 and not self._hurried():
            time.sleep(min(left, _NAP))
        self.rested += time.monotonic() - began


class _Seen:
    """What the kernel had counted by now: of the CPUs this process may run on, and where there is a limit, of its group."""

    def __init__(self) -> None:
        self.idle = _idle()
        self.limit, self.used = _group()

    def spare(self, later: "_Seen", seconds: float) -> float:
        """CPUs that were free between these two."""
        found = float("inf")
        if self.idle is not None and later.idle is not None:
            found = (later.idle - self.idle) / seconds
        if self.limit is not None and self.used is not None and later.used is not None:
            found = min(found, self.limit - (later.used - self.used) / seconds)
        return found


def _idle() -> Optional[float]:
    """Seconds that these CPUs had nothing to do, or only waited for a disk. None: nobody counts them here."""
    try:
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _read("/proc/stat").splitlines() if line.startswith("cpu")]
        counted = [[int(word) for word in words[1:]] for words in lines if words[0] in ours]
        if not any(map(sum, counted)):
            return None
        return sum(numbers[3] + numbers[4] for numbers in counted) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, IndexError, ValueError):
        return None


def _group() -> Tuple[Optional[float], Optional[float]]:
    """CPUs that the control group may use, and CPU seconds it has used. None: no limit, or nobody can say."""
    first, second = groups.find(_read("/proc/self/mountinfo"), _read("/proc/self/cgroup"))
    if second is not None:
        quota, _, period = _read(f"{second}/cpu.max").partition(" ")
        used = _numbers(_read(f"{second}/cpu.stat")).get("usage_usec", 0) / 1e6
    else:
        quota, period = (_read(f"{first.get('cpu')}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        spent = _read(f"{first.get('cpuacct')}/cpuacct.usage")
        used = _numbers(f"used {spent}").get("used", 0) / 1e9
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None, None
    return (limit, used) if limit > 0 else (None, None)


def _numbers(text: str) -> Dict[str, int]:
    """Of a file whose lines are a name and a number."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
