"""The control groups above a cluster's pods, in every hierarchy of the machine (version 1, 2, or both)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.errors import HarnessError

__all__ = ["freeze", "groups", "make", "members", "remove", "thaw_all"]


def hierarchies() -> list[Path]:
    """The mount point of each hierarchy."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [Path(line.split()[1]) for line in mounts if line.split()[2] in ("cgroup", "cgroup2")]


def make(group: str) -> None:
    """Create the group in each hierarchy. Version 2 controllers and cpusets are passed down to it."""
    for top in hierarchies():
        current = top
        for part in Path(group).parts:
            _hand_down(current)
            current = current / part
            current.mkdir(exist_ok=True)
            _inherit_cpuset(current)


def groups(group: str) -> list[Path]:
    """The existing directories of the group."""
    return [top / group for top in hierarchies() if (top / group).exists()]


def _below(root: Path, name: str) -> list[Path]:
    """Files and groups of this name. Groups may disappear meanwhile; `os.walk` tolerates that."""
    return [Path(path) / name for path, groups, files in os.walk(root) if name in groups or name in files]


def members(group: str) -> list[int]:
    """The processes in the group and below it, in any hierarchy."""
    found: set[int] = set()
    for root in groups(group):
        for path in _below(root, "cgroup.procs"):
            try:
                found.update(int(line) for line in path.read_text().split())
            except OSError:
                continue
    return sorted(found)


def freeze(name: str, frozen: bool, group: str) -> None:
    """Freeze or thaw the group of this name below `group`."""
    for root in groups(group):
        for found in _below(root, name):
            if (found / "freezer.state").exists():
                (found / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
                return
            if (found / "cgroup.freeze").exists() and "memory" in (found / "cgroup.controllers").read_text():
                (found / "cgroup.freeze").write_text("1" if frozen else "0")
                return
    raise HarnessError(f"no group called {name} under {group}")


def thaw_all(group: str) -> None:
    """Frozen processes cannot be ended."""
    for root in groups(group):
        for path in [*_below(root, "freezer.state"), *_below(root, "cgroup.freeze")]:
            try:
                path.write_text("THAWED" if path.name == "freezer.state" else "0")
            except OSError:
                continue


def remove(group: str) -> None:
    """Remove the group and all below it. It may be busy for a moment after its processes have ended."""
    for root in groups(group):
        deadline = time.monotonic() + 10
        while root.exists():
            for path, _, _ in os.walk(root, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    continue
            if time.monotonic() > deadline:
                raise HarnessError(f"{root} cannot be removed: {members(group)} are still in it")
            if root.exists():
                time.sleep(0.05)


def _hand_down(parent: Path) -> None:
    control = parent / "cgroup.subtree_control"
    if not control.exists():
        return
    for name in (parent / "cgroup.controllers").read_text().split():
        try:
            control.write_text(f"+{name}")
        except OSError:
            continue  # still has processes; the kubelet names a missing controller at its start


def _inherit_cpuset(group: Path) -> None:
    """A new cpuset group of version 1 has no CPUs until some are assigned."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        mine, above = group / name, group.parent / name
        if mine.exists() and above.exists() and not mine.read_text().strip():
            mine.write_text(above.read_text())
