"""A launcher inside somebody else's container: as init of it or not, as any user, on a root that may be read-only.

The container is the limit: no namespaces, mounts, groups or affinity of our own. What the body uses and whether
it ran out of memory is read from the container's own control group, in which the launcher itself is too. The
kernel then kills one process of the group (version 1, or version 2 without group kill), the body rather than us
(`prefer_body`); or all of them (version 2 as the kubelet sets it), and the next launcher finds a body without an
ending.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
from typing import Any, Dict, Mapping, Optional

from stoker.launcher.telemetry.cgroup_usage import Cgroup
from stoker.linux import cgroup_paths, syscalls
from stoker.task.formats import TaskInfo

OURS = "STOKER_"
"""Variables that begin so are between Stoker's own containers, and not for the body."""
_OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")
"""Set by the shell that looked for our Python."""
SOMEBODY = "stoker"
"""The name of a user who has none."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

OWN_SIZE = 48 << 20
"""More than a launcher needs: so much more than that the body seems to use when the kernel looks for a victim."""
_SCORES = "/proc/self/oom_score_adj"


def adapted(info: TaskInfo) -> TaskInfo:
    """The same task as its container holds it."""
    group = own_group(syscalls.read_text("/proc/self/mountinfo"), syscalls.read_text("/proc/self/cgroup"))
    if group is not None and info.memory is not None and Cgroup(group).memory_limit() is None:
        # Nobody limits it here (a runtime without that right): then the launcher watches, as it does without a group.
        group.pop("memory", None)
    return dataclasses.replace(info, cgroup=group, cpu=None, pid_namespace=False)


def own_group(mountinfo: str, own: str) -> Optional[Dict[str, Any]]:
    """Our own control group, as TaskInfo has it but for `procs`: everything here is in it already. None where the
    container does not show it. The arguments are what /proc says of us."""
    first, second = cgroup_paths.find(mountinfo, own)
    if first:
        marks = {"memory": "memory.usage_in_bytes", "cpuacct": "cpuacct.usage", "pids": "pids.current"}
        found = {name: first[name] for name, mark in marks.items() if _has(first.get(name), mark)}
        return {"version": 1, **found} if found else None
    marks = {"memory": "memory.current", "cpu": "cpu.stat", "pids": "pids.current"}
    there = {name: second for name, mark in marks.items() if _has(second, mark)}
    return {"version": 2, **there} if there else None


def environ() -> Dict[str, str]:
    """What this process was started with. Not `os.environ`: Python adds LC_CTYPE of its own where it finds no locale."""
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    except OSError:
        return dict(os.environ)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def inherited(environ: Mapping[str, str], home: Optional[str]) -> Dict[str, str]:
    """What a body's environment begins with: the container's own, with what every user should have."""
    env = {
        name: value
        for name, value in environ.items()
        if not name.startswith(OURS) and name not in _OF_THE_SHELL
    }
    env.setdefault("PATH", DEFAULT_PATH)
    name, known = _user()
    env.setdefault("USER", name)
    env.setdefault("LOGNAME", env["USER"])
    for place in (env.get("HOME"), known, home):
        if place and place != "/" and os.access(place, os.W_OK | os.X_OK):
            env["HOME"] = place
            return env
    env["HOME"] = home or env.get("HOME") or known or "/tmp"
    return env


def prefer_body(limit: Optional[int]) -> None:
    """In the body, before exec: of all in the group the kernel shall rather kill this one than the launcher, which
    could not tell what happened. Anybody may raise this number, so it needs no rights."""
    if not limit:
        return
    more = 1 + (OWN_SIZE * 1000) // max(limit, 2 * OWN_SIZE)
    try:
        score = int(syscalls.read_text(_SCORES))
        fd = os.open(_SCORES, os.O_WRONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return
    try:
        os.write(fd, str(min(1000, score + more)).encode())
    except OSError:
        # A /proc that is not to be written: the kernel chooses by size alone.
        pass
    finally:
        os.close(fd)


def _user() -> "tuple[str, str]":
    """Name and home of this user; a number without a name is nobody's fault."""
    try:
        known = pwd.getpwuid(os.getuid())
    except KeyError:
        return SOMEBODY, ""
    return known.pw_name, known.pw_dir


def _has(directory: Optional[str], name: str) -> bool:
    return directory is not None and os.path.exists(os.path.join(directory, name))
