"""Which control groups a process is in, and where they are mounted. Pure: the caller reads /proc.

In a container the mount may show only a part of the hierarchy: the container's own group (version 1), or that group as if
it were the root (a cgroup namespace). /proc/self/cgroup still has the whole path.
"""

from __future__ import annotations

import posixpath
import re
from typing import Dict, Optional, Tuple

V1_CONTROLLERS = ("memory", "cpu", "cpuacct", "pids", "freezer", "devices")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def find(mountinfo: str, own: str) -> Tuple[Dict[str, str], Optional[str]]:
    """The directory for each v1 controller, and for v2, from /proc/PID/mountinfo and /proc/PID/cgroup."""
    paths, unified = _own_paths(own)
    first: Dict[str, str] = {}
    second: Optional[str] = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, kinds = left.split(), right.split()
        if len(words) < 5 or len(kinds) < 3:
            continue
        root, mount = unescape(words[3]), unescape(words[4])
        if kinds[0] == "cgroup":
            for controller in kinds[2].split(","):
                if controller in paths and controller in V1_CONTROLLERS:
                    first.setdefault(controller, _inside(mount, root, paths[controller]))
        elif kinds[0] == "cgroup2" and unified is not None and second is None:
            second = _inside(mount, root, unified)
    return first, second


def unescape(word: str) -> str:
    """A path from mountinfo, where spaces, tabs, newlines and backslashes are octal escapes."""
    return _ESCAPED.sub(lambda found: chr(int(found.group(1), 8)), word)


def _own_paths(own: str) -> Tuple[Dict[str, str], Optional[str]]:
    paths: Dict[str, str] = {}
    unified: Optional[str] = None
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            unified = path
        for controller in controllers.split(","):
            paths[controller] = path
    return paths, unified


def _inside(mount: str, root: str, path: str) -> str:
    relative = posixpath.relpath(path, root)
    if relative == "." or relative.startswith(".."):
        return mount
    return f"{mount}/{relative}"
