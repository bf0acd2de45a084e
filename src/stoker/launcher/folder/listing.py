"""The files of a working folder and their states. Training code owns the folder: links are never followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from stoker.launcher.checkpoints import snapshot
from stoker.launcher.folder import units
from stoker.launcher.folder.units import Unit

MOST_ENTRIES = 200_000
"""Entries of a folder that are listed. What is beyond is not guarded."""
DEEPEST = 64
_HEAD = 512


class Listed(NamedTuple):
    names: Dict[str, List[str]]
    """By directory ('' is the folder): the names of its regular files."""
    whole: bool
    """Whether all entries were listed."""


def walk(root: str, visit: Callable[[str], None] = lambda path: None) -> Listed:
    """List the folder. `visit`: called with each directory before it is listed."""
    names: Dict[str, List[str]] = {}
    left = [""]
    count = 0
    while left:
        path = left.pop()
        visit(path)
        found = names.setdefault(path, [])
        with contextlib.suppress(OSError), os.scandir(os.path.join(root, path) if path else root) as entries:
            for entry in entries:
                count += 1
                if count > MOST_ENTRIES:
                    return Listed(names, False)
                if entry.is_dir(follow_symlinks=False):
                    below = f"{path}/{entry.name}" if path else entry.name
                    if enters(below):
                        left.append(below)
                elif entry.is_file(follow_symlinks=False):
                    found.append(entry.name)
    return Listed(names, True)


def enters(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name not in units.NEVER_ENTERED and not name.endswith(units.TORN) and path.count("/") < DEEPEST


def sets_in(names: Dict[str, List[str]]) -> "set[str]":
    """The directories whose files are one state."""
    return {path for path, found in names.items() if path and units.holds_set(found)}


def units_in(names: Dict[str, List[str]], is_set: Callable[[str], bool]) -> Dict[str, Unit]:
    """The units of these files, by their paths."""
    found: Dict[str, Unit] = {}
    for directory, files in names.items():
        for name in files:
            unit = units.unit_of(f"{directory}/{name}" if directory else name, is_set)
            if unit is not None:
                found.setdefault(unit.path, unit)
    return found


def signature(root: str, unit: Unit) -> snapshot.Signature:
    """The present state of a unit's files; empty where there are none, or too many for a checkpoint."""
    try:
        with beneath(root, units.parent_of(unit.path)) as parent:
            name = unit.path.rpartition("/")[2]
            if unit.kind == units.GROUP:
                names = [one for one in snapshot.entries(parent) if _is_of(one, name)]
            else:
                names = [name]
            found = snapshot.snapshot(parent, names)
    except OSError:
        return ()
    above = units.parent_of(unit.path)
    full = [state._replace(path=f"{above}/{state.path}") if above else state for state in found]
    if unit.kind in (units.FILE, units.GROUP):
        # A directory in its place is another unit.
        return tuple(state for state in full if state.path.count("/") == unit.path.count("/"))
    return tuple(state for state in full if state.path != unit.path and units.is_member(unit, state.path))


def change_times(root: str, found: snapshot.Signature) -> Tuple[int, int]:
    """The oldest and the newest change of these files in any way, in nanoseconds. No program can set these times."""
    times: List[int] = []
    for state in found:
        with contextlib.suppress(OSError):
            times.append(os.stat(os.path.join(root, state.path), follow_symlinks=False).st_ctime_ns)
    return (min(times), max(times)) if times else (0, 0)


def head_of(root: str, path: str, size: int = _HEAD) -> bytes:
    """The first bytes of a file; empty if it cannot be read."""
    try:
        with beneath(root, units.parent_of(path)) as parent:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(os.path.join(parent, path.rpartition("/")[2]), flags)
    except OSError:
        return b""
    try:
        return os.read(fd, size) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


@contextlib.contextmanager
def beneath(root: str, path: str, *, create: bool = False) -> Iterator[str]:
    """A path to a directory of the folder that no link can redirect. Raises OSError."""
    fd = snapshot.open_directory(root)
    try:
        for part in path.split("/") if path else ():
            if part in ("", ".", ".."):
                raise OSError(errno.EPERM, "not a path beneath the folder", path)
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
            child = snapshot.open_directory(part, dir_fd=fd)
            os.close(fd)
            fd = child
        own = f"/proc/self/fd/{fd}"
        # The dot at the end: the descriptor's own entry is a link.
        yield f"{own}/." if os.path.isdir(own) else os.path.join(root, path)
    finally:
        os.close(fd)


def _is_of(name: str, stem: str) -> bool:
    return name == f"{stem}.index" or name.startswith(f"{stem}.data-")


def state_of(directory: str, path: str) -> Optional[snapshot.FileState]:
    """The state of one regular file."""
    try:
        info = os.stat(os.path.join(directory, path), follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    return snapshot.FileState(path, info.st_ino, info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode))
