"""Linux inotify through libc: the standard library does not have it, and launchers may use nothing else.

Where the kernel has no inotify, or the user's limit on instances or watches is reached, an `OSError` is raised. Callers
then fall back to polling.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import List, NamedTuple

IN_MODIFY = 0x00000002
IN_CLOSE_WRITE = 0x00000008
IN_MOVED_FROM = 0x00000040
IN_MOVED_TO = 0x00000080
IN_CREATE = 0x00000100
IN_DELETE = 0x00000200
IN_DELETE_SELF = 0x00000400
IN_MOVE_SELF = 0x00000800
IN_Q_OVERFLOW = 0x00004000
IN_IGNORED = 0x00008000
IN_ONLYDIR = 0x01000000
IN_DONT_FOLLOW = 0x02000000
IN_ISDIR = 0x40000000

_HEADER = struct.Struct("iIII")
_BUFFER = 64 * 1024


class Event(NamedTuple):
    wd: int
    """The watch; -1 for IN_Q_OVERFLOW: events were lost, and everything has to be read again."""
    mask: int
    cookie: int
    """Pairs IN_MOVED_FROM with IN_MOVED_TO."""
    name: str
    """The entry inside the watched directory; empty for the watched file or directory itself."""


class Inotify:
    """One inotify instance. Not thread-safe: one thread reads. The descriptor is non-blocking and not inherited.

    Raises OSError from the constructor and from `add` where the kernel has no inotify or a limit is reached
    (EMFILE: instances, ENOSPC: watches); the instance stays usable after a failed `add`.
    """

    def __init__(self) -> None:
        self._fd = -1
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            init, self._add, self._remove = libc.inotify_init1, libc.inotify_add_watch, libc.inotify_rm_watch
        except AttributeError as exc:
            raise OSError(errno.ENOSYS, "this system has no inotify") from exc
        self._add.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._fd = init(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error("inotify_init1")

    def fileno(self) -> int:
        return self._fd

    def add(self, path: str, mask: int) -> int:
        """Watch a file or directory. The same inode watched again keeps its number and takes the new mask."""
        wd = int(self._add(self._fd, os.fsencode(path), mask))
        if wd < 0:
            raise _error(path)
        return wd

    def remove(self, wd: int) -> None:
        """Stop watching; a watch that is already gone (its directory was deleted) is no error."""
        self._remove(self._fd, wd)

    def read(self) -> List[Event]:
        """All pending events, oldest first. Never blocks."""
        events: List[Event] = []
        while True:
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                return events
            offset = 0
            while offset < len(data):
                wd, mask, cookie, length = _HEADER.unpack_from(data, offset)
                offset += _HEADER.size
                name = data[offset : offset + length].split(b"\0", 1)[0]
                offset += length
                events.append(Event(wd, mask, cookie, os.fsdecode(name)))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Inotify":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), what)
