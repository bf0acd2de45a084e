"""Hashing, copying and cloning file descriptors.

Everything here works on open descriptors, so that no process can swap a path meanwhile. A full disk becomes DiskFull,
which names the disk and its free space.
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
from stoker.linux.descriptors import Closing
from stoker.task.formats import write_all

CHUNK = 1 << 20
SMALL = 1 << 20
"""Up to this size a file is read and written at once: fewer system calls than copying in the kernel."""

_FICLONE = 0x40049409
_CANNOT_CLONE = frozenset(
    {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.EACCES}
)


class Copier:
    """Copies between descriptors: by reflink if the file system can, else in the kernel, else by read and write.

    Remembers that cloning is impossible, so that thousands of files do not each try it. One per store. May be used
    from any thread: the worst race is one more try.
    """

    def __init__(self) -> None:
        self._clones = hasattr(fcntl, "ioctl") and os.uname().sysname == "Linux"
        self._in_kernel = hasattr(os, "copy_file_range")

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies all `size` bytes of `source` into the empty file `target`."""
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
    """SHA-256 and size of a file, read from its start without moving its offset. `pause`: called between pieces."""
    digest = hashlib.sha256()
    done = 0
    for piece in direct_io.pieces(fd, os.fstat(fd).st_size):
        done += len(piece)
        if limit is not None and done > limit:
            raise TooLarge(f"a file has more than {limit} bytes")
        digest.update(piece)
        pause()
    return digest.hexdigest(), done


def has_writer(fd: int) -> bool:
    """Whether a process has this file open for writing. True also where the kernel cannot tell.

    The kernel grants a read lease only while there is no writer. The lease is given back at once. The signal for a
    broken lease is set to one that is ignored by default.
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
    """Turns "no space" into DiskFull with the disk's name, and "read-only" into DiskReadOnly."""
    try:
        yield
    except OSError as exc:
        refused = disks.refusal(exc, where)
        if refused is None:
            raise
        raise refused from exc


def sync_file_system(path: Path) -> None:
    """Makes everything written to the file system of a directory durable: one call for thousands of files."""
    with Closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        libc = ctypes.CDLL(None, use_errno=True)
        with naming_full_disks(path):
            if not hasattr(libc, "syncfs"):
                os.sync()
            elif libc.syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
