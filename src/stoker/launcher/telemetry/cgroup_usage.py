"""What a body uses and what became of its limits, read from its cgroup where it has one, else from /proc."""

from __future__ import annotations

import os
import resource
import time
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.telemetry.shared_memory import SharedMemory
from stoker.linux import syscalls

QUICK = 0.05
"""Seconds that the exact memory of a tree may take to read, to be read with every sample: the kernel walks all
its pages for it."""

SHARE, SAVED = 0.003, 0.05
"""The part of a CPU that looks at shared memory may take, and how many seconds of it may be saved up for a burst."""
STEPS = 4 << 20, 64 << 20
"""Bytes: the machine's shared memory grows by a sixteenth of the limit, within these, and it is looked at whose it is."""

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Cgroup:
    """The body's cgroup, version 1 or 2. Every answer is None where the kernel does not give it."""

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
        """A new body in the same cgroup: peaks count from here, where the kernel lets them be reset."""
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
        """Processes the kernel has killed here for want of memory."""
        if not self._memory:
            return None
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return self._table(self._memory, name).get("oom_kill")

    def memory_hits(self) -> int:
        """How often the limit was reached: all that kernels before 4.13 say. Giving up file cache may have helped."""
        return (self._number(self._memory, "memory.failcnt") or 0) if self._memory else 0

    def memory_limit(self) -> Optional[int]:
        """As it is now: it may have been changed since the task began."""
        if not self._memory:
            return None
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        limit = self._number(self._memory, name)
        # Version 1 says "no limit" with a number near 2^63.
        return limit if limit is not None and limit < 1 << 60 else None

    def identity(self) -> str:
        """Another one for every group there ever was on this machine; empty when it is not known."""
        try:
            info = os.stat(self._memory) if self._memory else None
        except OSError:
            return ""
        return "" if info is None else f"{syscalls.boot_id()} {info.st_dev} {info.st_ino}"

    def memory(self) -> Optional[int]:
        """Bytes in use, without the file cache that the kernel would give up first."""
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
    """The same from /proc, process by process."""

    def __init__(self, tree: ProcessTree) -> None:
        self.tree = tree
        self.shared = SharedMemory()
        self._before = _reaped_cpu()
        self._quick = True
        self._spare = Allowance()
        self._exact: Optional[Tuple[int, int]] = None
        """What was found when it was counted exactly last, and what it seemed to be then."""

    def cpu_seconds(self) -> float:
        """Of the living, of those they have waited for, and of those the launcher has."""
        total = _reaped_cpu() - self._before
        for pid in self.tree.pids():
            fields = syscalls.stat_fields(pid)
            if fields:
                total += sum(int(ticks) for ticks in fields[11:15]) / _TICK
        return total

    def memory(self, limit: Optional[int] = None) -> int:
        """Bytes in use. Resident sizes count shared pages once per process, leave out what nobody has mapped, and are
        quick to read; the exact shares are asked for only when it matters (`limit` seems passed) or as long as that is
        quick too."""
        pids = self.tree.pids()
        resident = sum(_resident(pid) for pid in pids)
        if limit is None:
            return self._count(pids, resident) if self._quick else resident
        if self.is_due(limit):
            with self._spare:
                self.shared.look(pids)
        seeming = resident + self.shared.total + self.shared.grown()
        if seeming <= limit:
            self._exact = None
            return resident
        if self._exact is not None and self._spare.left() <= 0:
            exact, before = self._exact
            if seeming - before <= limit - exact:
                return exact  # it has not grown by as much as was left
        with self._spare:
            exact = self._count(pids, resident)
        self._exact = exact, seeming
        return exact

    def is_due(self, limit: int) -> bool:
        """Shared memory has grown by so much that it is worth a look whose it is."""
        least, most = STEPS
        return self.shared.grown() >= min(max(limit // 16, least), most) and self._spare.left() > 0

    def _count(self, pids: Sequence[int], resident: int) -> int:
        began = time.monotonic()
        shares = [_share(pid) for pid in pids]
        exact = min(resident, sum(all_ for all_, _ in shares))
        self.shared.look(pids)
        exact += self.shared.unmapped(pids, sum(shared for _, shared in shares))
        self._quick = time.monotonic() - began < QUICK
        return exact

    def count(self) -> int:
        return len(self.tree.pids())


class Allowance:
    """CPU time for what may be left out: a share of the time that goes by, some of it saved up."""

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
    """The process's part: pages it shares with its siblings are divided among them. And how much of it is shared memory;
    where the kernel does not say, all of it may be."""
    found = {}
    for line in syscalls.read_text(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss"):
            name, size = line.split()[:2]
            found[name] = int(size) * 1024
    whole = found.get("Pss:")
    if whole is None:
        return (_resident(pid),) * 2
    return whole, found.get("Pss_Shmem:", whole)


def _resident(pid: int) -> int:
    words = syscalls.read_text(f"/proc/{pid}/statm").split()
    return int(words[1]) * _PAGE if len(words) > 1 else 0
