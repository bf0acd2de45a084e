"""Usage of a body and hits of its limits, read from its cgroup or, without one, from /proc."""

from __future__ import annotations

import os
import resource
import time
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.telemetry.shared_memory import SharedMemory
from stoker.linux import syscalls
from stoker.linux.process import boot_id

QUICK = 0.05
"""The exact memory of a tree is read with every sample if that takes at most this long (seconds): the kernel walks all pages for
it."""

SHARE, SAVED = 0.003, 0.05
"""Part of a CPU that scans of shared memory may use, and seconds of it that may be saved up for a burst."""
STEPS = 4 << 20, 64 << 20
"""Smallest and largest growth (bytes) of the machine's shared memory after which it is scanned. Between them: a sixteenth of
the limit."""

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Cgroup:
    """The body's cgroup, version 1 or 2. A value is None where the kernel does not provide it."""

    def __init__(self, where: Optional[Mapping[str, Any]]) -> None:
        where = where or {}
        self.version = int(where.get("version", 0) or 0)
        self._memory: Optional[str] = where.get("memory")
        self._cpu: Optional[str] = where.get("cpuacct") or where.get("cpu")
        self._pids: Optional[str] = where.get("pids")

    @property
    def limits_memory(self) -> bool:
        return self._memory is not None

    @property
    def limits_pids(self) -> bool:
        return self._pids is not None

    def begin(self) -> None:
        """Reset the peaks for a new body in the same cgroup, where the kernel supports it."""
        if self._memory:
            name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
            try:
                fd = os.open(os.path.join(self._memory, name), os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                return
            try:
                os.write(fd, b"0")
            except OSError:
                pass
            finally:
                os.close(fd)

    def oom_kills(self) -> Optional[int]:
        """Number of processes that the kernel has killed here for lack of memory."""
        if not self._memory:
            return None
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return self._table(self._memory, name).get("oom_kill")

    def memory_hits(self) -> int:
        """How often the limit was reached. Kernels before 4.13 tell only this; dropping file cache may have been enough."""
        return (self._number(self._memory, "memory.failcnt") or 0) if self._memory else 0

    def memory_limit(self) -> Optional[int]:
        """The present limit: it may have changed since the task started."""
        if not self._memory:
            return None
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        limit = self._number(self._memory, name)
        # In version 1 a number near 2^63 means no limit.
        return limit if limit is not None and limit < 1 << 60 else None

    def identity(self) -> str:
        """A value that no other group of this machine ever has; empty when it is not known."""
        try:
            info = os.stat(self._memory) if self._memory else None
        except OSError:
            return ""
        return "" if info is None else f"{boot_id()} {info.st_dev} {info.st_ino}"

    def memory(self) -> Optional[int]:
        """Bytes in use, without the file cache that the kernel drops first."""
        if not self._memory:
            return None
        if self.version == 1:
            used, cache = self._number(self._memory, "memory.usage_in_bytes"), "total_inactive_file"
        else:
            used, cache = self._number(self._memory, "memory.current"), "inactive_file"
        if used is None:
            return None
        return max(0, used - self._table(self._memory, "memory.stat").get(cache, 0))

    def memory_peak(self) -> Optional[int]:
        if not self._memory:
            return None
        return self._number(self._memory, "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")

    def cpu_seconds(self) -> Optional[float]:
        if not self._cpu:
            return None
        if self.version == 1:
            used = self._number(self._cpu, "cpuacct.usage")
            return None if used is None else used / 1e9
        micro = self._table(self._cpu, "cpu.stat").get("usage_usec")
        return None if micro is None else micro / 1e6

    def pids(self) -> Optional[int]:
        return self._number(self._pids, "pids.current") if self._pids else None

    def _number(self, directory: str, name: str) -> Optional[int]:
        text = syscalls.read_text(os.path.join(directory, name)).strip()
        return int(text) if text.isdigit() else None

    def _table(self, directory: str, name: str) -> Dict[str, int]:
        found: Dict[str, int] = {}
        for line in syscalls.read_text(os.path.join(directory, name)).splitlines():
            key, _, value = line.partition(" ")
            if value.isdigit():
                found[key] = int(value)
        return found


class Processes:
    """The same values from /proc, summed over the processes."""

    def __init__(self, tree: ProcessTree) -> None:
        self.tree = tree
        self.shared = SharedMemory()
        self._before = _reaped_cpu()
        self._quick = True
        self._allowance = Allowance()
        self._exact: Optional[Tuple[int, int]] = None
        """The last exact value, and the estimate at that time."""

    def cpu_seconds(self) -> float:
        """CPU seconds of live processes, of their reaped children and of the launcher's reaped children."""
        total = _reaped_cpu() - self._before
        for pid in self.tree.pids():
            fields = syscalls.stat_fields(pid)
            if fields:
                total += sum(int(ticks) for ticks in fields[11:15]) / _TICK
        return total

    def memory(self, limit: Optional[int] = None) -> int:
        """Bytes in use.

        Resident sizes are quick to read, but count shared pages once per process and leave out unmapped memory. The exact
        value is read only when the estimate exceeds `limit`, or without a limit as long as that is quick too.
        """
        pids = self.tree.pids()
        resident = sum(_resident(pid) for pid in pids)
        if limit is None:
            return self._count(pids, resident) if self._quick else resident
        if self.is_due(limit):
            with self._allowance:
                self.shared.look(pids)
        seeming = resident + self.shared.total + self.shared.grown()
        if seeming <= limit:
            self._exact = None
            return resident
        if self._exact is not None and self._allowance.left() <= 0:
            exact, before = self._exact
            if seeming - before <= limit - exact:
                return exact  # it has grown by less than was left to the limit
        with self._allowance:
            exact = self._count(pids, resident)
        self._exact = exact, seeming
        return exact

    def is_due(self, limit: int) -> bool:
        """Whether the machine's shared memory has grown so much that a scan is worthwhile."""
        least, most = STEPS
        return self.shared.grown() >= min(max(limit // 16, least), most) and self._allowance.left() > 0

    def _count(self, pids: Sequence[int], resident: int) -> int:
        began = time.monotonic()
        shares = [_share(pid) for pid in pids]
        exact = min(resident, sum(all_ for all_, _ in shares))
        self.shared.look(pids)
        exact = max(0, exact + self.shared.unmapped(pids, sum(shared for _, shared in shares)))
        self._quick = time.monotonic() - began < QUICK
        return exact

    def count(self) -> int:
        return len(self.tree.pids())


class Allowance:
    """A budget of CPU time for optional work: a share of the elapsed time, of which some can be saved up."""

    def __init__(self) -> None:
        self._left = SAVED
        self._at = time.monotonic()
        self._began = 0.0

    def left(self) -> float:
        now = time.monotonic()
        self._left = min(SAVED, self._left + SHARE * (now - self._at))
        self._at = now
        return self._left

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._left -= time.thread_time() - self._began


def _reaped_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _share(pid: int) -> Tuple[int, int]:
    """The proportional size of a process, with shared pages divided among the processes; and how much of it is shared memory.
    Where the kernel does not tell, all of it may be."""
    found = shares_in(syscalls.read_text(f"/proc/{pid}/smaps_rollup"))
    return found or (_resident(pid),) * 2


def shares_in(rollup: str) -> Optional[Tuple[int, int]]:
    """The same from the kernel's table. Pages of files on a disk are left out, as in a control group: the kernel drops them
    when it needs memory. So a mapped data set or mapped weights do not count."""
    found = {}
    for line in rollup.splitlines():
        if line.startswith("Pss"):
            name, size = line.split()[:2]
            found[name] = int(size) * 1024
    whole = found.get("Pss:")
    if whole is None:
        return None
    return whole - found.get("Pss_File:", 0), found.get("Pss_Shmem:", whole)


def _resident(pid: int) -> int:
    words = syscalls.read_text(f"/proc/{pid}/statm").split()
    return int(words[1]) * _PAGE if len(words) > 1 else 0
