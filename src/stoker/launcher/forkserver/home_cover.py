"""Covers the server's home in the mount namespace of a launcher.

An empty, read-only mount hides the home, and only the paths that the task needs are mounted again on top. So it makes no
difference whether a file existed when the launcher started, was made later, or was replaced. The targets of links out of the
home, and the same directories under other mounts of the file system, are covered too.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

from stoker.linux import syscalls
from stoker.linux.cgroup_paths import unescape

_EMPTY = "size=256k,mode=700"
_PARTS = (".", "-", "~")
"""What follows one of the server's names in the names of copies: stoker.db-wal, secrets.old, config.toml~."""


class Mounted(NamedTuple):
    """One line of mountinfo."""

    device: str
    root: str
    """The directory of the file system that is mounted."""
    point: str


def cover(what: Mapping[str, Any], directory: str) -> None:
    """Hide the home from this process and its children, except for the task's own `directory` and the paths in `shown`.

    `what`: {"home": path, "names": [entries of the home that belong to the server], "places": [the server's paths that may be
    outside the home], "shown": [[path, whether it may be written]]}. A home may be a user's own directory: other directories
    and links in it remain visible, other files do not. The process must have a mount namespace of its own. Where the kernel
    refuses, the task runs all the same, and the launcher's error log names what is visible.
    """
    home = str(what["home"])
    directories, links = foreign(home, [str(name) for name in what["names"]])
    keep = [(directory, True), *((str(path), bool(write)) for path, write in what["shown"])]
    keep += [(path, True) for path in directories]
    found = []
    for path, write in _outermost(keep):
        try:
            found.append((path, write, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)))
        except OSError:
            pass  # not there, or not accessible to this user, so the task does not need it
    try:
        # All paths are resolved before anything is covered: afterwards links are broken and there are more mounts.
        for place, others in _locations([home, *map(str, what["places"])]):
            if _cover(place, found, links):
                for path in others:
                    _cover(path, (), ())
    finally:
        for _, _, fd in found:
            os.close(fd)


def foreign(home: str, names: Sequence[str]) -> Tuple[List[str], List[Tuple[str, str]]]:
    """The directories in the home that do not belong to the server, and the links: (path, target)."""
    directories, links = [], []
    try:
        with os.scandir(home) as entries:
            for entry in entries:
                if is_own(entry.name, names):
                    continue
                if entry.is_symlink():
                    links.append((entry.path, os.readlink(entry.path)))
                elif entry.is_dir():
                    directories.append(entry.path)
    except OSError:
        pass  # the task cannot read it either
    return directories, links


def is_own(entry: str, names: Sequence[str]) -> bool:
    """Whether an entry of the home belongs to the server, or is by its name a copy or an earlier version of such an entry."""
    return any(entry == name or entry.startswith(tuple(name + part for part in _PARTS)) for name in names)


def beneath(path: str, place: str) -> bool:
    """Whether `path` is `place` or is in it, by the names alone."""
    return path == place or path.startswith(place.rstrip("/") + "/")


def elsewhere(place: str, mounts: Sequence[Mounted]) -> List[Tuple[str, str]]:
    """Other paths of the directory `place`, or of a part of it, through other mounts: (path there, path in `place`). Pure;
    `place` has no links in it."""
    around = [one for one in mounts if beneath(place, one.point)]
    if not around:
        return []
    # Of several mounts at one mount point the last one is visible.
    home = max(reversed(around), key=lambda one: len(one.point))
    inside = _join(home.root, place, home.point)
    found = []
    for one in mounts:
        if one.device != home.device or beneath(one.point, place):
            continue
        if beneath(inside, one.root):
            found.append((_join(one.point, inside, one.root), place))
        elif beneath(one.root, inside):
            found.append((one.point, _join(place, one.root, inside)))
    return [pair for pair in dict.fromkeys(found) if pair[0] != place]


def mounts(mountinfo: str) -> List[Mounted]:
    found = []
    for line in mountinfo.splitlines():
        words = line.split(" ")
        if len(words) > 4:
            found.append(Mounted(words[2], unescape(words[3]), unescape(words[4])))
    return found


def _locations(places: Iterable[str]) -> List[Tuple[str, List[str]]]:
    """The real paths of these, each with its other paths through other mounts."""
    known = mounts(syscalls.read_text("/proc/self/mountinfo"))
    found: List[Tuple[str, List[str]]] = []
    for place in places:
        real = os.path.realpath(place)
        if os.path.exists(real) and not any(beneath(real, other) for other, _ in found):
            pairs = elsewhere(real, known) if os.path.isdir(real) else []
            found.append((real, [path for path, original in pairs if _is_same(path, original)]))
    return found


def _cover(place: str, kept: Sequence[Tuple[str, bool, int]], links: Sequence[Tuple[str, str]]) -> bool:
    try:
        if not os.path.isdir(place):
            syscalls.mount(os.devnull, place, None, syscalls.MS_BIND)
            return True
        syscalls.mount("none", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _EMPTY)
    except OSError as exc:
        _report_failure(place, exc)
        return False
    try:
        for path, write, fd in kept:
            _mount_back(path, write, fd)
        for path, target in links:
            if not os.path.lexists(path):
                os.symlink(target, path)
        _read_only(place)
    except OSError as exc:
        # The task cannot run without its directory, so the cover is removed again.
        syscalls.unmount(place)
        _report_failure(place, exc)
        return False
    return True


def _is_same(path: str, other: str) -> bool:
    """Whether both paths are the same file; not so where something else is mounted on one of them."""
    try:
        return os.path.samestat(os.stat(path), os.stat(other))
    except OSError:
        return False


def _mount_back(path: str, write: bool, fd: int) -> None:
    try:
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return  # it is not in the covered directory
    except FileNotFoundError:
        os.makedirs(path, mode=0o700)
    syscalls.mount(f"/proc/self/fd/{fd}", path, None, syscalls.MS_BIND | syscalls.MS_REC)
    if not write:
        _read_only(path)


def _read_only(path: str) -> None:
    """Make a mount read-only. Its other restrictions remain: in a user namespace the kernel requires that."""
    forbids = os.statvfs(path).f_flag & (syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    syscalls.mount(None, path, None, syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | forbids)


def _outermost(paths: Iterable[Tuple[str, bool]]) -> List[Tuple[str, bool]]:
    """The paths that are not inside another one of them."""
    found: List[Tuple[str, bool]] = []
    for path, write in sorted(paths):
        if not any(beneath(path, other) for other, _ in found):
            found.append((path, write))
    return found


def _join(start: str, path: str, without: str) -> str:
    """`path` with its prefix `without` replaced by `start`."""
    rest = path[len(without.rstrip("/")) :].lstrip("/")
    return os.path.join(start, rest) if rest else start


def _report_failure(place: str, exc: OSError) -> None:
    print(f"stoker launcher: {place} is not hidden from the task: {exc}", file=sys.stderr)
