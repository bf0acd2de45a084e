"""Background work that does not slow down the training beside it.

Process priorities are not enough. The kernel compares a process only with others of its session or control group, and
threads of a training wait for each other: a CPU second taken from one is lost by all. So a thread that hashes gigabytes
stops every few seconds and measures whether a CPU is idle. If one is, the thread runs at full speed. If none is, it uses a
small share of one CPU. All background work for one training on one machine takes turns with that share, because a delay
of one rank delays all ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import time
from typing import Any, Callable, Dict, Optional, Tuple

from stoker.linux import cgroup_paths

SHARE = 0.015
"""Part of one CPU to use where none is idle. It hashes a gigabyte and a half in a minute."""
PERIOD = 5.0
"""Seconds between two measurements, and the length of a turn."""
PATIENCE = 60.0
"""Seconds after which the holder of the turn is no longer waited for. It may be frozen, or the file may be locked by user
code."""
LOOK = 0.3
"""Seconds that a measurement takes; no work is done meanwhile. The kernel counts in hundredths of a second."""
ENOUGH = 0.7
"""Idle CPUs needed for one to count as free. Less than one, because other processes always run a little."""
_NAP = 0.1

Pause = Callable[[], None]
"""Called between two pieces of background work, by the thread that does it."""


def none() -> None:
    """A Pause for work that runs at full speed."""


class IdleThrottle:
    """Its method `pause` is a Pause. `hurried`: called each time; True while something waits for the work. `turns`: the
    file whose lock is the turn; empty: no other work takes turns with this one."""

    def __init__(self, hurried: Callable[[], bool] = bool, turns: str = "") -> None:
        self._hurried = hurried
        self._turn = _Turn(turns)
        self.rested = 0.0
        """Seconds spent waiting."""
        self._free = False
        self._began = self._used = 0.0
        self._until = 0.0

    def __enter__(self) -> "IdleThrottle":
        return self

    def __exit__(self, *exc: Any) -> None:
        self._turn.release()

    def pause(self) -> None:
        while not self._hurried():
            if time.monotonic() >= self._until:
                self._turn.release()
                self._free = self._measure()
                self._until = self._next_measurement()
            if self._free:
                return
            if self._turn.held:
                self._rest(self._began + (time.thread_time() - self._used) / SHARE)
                return
            if self._turn.take(time.monotonic()):
                self._began, self._used = time.monotonic(), time.thread_time()
                self._until = self._next_measurement()
                return
            self._rest(time.monotonic() + _NAP * random.uniform(1, 3))
        self._turn.release()

    def _next_measurement(self) -> float:
        # Workers of one run save at the same time. At different moments they do not all count on the same idle CPU.
        return time.monotonic() + PERIOD * random.uniform(0.6, 1.4)

    def _measure(self) -> bool:
        """Whether a CPU is free; True where that cannot be measured."""
        before, began = _CpuCounters(), time.monotonic()
        self._rest(began + LOOK)
        return before.spare(_CpuCounters(), time.monotonic() - began) >= ENOUGH

    def _rest(self, until: float) -> None:
        began = time.monotonic()
        while (left := until - time.monotonic()) > 0 and not self._hurried():
            time.sleep(min(left, _NAP))
        self.rested += time.monotonic() - began


def open_turns(path: str) -> int:
    """Open, or create, the file whose lock is the turn. User code can replace it, so links and pipes are refused."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


class _Turn:
    """The holder of the file lock has the share. The kernel releases the lock when the holder dies."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: Optional[int] = None
        self.held = False
        self._taken: Optional[int] = None
        """When the present holder took the lock: the modification time of the file."""
        self._since = 0.0
        """When this process first saw that time, by its monotonic clock."""

    def take(self, now: float) -> bool:
        self.held = not self._path or self._lock(now)
        return self.held

    def release(self) -> None:
        self.held = False
        fd, self._fd = self._fd, None
        if fd is not None:
            # Closing is not enough: a process that was just forked may still have a copy of the descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _lock(self, now: float) -> bool:
        """Take the lock; True also where the file cannot be locked: then each process has a share of its own."""
        try:
            fd = open_turns(self._path)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(fd)
        except BlockingIOError:
            taken = os.fstat(fd).st_mtime_ns
            os.close(fd)
            if taken != self._taken:
                self._taken, self._since = taken, now
            return now - self._since > PATIENCE
        except OSError:
            os.close(fd)
            return True
        self._fd = fd
        return True


class _CpuCounters:
    """The kernel's counters now: of the CPUs this process may run on, and of its control group where that has a limit."""

    def __init__(self) -> None:
        self.idle = _idle()
        self.limit, self.used = _group()

    def spare(self, later: "_CpuCounters", seconds: float) -> float:
        """CPUs that were idle between these two readings."""
        found = float("inf")
        if self.idle is not None and later.idle is not None:
            found = (later.idle - self.idle) / seconds
        if self.limit is not None and self.used is not None and later.used is not None:
            found = min(found, self.limit - (later.used - self.used) / seconds)
        return found


def _idle() -> Optional[float]:
    """Seconds that these CPUs were idle or waited for a disk. None: the kernel does not count them."""
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
    """CPUs that the control group may use, and CPU seconds it has used. None: no limit, or not known."""
    first, second = cgroup_paths.find(_read("/proc/self/mountinfo"), _read("/proc/self/cgroup"))
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
    """The content of a file whose lines are a name and a number."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
