"""A launcher inside the container of a user's image: as its init or not, as any user, on a root that may be read-only.

The container sets the limits: the launcher makes no namespaces, mounts, groups or affinity of its own. Usage and out-of-memory
kills are read from the container's control group, which contains the launcher too. The kernel kills either one process of
that group (version 1, or version 2 without group kill), preferably the body (`prefer_body`), or all of them (version 2 as the
kubelet sets it). Then the next launcher finds a body without an ending.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
from typing import Any, Dict, Mapping, Optional

from stoker.launcher.telemetry.cgroup_usage import Cgroup
from stoker.linux import cgroup_paths, syscalls
from stoker.task.formats import TaskInfo

OWN_PREFIX = "STOKER_"
"""Prefix of variables between Stoker's own containers, which the body does not inherit."""
_OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")
"""Set by the shell that searched for a Python."""
UNNAMED_USER = "stoker"
"""USER for a user id without a name."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

OWN_SIZE = 48 << 20
"""More than a launcher needs. For the choice of a victim, the kernel counts the body as this much larger."""
_SCORES = "/proc/self/oom_score_adj"


def adapted(info: TaskInfo) -> TaskInfo:
    """The task with the limits that its container sets."""
    group = own_group(syscalls.read_text("/proc/self/mountinfo"), syscalls.read_text("/proc/self/cgroup"))
    if group is not None and info.memory is not None and Cgroup(group).memory_limit() is None:
        # The runtime could not set a limit: then the launcher measures the memory itself, as without a group.
        group.pop("memory", None)
    return dataclasses.replace(info, cgroup=group, cpu=None, pid_namespace=False)


def own_group(mountinfo: str, own: str) -> Optional[Dict[str, Any]]:
    """The container's control group, as in TaskInfo but without `procs`: all processes here are in it already. None where
    the container does not show it. The arguments are the files of /proc for this process."""
    first, second = cgroup_paths.find(mountinfo, own)
    if first:
        marks = {"memory": "memory.usage_in_bytes", "cpuacct": "cpuacct.usage", "pids": "pids.current"}
        found = {name: first[name] for name, mark in marks.items() if _has(first.get(name), mark)}
        return {"version": 1, **found} if found else None
    marks = {"memory": "memory.current", "cpu": "cpu.stat", "pids": "pids.current"}
    there = {name: second for name, mark in marks.items() if _has(second, mark)}
    return {"version": 2, **there} if there else None


def environ() -> Dict[str, str]:
    """The environment that this process was started with. Not `os.environ`: Python adds LC_CTYPE where there is no locale."""
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    except OSError:
        return dict(os.environ)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def inherited(environ: Mapping[str, str], home: Optional[str]) -> Dict[str, str]:
    """The container's environment for a body, with the variables that every user should have."""
    env = {
        name: value
        for name, value in environ.items()
        if not name.startswith(OWN_PREFIX) and name not in _OF_THE_SHELL
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
    """In the body, before exec: make the kernel kill this process rather than the launcher, which has to report what
    happened. Any user may raise this number."""
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
        # /proc cannot be written: the kernel chooses by size alone.
        pass
    finally:
        os.close(fd)


def _user() -> "tuple[str, str]":
    """Name and home of this user. A user id without a name is allowed."""
    try:
        known = pwd.getpwuid(os.getuid())
    except KeyError:
        return UNNAMED_USER, ""
    return known.pw_name, known.pw_dir


def _has(directory: Optional[str], name: str) -> bool:
    return directory is not None and os.path.exists(os.path.join(directory, name))
