"""Changes the limits of a running task. Blocks for a moment: the kernel may have to reclaim memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.engine.local.host import cgroups, processes
from stoker.engine.local.host.isolation import Isolation
from stoker.linux import cgroup_paths
from stoker.task.units import readable_size

ROOM = 0.95
"""The largest share of its new limit that a task may already use: it continues to allocate meanwhile."""


def resize(
    record: Mapping[str, Any] | None, isolation: Isolation, *, cpu: float | None, memory: int | None
) -> str | None:
    """Change the limits of a task's group. None: done; otherwise why not, and nothing was changed."""
    wanted = {"cpu": cpu, "memory": memory}
    for kind, value in wanted.items():
        if value is not None and kind not in (record or {}):
            missing = isolation.missing.get(kind)
            why = f": {missing.reason}" if missing is not None else ""
            return f"its {kind} limit cannot be changed while it runs{why}"
    if record is None:
        return "the task has no cgroup, so it has no limits to change"
    version = int(record["version"])
    if memory is not None and (reason := _too_small(version, str(record["memory"]), memory)):
        return reason
    before: list[tuple[str, str]] = []
    try:
        for path, text in cgroups.changes(record, cgroups.Limits(cpu=cpu, memory=memory)):
            old = processes.read_text(path).strip()
            cgroups.write(path, text)
            before.append((path, old))
    except OSError as exc:
        for path, old in reversed(before):
            cgroups.restore(path, old)
        return f"the kernel refused the new size: {exc.strerror} ({exc.filename})"
    return None


def refuse_container(launcher: int, memory: int | None) -> str | None:
    """Why the container of this process cannot get this memory limit; None: the runtime may be asked."""
    if memory is None:
        return None
    own = processes.read_text(f"/proc/{launcher}/cgroup")
    first, second = cgroup_paths.find(processes.read_text("/proc/self/mountinfo"), own)
    if "memory" in first:
        return _too_small(1, first["memory"], memory)
    return _too_small(2, second, memory) if second is not None else None


def _too_small(version: int, directory: str, memory: int) -> str | None:
    """A limit below current use would end the task: version 2 kills for it, version 1 refuses."""
    used = cgroups.memory_in_use(version, directory)
    if used is None or used <= memory * ROOM:
        return None
    return f"it uses {readable_size(used)} now, too much for a limit of {readable_size(memory)}"
