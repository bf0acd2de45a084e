"""The control groups above a cluster's pods, in every hierarchy the machine has (version 1, 2, or both)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.errors import HarnessError

__all__ = ["freeze", "groups", "make", "members", "remove", "thaw_all"]


def hierarchies() -> list[Path]:
    """Where each hierarchy is mounted."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [Path(line.split()[1]) for line in mounts if line.split()[2] in ("cgroup", "cgroup2")]


def make(group: str) -> None:
    """The group in each hierarchy, with what version 2 and cpusets want to hand down handed down."""
    for top in hierarchies():
        current = top
        for part in Path(group).parts:
            _hand_down(current)
            current = current / part
            current.mkdir(exist_ok=True)
            _inherit_cpuset(current)


def groups(group: str) -> list[Path]:
    """Where the group exists."""
    return [top / group for top in hierarchies() if (top / group).exists()]


def _below(root: Path, name: str) -> list[Path]:
    """Files and groups of this name; somebody else may be removing groups meanwhile, and `os.walk` does not mind."""
    return [Path(path) / name for path, groups, files in os.walk(root) if name in groups or name in files]


def members(group: str) -> list[int]:
    """The processes in the group and below, whichever hierarchy they show up in."""
    found: set[int] = set()
    for root in groups(group):
        for path in _below(root, "cgroup.procs"):
            try:
                found.update(int(line) for line in path.read_text().split())
            except OSError:
                continue
    return sorted(found)


def freeze(name: str, frozen: bool, group: str) -> None:
    """Stop or continue everything in the group of this name below `group`."""
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
    """Nothing that is frozen can be ended."""
    for root in groups(group):
        for path in [*_below(root, "freezer.state"), *_below(root, "cgroup.freeze")]:
            try:
                path.write_text("THAWED" if path.name == "freezer.state" else "0")
            except OSError:
                continue


def remove(group: str) -> None:
    """The group and all below it; its processes have ended, and the kernel may need a moment to believe it."""
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
            continue  # Its processes are in the way; what is needed and missing is seen when the kubelet starts.


def _inherit_cpuset(group: Path) -> None:
    """A new group of version 1's cpuset holds no processor until it is given some."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        mine, above = group / name, group.parent / name
        if mine.exists() and above.exists() and not mine.read_text().strip():
            mine.write_text(above.read_text())
