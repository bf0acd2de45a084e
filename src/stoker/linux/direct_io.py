"""Reading and writing large files past the page cache.

A checkpoint of gigabytes that goes through the cache costs the kernel more CPU than all else that is done with it, on
behalf of nobody in particular, and puts out of the cache what the training reads. Where the file system has no such way
(or the system: it is Linux's), and for what is small, the usual one is taken; callers see no difference.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
from typing import Any, Iterator, Optional, Union

from stoker.linux import idle_throttle

LARGE = 64 << 20
"""Bytes from which it is worth it: a small file is soon read again, and then from the cache."""
PIECE = 4 << 20
_WINDOW = 1 << 20
_BLOCK = 4096
"""What addresses, offsets and lengths are multiples of. No disk asks for more."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_CACHED = getattr(os, "RWF_NOWAIT", 0)

Bytes = Union[bytes, bytearray, memoryview]


class Writer:
    """Writes a new file from its start to its end. The descriptor stays the caller's; `finish` comes before it is synced
    or closed."""

    def __init__(self, fd: int, size: int) -> None:
        """`size`: bytes that will come, as far as is known."""
        self._fd = fd
        self._direct = size >= LARGE and _switch(fd, True)
        self._buffer: Optional[memoryview] = memoryview(mmap.mmap(-1, PIECE)) if self._direct else None
        self._used = 0

    def write(self, data: Bytes) -> int:
        """All of it."""
        view = memoryview(data)
        if self._buffer is None:
            self._put(view)
            return len(view)
        done = 0
        while done < len(view):
            taken = min(PIECE - self._used, len(view) - done)
            self._buffer[self._used : self._used + taken] = view[done : done + taken]
            self._used += taken
            done += taken
            if self._used == PIECE:
                self._put(self._buffer)
                self._used = 0
        return done

    def write_piece(self, piece: memoryview) -> None:
        """One of `pieces`: it lies as it has to, and is not copied first."""
        if self._used or len(piece) % _BLOCK:
            self.write(piece)
        else:
            self._put(piece)

    def finish(self) -> None:
        """What is left. A last block that is not full goes the usual way."""
        if self._buffer is None:
            return
        whole = self._used // _BLOCK * _BLOCK
        self._put(self._buffer[:whole])
        if self._direct:
            self._direct = not _switch(self._fd, False)
        self._put(self._buffer[whole : self._used])
        self._used = 0

    def _put(self, view: memoryview) -> None:
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as exc:
                # Some file systems agree to it and then cannot; and after half a block nobody can.
                if not self._direct or exc.errno != errno.EINVAL or not _switch(self._fd, False):
                    raise
                self._direct = False


def pieces(fd: int, size: int) -> Iterator[memoryview]:
    """All of a file, from its start; each piece is good until the next is asked for. The descriptor should be nobody
    else's, and is left as it was. `size`: as far as is known. What is in the cache is taken from there."""
    buffer = memoryview(mmap.mmap(-1, min(PIECE, (size // _BLOCK + 1) * _BLOCK)))
    offset = 0
    direct = False
    possible = size >= LARGE and bool(_CACHED)
    try:
        while True:
            if possible and not direct and not _is_cached(fd, min(offset + PIECE, size)):
                direct = possible = _switch(fd, True)
            count = _read(fd, buffer, offset, direct)
            if not count:
                return
            yield buffer[:count]
            offset += count
            if direct and count % _BLOCK:
                # The end as it was when we read it; whether it still is, is asked the usual way.
                _switch(fd, False)
                direct = possible = False
    finally:
        if direct:
            _switch(fd, False)


def open_file(fd: int, size: int, pause: idle_throttle.Pause = idle_throttle.none) -> io.BufferedReader:
    """A file for whoever reads here and there in it. It owns the descriptor. `pause`: called now and then, where it is large."""
    return io.BufferedReader(_File(fd, size, pause) if size >= LARGE and _CACHED else io.FileIO(fd, "rb"))


class _File(io.RawIOBase):
    """Through a window onto it."""

    def __init__(self, fd: int, size: int, pause: idle_throttle.Pause) -> None:
        self._fd = fd
        self._size = size
        self._pause = pause
        self._at = 0
        self._window = memoryview(mmap.mmap(-1, _WINDOW))
        self._begin = self._end = 0
        self._direct = not _is_cached(fd, size // 2) and _switch(fd, True)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "before the start of the file")
        self._at = base + offset
        return self._at

    def readinto(self, target: Any) -> int:
        if not self._begin <= self._at < self._end:
            self._pause()
            self._begin = self._at // _BLOCK * _BLOCK
            self._end = self._begin + _read(self._fd, self._window, self._begin, self._direct)
        first = self._at - self._begin
        with memoryview(target).cast("B") as view:
            count = max(0, min(len(view), self._end - self._at))
            view[:count] = self._window[first : first + count]
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            if self._direct:
                _switch(self._fd, False)
            os.close(self._fd)
        super().close()


def _read(fd: int, buffer: memoryview, offset: int, direct: bool) -> int:
    try:
        return os.preadv(fd, [buffer], offset)
    except OSError as exc:
        if not direct or exc.errno != errno.EINVAL or not _switch(fd, False):
            raise
    return os.preadv(fd, [buffer], offset)


def _is_cached(fd: int, end: int) -> bool:
    """Whether the cache has the block before there; also where nobody can say. A single one, and not the first of many:
    to ask for more makes the kernel read ahead, and that would be the answer to the next question."""
    try:
        return os.preadv(fd, [bytearray(1)], max(0, end - 1), _CACHED) == 1
    except BlockingIOError:
        return False
    except OSError:
        return True


def _switch(fd: int, on: bool) -> bool:
    """Whether it is as asked for now."""
    if not _DIRECT:
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:
        return False
    return True
