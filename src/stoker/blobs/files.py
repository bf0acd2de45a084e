"""Hashing, copying and cloning file descriptors.

Everything here works on descriptors that are already open, so that nobody can swap a path in between. A full
disk becomes DiskFull, which names the disk and what is left on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from stoker import disks
from stoker.errors import TooLarge
from stoker.linux import direct_io, idle_throttle

CHUNK = 1 << 20
SMALL = 1 << 20
"""Up to here a file is read and written in one go: fewer system calls than asking the kernel to copy."""

_FICLONE = 0x40049409
_CANNOT_CLONE = frozenset(
    {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.EACCES}
)


class Copier:
    """Copies between descriptors: reflink where the file system can, else in the kernel, else by hand.

    Remembers that cloning is impossible, so that thousands of files do not each try. One per store; may be
    used from any thread (the worst race is one more try).
    """

    def __init__(self) -> None:
        self._clones = hasattr(fcntl, "ioctl") and os.uname().sysname == "Linux"
        self._in_kernel = hasattr(os, "copy_file_range")

    def copy(self, source: int, target: int, size: int) -> None:
        """All of `source`, which has `size` bytes, into the empty file `target`."""
        if size == 0:
            return
        if self._clones and size >= SMALL and self._clone(source, target):
            return
        if size <= SMALL:
            write_all(target, os.pread(source, size, 0))
            return
        done = self._copy_in_kernel(source, target, size) if self._in_kernel else 0
        while done < size and (data := os.pread(source, CHUNK, done)):
            write_all(target, data)
            done += len(data)

    def _clone(self, source: int, target: int) -> bool:
        try:
            fcntl.ioctl(target, _FICLONE, source)
        except OSError as exc:
            if exc.errno not in _CANNOT_CLONE:
                raise
            self._clones = False
            return False
        return True

    def _copy_in_kernel(self, source: int, target: int, size: int) -> int:
        done = 0
        while done < size:
            try:
                count = os.copy_file_range(source, target, min(size - done, 1 << 30), done)
            except OSError as exc:
                if exc.errno not in _CANNOT_CLONE:
                    raise
                self._in_kernel = False
                break
            if count == 0:
                break
            done += count
        return done


def hash_fd(
    fd: int, *, limit: int | None = None, pause: idle_throttle.Pause = idle_throttle.none
) -> tuple[str, int]:
    """SHA-256 and size of a file, read from its start without moving its offset. `pause`: called between two pieces."""
    digest = hashlib.sha256()
    done = 0
    for piece in direct_io.pieces(fd, os.fstat(fd).st_size):
        done += len(piece)
        if limit is not None and done > limit:
            raise TooLarge(f"a file has more than {limit} bytes")
        digest.update(piece)
        pause()
    return digest.hexdigest(), done


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def has_writer(fd: int) -> bool:
    """Whether somebody has this file open for writing. True also where the kernel cannot say.

    A read lease is granted only while nobody writes. It is given back at once; the signal that a break would
    send in between is made one that is ignored by default.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):
        return True
    return False


@contextlib.contextmanager
def naming_full_disks(where: Path) -> Iterator[None]:
    """Turn "no space" into DiskFull with the disk's name, and "read-only" into DiskReadOnly."""
    try:
        yield
    except OSError as exc:
        refused = disks.refusal(exc, where)
        if refused is None:
            raise
        raise refused from exc


def sync_file_system(path: Path) -> None:
    """Make everything written to the file system of a directory durable: one call for thousands of files."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with naming_full_disks(path):
            if not hasattr(libc, "syncfs"):
                os.sync()
            elif libc.syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
