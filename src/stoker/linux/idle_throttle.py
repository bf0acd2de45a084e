"""Work that can wait, done beside a training that should not notice it.

Priorities are not enough for that. Kernels weigh a process only against those of its own session or control group, and
where threads of a training wait for each other, every CPU second that is taken from one is lost by all. So whoever
hashes gigabytes asks every few seconds what the machine has to spare while it does nothing itself: where that is a CPU,
it goes as fast as it can; where not, it contents itself with a small share of one. Those who work for one training on one
machine take turns with that share: what holds up one of its ranks holds up all.
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
"""Of one CPU, where none is free. A gigabyte and a half is hashed in a minute then."""
PERIOD = 5.0
"""Seconds between two looks, and of a turn."""
PATIENCE = 60.0
"""Seconds for which one may have the turn before it is not waited for any more: it may be frozen, or no friend."""
LOOK = 0.3
"""Seconds a look takes, in which nothing is done. The kernel counts in hundredths."""
ENOUGH = 0.7
"""CPUs that were idle meanwhile, for one to be called free: others do a little now and then."""
_NAP = 0.1

Pause = Callable[[], None]
"""Called between two pieces of such work, by the thread that does it."""


def none() -> None:
    """Nobody has to be given way to."""


class IdleThrottle:
    """`pause` is a Pause. `hurried`: whether somebody waits for the work now, asked each time. `turns`: a file that all
    name who take turns; empty: there is nobody else."""

    def __init__(self, hurried: Callable[[], bool] = bool, turns: str = "") -> None:
        self._hurried = hurried
        self._turn = _Turn(turns)
        self.rested = 0.0
        """Seconds in which nothing was done."""
        self._free = False
        self._began = self._used = 0.0
        self._until = 0.0

    def __enter__(self) -> "IdleThrottle":
        return self

    def __exit__(self, *exc: Any) -> None:
        self._turn.give_back()

    def pause(self) -> None:
        while not self._hurried():
            if time.monotonic() >= self._until:
                self._turn.give_back()
                self._free = self._look()
                self._until = self._soon()
            if self._free:
                return
            if self._turn.held:
                self._rest(self._began + (time.thread_time() - self._used) / SHARE)
                return
            if self._turn.take(time.monotonic()):
                self._began, self._used = time.monotonic(), time.thread_time()
                self._until = self._soon()
                return
            self._rest(time.monotonic() + _NAP * random.uniform(1, 3))
        self._turn.give_back()

    def _soon(self) -> float:
        # Workers of one run save at the same time, and should not all find the same idle CPU.
        return time.monotonic() + PERIOD * random.uniform(0.6, 1.4)

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


def open_turns(path: str) -> int:
    """The file whose lock it is, made where it is missing. It lies where a training may put something else."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


class _Turn:
    """Whose turn it is: his who has the lock of a file. He gives it back by dying, too."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: Optional[int] = None
        self.held = False
        self._taken: Optional[int] = None
        """When whoever has it took it, as the file says."""
        self._since = 0.0
        """When that was first seen."""

    def take(self, now: float) -> bool:
        self.held = not self._path or self._lock(now)
        return self.held

    def give_back(self) -> None:
        self.held = False
        fd, self._fd = self._fd, None
        if fd is not None:
            # Closing is not enough: a process that was started meanwhile may have it open for a moment too.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _lock(self, now: float) -> bool:
        """Also where there can be no lock: then everybody takes his own share."""
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
    """Of a file whose lines are a name and a number."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
