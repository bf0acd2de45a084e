"""Samples the usage of a body over time, and enforces its limits on machines without cgroups (the watchdog)."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, Optional

from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.telemetry.cgroup_usage import Cgroup, Processes
from stoker.launcher.telemetry.gpu_usage import GpuUsage
from stoker.task import layout
from stoker.task.formats import TaskInfo

WATCH_EVERY = 0.25
"""Seconds between two checks of the watchdog."""
GROWTH_CHECK_EVERY = 0.1
"""Seconds between two reads of the machine's shared memory: a file there may be written and closed in a moment."""
FULL_RATE = 5 << 20
"""Bytes of samples written at the full rate. Each further MiB halves the rate, so the file stays small."""
MEBIBYTE = 1 << 20


class Sampler:
    """One per body. The launcher's loop calls `poll`, and `finish` when the last process has ended.

    `violation` is set when a limit is exceeded that only the watchdog enforces.
    """

    def __init__(self, directory: str, info: TaskInfo, tree: ProcessTree) -> None:
        self.info = info
        self.path = os.path.join(directory, layout.SAMPLES)
        self.cgroup = Cgroup(info.cgroup)
        self.processes = Processes(tree)
        self.gpus = GpuUsage(info.gpus, info.sample_every)
        self.usage: Dict[str, float] = {}
        self.violation: Optional[str] = None
        """memory | pids"""
        self.peak = 0
        """Peak memory that the watchdog has measured."""
        self._watch_memory = info.memory is not None and not self.cgroup.limits_memory
        self._watch_pids = info.pids is not None and not self.cgroup.limits_pids
        now = time.monotonic()
        self._next_sample = now + min(1.0, info.sample_every)
        self._next_watch = self._next_growth_check = now
        self._last_cpu = (now, 0.0)
        self._cpu_before = self.cgroup.cpu_seconds() or 0.0
        self._skipped = 0
        self._oom_before = self.cgroup.oom_kills() or 0
        self._hits_before = self.cgroup.memory_hits()

    def begin(self) -> None:
        self.cgroup.begin()
        self.gpus.begin()

    def poll(self, now: float) -> float:
        """Do what is due; seconds until the next call. Most calls read a few small files at most."""
        if self._watch_memory and now >= self._next_growth_check:
            self._next_growth_check = now + GROWTH_CHECK_EVERY
            if self.processes.is_due(self.info.memory or 0):
                self._next_watch = now
        if (self._watch_memory or self._watch_pids) and now >= self._next_watch:
            self._watch()
            self._next_watch = now + WATCH_EVERY
        if now >= self._next_sample:
            self._sample(now)
            self._next_sample = now + self.info.sample_every
        following = self._next_sample
        if self._watch_memory or self._watch_pids:
            following = min(following, self._next_watch)
        if self._watch_memory:
            following = min(following, self._next_growth_check)
        return max(0.0, following - now)

    @property
    def oom_kills(self) -> int:
        return (self.cgroup.oom_kills() or 0) - self._oom_before

    @property
    def limit_reached(self) -> bool:
        """Whether the memory limit was reached, on a kernel that does not count out-of-memory kills."""
        return self.cgroup.oom_kills() is None and self.cgroup.memory_hits() > self._hits_before

    @property
    def memory_limit(self) -> Optional[int]:
        return self.cgroup.memory_limit() or self.info.memory

    @property
    def memory_peak(self) -> Optional[int]:
        """Peak memory, counted as for the limit."""
        peak = max(self.cgroup.memory_peak() or 0, self.peak, int(self.usage.get("memory_peak", 0)))
        return peak or None

    def finish(self, seconds: float, rusage: Any) -> None:
        """Write the final values into `usage`, also for a body that was too short for a sample."""
        self.gpus.close()
        cpu = self._cpu_seconds()
        self.usage["cpu_seconds"] = round(cpu, 3)
        if "cpu_peak" not in self.usage and seconds > 0:
            self.usage["cpu_peak"] = round(cpu / seconds, 2)
        if rusage is not None:
            unit = 1024 if os.uname().sysname == "Linux" else 1
            self._raise("memory_peak", rusage.ru_maxrss * unit)
        self.usage["memory"] = 0
        for now in ("cpu", "gpu"):
            self.usage.pop(now, None)
        self._raise("pids_peak", 1)

    def _watch(self) -> None:
        if self._watch_memory:
            used = self.processes.memory(self.info.memory)
            self.peak = max(self.peak, used)
            if used > (self.info.memory or 0):
                self.violation = "memory"
        if self._watch_pids and self.processes.count() > (self.info.pids or 0):
            self.violation = "pids"

    def _sample(self, now: float) -> None:
        cpu = self._cpu_seconds()
        before, used = self._last_cpu
        rate = max(0.0, (cpu - used) / (now - before)) if now > before else 0.0
        self._last_cpu = (now, cpu)
        memory = self.cgroup.memory()
        if memory is None:
            memory = self.processes.memory()
        pids = self.cgroup.pids()
        if pids is None:
            pids = self.processes.count()
        self.usage["cpu_seconds"] = round(cpu, 3)
        self.usage["cpu"] = round(rate, 2)
        self.usage["memory"] = memory
        self._raise("cpu_peak", round(rate, 2))
        self._raise("memory_peak", memory)
        self._raise("pids_peak", pids)
        line: Dict[str, Any] = {
            "at": round(time.time(), 3),
            "cpu_seconds": round(cpu, 3),
            "cpu": round(rate, 2),
        }
        line.update(memory=memory, pids=pids)
        gpus = self.gpus.latest
        if gpus:
            line["gpus"] = gpus
            self.usage["gpu"] = round(sum(gpu.get("use", 0) for gpu in gpus) / len(gpus), 1)
            self._raise("gpu_peak", max(gpu.get("use", 0) for gpu in gpus))
            self._raise("gpu_memory_peak", max(gpu.get("memory", 0) for gpu in gpus))
        self._append(line)

    def _cpu_seconds(self) -> float:
        used = self.cgroup.cpu_seconds()
        return self.processes.cpu_seconds() if used is None else used - self._cpu_before

    def _append(self, line: Dict[str, Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.path, flags, 0o644)
        except OSError:
            # The disk is full, or user code has put something else there: the sample is left out.
            return
        try:
            over = max(0, os.fstat(fd).st_size - FULL_RATE) // MEBIBYTE
            self._skipped += 1
            if self._skipped >= 2**over:
                self._skipped = 0
                os.write(fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError:
            pass
        finally:
            os.close(fd)

    def _raise(self, key: str, value: float) -> None:
        self.usage[key] = max(self.usage.get(key, 0), value)
