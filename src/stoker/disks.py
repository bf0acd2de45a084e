"""What a file system says of itself, and the errors of one that takes nothing more: full, or read-only.

Neither damages anything: what was written before is there, and work goes on once the file system takes writes again. So
both are told apart from damage, and both name the file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

from stoker.errors import DiskFull, DiskReadOnly, StoreError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How the kernel's list writes blanks and backslashes."""
_UNKNOWN = 1 << 40
"""Taken for the free bytes of a file system that does not say."""


def refusal(exc: OSError, path: Path) -> StoreError | None:
    """The error for a file system that takes nothing more at `path`; None: it is something else."""
    if exc.errno in FULL:
        return full(path)
    if exc.errno == errno.EROFS:
        return read_only(path)
    return None


def full(path: Path) -> DiskFull:
    mount, left = mount_of(path), free(path)
    return DiskFull(
        f"no space left on {mount} for {path}: {left} bytes free",
        hint="Free some space; nothing that was acknowledged is lost, and work goes on as soon as there is room.",
        details={"file_system": str(mount), "free": left, "path": str(path)},
    )


def read_only(path: Path) -> DiskReadOnly:
    mount = mount_of(path)
    return DiskReadOnly(
        f"cannot write {path}: read-only file system {mount}",
        hint=f"Nothing was damaged. Find out why it is read-only (dmesg, mount) and make it writable again: "
        f"mount -o remount,rw {mount}. Work goes on as soon as it is.",
        details={"file_system": str(mount), "path": str(path)},
    )


def mount_of(path: Path) -> Path:
    """Where the file system is mounted that holds `path`, or would hold it."""
    mount = Path(os.path.realpath(_there(path)))
    mounts = _mounts()
    # A directory that is mounted elsewhere once more is on the same device: only the kernel's list tells.
    while not (str(mount) in mounts or mount.is_mount()) and mount != mount.parent:
        mount = mount.parent
    return mount


def free(path: Path) -> int:
    """Bytes that are left for this user."""
    with contextlib.suppress(OSError):
        found = os.statvfs(_there(path))
        return found.f_bavail * found.f_frsize
    return _UNKNOWN


def is_read_only(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.statvfs(_there(path)).f_flag & os.ST_RDONLY)
    return False


def _there(path: Path) -> Path:
    """The path itself or the nearest directory above it that is there."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _mounts() -> set[str]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            return {_ESCAPED.sub(lambda found: chr(int(found[1], 8)), line.split(" ")[4]) for line in lines}
    except OSError:
        return set()
