"""Control groups, version 1 as root and version 2 delegated: one group per task, its limits set before it starts.

A task's group is in the engine's record of the task, because a restarted server may be elsewhere in the hierarchy. For a
task of an earlier version it is only in task.json, which user code may change. Such a record is used only if it names
that task's own group.

    v1   <mount of each controller>/<own path>/stoker-<home>/RUN.ATTEMPT.TASK
    v2   <own path>/stoker-<home>/RUN.ATTEMPT.TASK, with the server itself moved into <own path>/stoker-server
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.engine.local.host import processes
from stoker.engine.local.tasks.directories import make_directory
from stoker.linux.cgroup_paths import unescape
from stoker.task import formats

V2_CONTROLLERS = ("cpu", "memory", "pids")
PERIOD = 100_000
"""Microseconds over which a CPU quota is counted: the kernel's default."""
SERVER_LEAF = "stoker-server"


@dataclass(frozen=True)
class Limits:
    """Limits of a task. None: not limited."""

    cpu: float | None = None
    memory: int | None = None
    pids: int | None = None
    denied_devices: tuple[tuple[int, int], ...] = ()
    """(major, minor) of character devices that it must not open: GPUs of other tasks."""


@dataclass(frozen=True)
class CgroupTree:
    """Where groups may be created: a directory per controller (v1), or one for all (v2)."""

    version: int
    roots: Mapping[str, str] = field(default_factory=dict)
    """controller -> directory of this home. Version 2 has the same directory for each."""

    def record(self, name: str) -> dict[str, Any]:
        """The description of a task's group for task.json. Pure: nothing is created."""
        where = {controller: f"{root}/{name}" for controller, root in self.roots.items()}
        found: dict[str, Any] = {"version": self.version}
        found["procs"] = [f"{path}/cgroup.procs" for path in dict.fromkeys(where.values())]
        found.update({controller: path for controller, path in where.items() if controller != "devices"})
        if self.version == 2:
            found["freezer"] = next(iter(where.values()))
        return found


def home_name(home: Path) -> str:
    """The group of one home; two homes never share one."""
    return "stoker-" + hashlib.sha256(os.fsencode(home.absolute())).hexdigest()[:12]


def mounts(mountinfo: str) -> list[str]:
    """Every directory on which control groups are mounted. Pure."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if right.split(" ", 1)[0] in ("cgroup", "cgroup2"):
            found.append(unescape(left.split()[4]))
    return found


def unified(mountinfo: str) -> str | None:
    """The directory on which version 2 is mounted. Pure."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if right.split(" ", 1)[0] == "cgroup2":
            return unescape(left.split()[4])
    return None


def settings(version: int, controllers: Iterable[str], limits: Limits) -> list[tuple[str, str, str]]:
    """(controller, file, value) to write, in order. Pure."""
    have = set(controllers)
    wanted = _settings_v1(limits) if version == 1 else _settings_v2(limits)
    return [(controller, name, value) for controller, name, value in wanted if controller in have]


def make(tree: CgroupTree, name: str, limits: Limits) -> None:
    """Create a task's group and set its limits. May be repeated. Raises OSError when the kernel refuses."""
    for root in dict.fromkeys(tree.roots.values()):
        make_directory(Path(root, name))
        if tree.version == 2:
            _pass_on(root, tree.roots)
    for controller, file, value in settings(tree.version, tree.roots, limits):
        write(f"{tree.roots[controller]}/{name}/{file}", value)


def changes(record: Mapping[str, Any], limits: Limits) -> list[tuple[str, str]]:
    """(path, value) to write, in order, to change the limits of an existing group.

    In version 1 the limit of memory with swap must never be below that of memory: to raise both, swap goes first.
    """
    version = int(record["version"])
    wanted = [
        (f"{record[controller]}/{file}", value)
        for controller, file, value in settings(version, [key for key in record if key in _LIMITED], limits)
    ]
    if version == 1 and limits.memory is not None:
        now = processes.read_text(f"{record['memory']}/memory.limit_in_bytes").strip()
        if now.isdigit() and limits.memory > int(now):
            wanted[0], wanted[1] = wanted[1], wanted[0]
    return wanted


def write(path: str, value: str) -> None:
    """Write one limit. A file that this kernel lacks is skipped if the limit holds without it."""
    try:
        Path(path).write_text(value)
    except OSError:
        if posixpath.basename(path) not in _OPTIONAL:
            raise


def restore(path: str, value: str) -> None:
    """Restore the old value, as far as the kernel allows."""
    _try(path, value)


