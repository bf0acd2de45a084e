"""Facts about file systems, and the errors of one that refuses writes because it is full or read-only.

Neither case damages anything: earlier writes are intact, and work continues once the file system takes writes again.
So both differ from damage, and both errors name the file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from stoker.errors import DiskFull, DiskReadOnly, StoreError
from stoker.linux.cgroup_paths import unescape

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNKNOWN = 1 << 40
"""Assumed free bytes of a file system that reports none."""


def refusal(exc: OSError, path: Path) -> StoreError | None:
    """The error for a file system that refuses writes at `path`; None: another error."""
    if exc.errno in FULL:
        return full(path)
    if exc.errno == errno.EROFS:
        return read_only(path)
    return None


def full(path: Path) -> DiskFull:
    mount, left = mount_of(path), free(path)
    how, make = f"{left} bytes free", "Free some space"
    if has_no_inodes(path):
        how, make = f"{how}, but no inodes for new files", "Remove some files"
    return DiskFull(
        f"no space left on {mount} for {path}: {how}",
        hint=f"{make}; no acknowledged change is lost, and work continues as soon as there is room.",
        details={"file_system": str(mount), "free": left, "path": str(path)},
    )


def read_only(path: Path) -> DiskReadOnly:
    mount = mount_of(path)
    return DiskReadOnly(
        f"cannot write {path}: read-only file system {mount}",
        hint=f"Nothing was damaged. Find out why it is read-only (dmesg, mount) and make it writable again: "
        f"mount -o remount,rw {mount}. Then work continues.",
        details={"file_system": str(mount), "path": str(path)},
    )


def mount_of(path: Path) -> Path:
    """The mount point of the file system that holds `path`, or would hold it."""
    mount = Path(os.path.realpath(_existing(path)))
    mounts = _mounts()
    # A bind-mounted directory is on the same device: only the kernel's list shows it.
    while not (str(mount) in mounts or mount.is_mount()) and mount != mount.parent:
        mount = mount.parent
    return mount


def free(path: Path) -> int:
    """Bytes free for this user."""
    with contextlib.suppress(OSError):
        found = os.statvfs(_existing(path))
        return found.f_bavail * found.f_frsize
    return _UNKNOWN


def used(path: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """Bytes that a file, or a directory with everything in it, takes on the disk. Links are not followed. What cannot be
    read or vanishes meanwhile counts as nothing. `seen`: files with several names, each counted once."""
    seen = set() if seen is None else seen
    total = 0
    left = [path]
    while left:
        here = left.pop()
        with contextlib.suppress(OSError):
            info = here.lstat()
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                if (info.st_dev, info.st_ino) in seen:
                    continue
                seen.add((info.st_dev, info.st_ino))
            total += info.st_blocks * 512
            if stat.S_ISDIR(info.st_mode):
                left += [here / name for name in os.listdir(here)]
    return total


def has_no_inodes(path: Path) -> bool:
    """Whether no new file finds room, however many bytes are left."""
    with contextlib.suppress(OSError):
        found = os.statvfs(_existing(path))
        return found.f_files > 0 and found.f_favail == 0  # some file systems do not count them
    return False


def is_read_only(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if os.statvfs(_existing(path)).f_flag & os.ST_RDONLY:
            return True
    # ext4 of newer kernels does not tell this way that it has turned itself read-only after an error.
    return _gave_up(_mountinfo(), str(mount_of(path)))


def _gave_up(mountinfo: Iterable[str], mount: str) -> bool:
    """Whether the file system that was mounted last at `mount` says that it takes no more writes."""
    options = ""
    for line in mountinfo:
        head, _, tail = line.partition(" - ")
        if unescape(head.split(" ")[4]) == mount:
            options = tail.split(" ")[-1]
    return "emergency_ro" in options.strip().split(",")


def _existing(path: Path) -> Path:
    """The path itself or the nearest existing directory above it."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _mounts() -> set[str]:
    return {unescape(line.split(" ")[4]) for line in _mountinfo()}


def _mountinfo() -> list[str]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            return list(lines)
    except OSError:
        return []
