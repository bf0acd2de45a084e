"""The resources of this machine for runs: what is installed, less the limits of a container and of the settings."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator

from stoker.engine.local.host import processes
from stoker.linux import cgroup_paths
from stoker.settings import LocalSettings


def cpus(settings: LocalSettings) -> float:
    """Cores for runs: those this process may run on, within its own quota."""
    if settings.cpu is not None:
        return float(settings.cpu)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = own_quota()
    return float(affinity) if quota is None else min(float(affinity), quota)


def memory(settings: LocalSettings) -> int:
    """Bytes for runs."""
    if settings.memory is not None:
        return int(settings.memory)
    total = physical_memory()
    limit = own_memory_limit()
    return int(min(total, limit or total) * (1.0 - settings.memory_reserve))


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def own_memory_limit() -> int | None:
    """The lowest limit on this process's cgroup and those above it."""
    found: list[int] = []
    first, second = _own()
    for directory in _upwards(first.get("memory")):
        found.extend(_number(f"{directory}/memory.limit_in_bytes"))
    for directory in _upwards(second):
        found.extend(_number(f"{directory}/memory.max"))
    # Version 1 writes "no limit" as a number near 2^63.
    real = [value for value in found if value < 1 << 60]
    return min(real) if real else None


def own_quota() -> float | None:
    """The lowest CPU quota on this process's cgroup and those above it, in cores."""
    found: list[float] = []
    first, second = _own()
    for directory in _upwards(first.get("cpu")):
        quota, period = _number(f"{directory}/cpu.cfs_quota_us"), _number(f"{directory}/cpu.cfs_period_us")
        if quota and period and quota[0] > 0 and period[0] > 0:
            found.append(quota[0] / period[0])
    for directory in _upwards(second):
        words = processes.read_text(f"{directory}/cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            found.append(int(words[0]) / int(words[1]))
    return min(found) if found else None


def _own() -> tuple[dict[str, str], str | None]:
    return cgroup_paths.find(
        processes.read_text("/proc/self/mountinfo"), processes.read_text("/proc/self/cgroup")
    )


def _upwards(directory: str | None) -> Iterator[str]:
    while directory is not None and os.path.exists(f"{directory}/cgroup.procs"):  # noqa: PTH110 - strings throughout
        yield directory
        parent = posixpath.dirname(directory)
        directory = None if parent == directory else parent


def _number(path: str) -> list[int]:
    text = processes.read_text(path).strip()
    try:
        return [int(text)]
    except ValueError:
        return []