def memory_in_use(version: int, directory: str) -> int | None:
    """Bytes, without the file cache that the kernel reclaims first. None: not known."""
    name, cache = (
        ("memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.current", "inactive_file")
    )
    text = processes.read_text(f"{directory}/{name}").strip()
    if not text.isdigit():
        return None
    for line in processes.read_text(f"{directory}/memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == cache and value.isdigit():
            return max(0, int(text) - int(value))
    return int(text)


def _pass_on(root: str, controllers: Iterable[str]) -> None:
    """In version 2 a parent group must enable controllers. Done once per home, and again if the group was removed."""
    allowed = processes.read_text(f"{root}/cgroup.subtree_control").split()
    wanted = [f"+{controller}" for controller in controllers if controller not in allowed]
    if wanted:
        Path(root, "cgroup.subtree_control").write_text(" ".join(wanted))


def procs(record: Mapping[str, Any]) -> list[int]:
    """Processes in a task's group and the groups below it."""
    found: set[int] = set()
    for path in directories(record)[:1]:
        for directory, _, _ in os.walk(path, onerror=_raise_if_short):
            words = processes.read_text(f"{directory}/cgroup.procs", strict=True).split()
            found.update(int(word) for word in words if word != "0")
    return sorted(found)


def _raise_if_short(exc: OSError) -> None:
    """Raise when descriptors or memory are short: an unreadable group may have processes, a missing one has none."""
    if exc.errno in processes.SHORT_OF_RESOURCES:
        raise exc


def kill(record: Mapping[str, Any]) -> None:
    """One round of SIGKILL, repeated until `procs` is empty. In v1 the group is frozen meanwhile, against fork bombs."""
    if int(record.get("version", 1)) == 2:
        for path in directories(record):
            _try(f"{path}/cgroup.freeze", "0")
            if not _try(f"{path}/cgroup.kill", "1"):
                _kill_members(record)
        return
    freezer = record.get("freezer")
    if freezer:
        _try(f"{freezer}/freezer.state", "FROZEN")
    _kill_members(record)
    if freezer:
        _try(f"{freezer}/freezer.state", "THAWED")


def _kill_members(record: Mapping[str, Any]) -> None:
    processes.kill(procs(record), lambda: procs(record))


def remove(record: Mapping[str, Any]) -> None:
    """Remove a task's group and the groups below it. Groups with processes stay for the next time."""
    for path in directories(record):
        for directory, _, _ in os.walk(path, topdown=False):
            _rmdir(directory)
        if int(record.get("version", 1)) == 1:
            _rmdir(posixpath.dirname(path))


def _rmdir(path: str) -> None:
    try:
        Path(path).rmdir()
    except OSError:
        pass


def directories(record: Mapping[str, Any]) -> list[str]:
    """The directories of a task's group."""
    return [posixpath.dirname(path) for path in record.get("procs", [])]


def trusted(record: Any, group: str, mounts: Iterable[str]) -> dict[str, Any] | None:
    """A record from task.json if it names only the task's own `group` (HOME/NAME); None otherwise."""
    if not isinstance(record, dict) or not isinstance(record.get("procs"), list):
        return None
    tops = tuple(f"{mount.rstrip('/')}/" for mount in mounts)
    found = [(path, f"/{group}/cgroup.procs") for path in record["procs"]]
    found += [(path, f"/{group}") for key, path in record.items() if key not in ("procs", "version")]
    for path, end in found:
        if not isinstance(path, str) or posixpath.normpath(path) != path:
            return None
        if not path.endswith(end) or not path.startswith(tops):
            return None
    return record


def remember(file: Path, tree: CgroupTree | None, keep: set[str]) -> None:
    """Remove the groups of tasks that do not exist any more, also where earlier servers of this home created them.

    `file` holds those directories: a server started from another login session is elsewhere in the hierarchy.
    """
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = []
    roots = [root for root in known if isinstance(root, str)] if isinstance(known, list) else []
    now = list(tree.roots.values()) if tree is not None else []
    left = [root for root in dict.fromkeys([*roots, *now]) if _leftovers(root, keep) or root in now]
    if left != known:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        formats.write_json(str(file), left)  # type: ignore[arg-type]


def _leftovers(root: str, keep: set[str]) -> bool:
    """Remove groups that are not kept and have no processes. Whether the directory is still in use."""
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return False
    for name in names:
        if name not in keep:
            remove({"procs": [f"{root}/{name}/cgroup.procs"]})
    return Path(root).is_dir()


_LIMITED = ("cpu", "memory", "pids")
_OPTIONAL = frozenset(
    {"memory.memsw.limit_in_bytes", "memory.swap.max", "memory.oom.group", "cpu.shares", "cpu.weight"}
)
"""Missing on some kernels; the limit holds without them."""


def _settings_v1(limits: Limits) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    if limits.memory is not None:
        found.append(("memory", "memory.limit_in_bytes", str(limits.memory)))
        found.append(("memory", "memory.memsw.limit_in_bytes", str(limits.memory)))
    if limits.cpu is not None:
        found.append(("cpu", "cpu.cfs_period_us", str(PERIOD)))
        found.append(("cpu", "cpu.cfs_quota_us", str(quota(limits.cpu))))
        found.append(("cpu", "cpu.shares", str(max(2, round(1024 * limits.cpu)))))
    if limits.pids is not None:
        found.append(("pids", "pids.max", str(limits.pids)))
    for major, minor in limits.denied_devices:
        found.append(("devices", "devices.deny", f"c {major}:{minor} rwm"))
    return found


def _settings_v2(limits: Limits) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    if limits.memory is not None:
        found.append(("memory", "memory.max", str(limits.memory)))
        found.append(("memory", "memory.swap.max", "0"))
        found.append(("memory", "memory.oom.group", "1"))
    if limits.cpu is not None:
        found.append(("cpu", "cpu.max", f"{quota(limits.cpu)} {PERIOD}"))
        found.append(("cpu", "cpu.weight", str(min(10_000, max(1, round(100 * limits.cpu))))))
    if limits.pids is not None:
        found.append(("pids", "pids.max", str(limits.pids)))
    return found


def quota(cpu: float) -> int:
    """Microseconds of CPU per period; the kernel refuses less than a millisecond."""
    return max(1_000, round(cpu * PERIOD))


def _try(path: str, value: str) -> bool:
    try:
        Path(path).write_text(value)
    except OSError:
        return False
    return True
