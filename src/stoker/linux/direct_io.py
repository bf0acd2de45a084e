"""Reading and writing large files past the page cache.

Copying a checkpoint of gigabytes through the page cache costs more kernel CPU time than all other work on it. That time is
charged to no process, and the copy evicts from the cache what the training reads. Direct I/O avoids both. Small files, and
file systems or kernels without direct I/O, use buffered I/O; callers see no difference.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
from typing import Any, Iterator, Optional, Union

from stoker.linux import idle_throttle

LARGE = 64 << 20
"""Files of this size and more use direct I/O. Small files are soon read again, and should stay in the cache."""
PIECE = 4 << 20
_WINDOW = 1 << 20
_BLOCK = 4096
"""Alignment of addresses, offsets and lengths. No disk requires a larger one."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_CACHED = getattr(os, "RWF_NOWAIT", 0)

Bytes = Union[bytes, bytearray, memoryview]


class Writer:
    """Writes a new file sequentially. The caller keeps the descriptor, and calls `finish` before it syncs or closes it."""

    def __init__(self, fd: int, size: int) -> None:
        """`size`: the expected number of bytes."""
        self._fd = fd
        self._direct = size >= LARGE and _switch(fd, True)
        self._buffer: Optional[memoryview] = memoryview(mmap.mmap(-1, PIECE)) if self._direct else None
        self._used = 0

    def write(self, data: Bytes) -> int:
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
        """Write one of `pieces`. Its buffer is aligned, so it is not copied first."""
        if self._used or len(piece) % _BLOCK:
            self.write(piece)
        else:
            self._put(piece)

    def finish(self) -> None:
        """Write what is still buffered. An incomplete last block is written with buffered I/O."""
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
                # Some file systems accept O_DIRECT and then refuse to write. After a partial block all of them do.
                if not self._direct or exc.errno != errno.EINVAL or not _switch(self._fd, False):
                    raise
                self._direct = False


def pieces(fd: int, size: int) -> Iterator[memoryview]:
    """Read a whole file. Each piece is valid until the next one is requested. `size`: the expected number of bytes.

    No other thread may use the descriptor meanwhile; its flags are restored. Cached data is read from the cache.
    """
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
                # A partial block is the end of the file. Buffered I/O finds out whether the file has grown since.
                _switch(fd, False)
                direct = possible = False
    finally:
        if direct:
            _switch(fd, False)


def open_file(fd: int, size: int, pause: idle_throttle.Pause = idle_throttle.none) -> io.BufferedReader:
    """A file object for random access. It owns the descriptor. `pause` is called at intervals while a large file is read."""
    return io.BufferedReader(_File(fd, size, pause) if size >= LARGE and _CACHED else io.FileIO(fd, "rb"))


class _File(io.RawIOBase):
    """Reads the file through a buffer of one window, with direct I/O where possible."""

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
    """Whether the cache holds the block before `end`; True where the kernel cannot tell.

    Only the last block is tested. A test of earlier blocks starts the kernel's read-ahead, which would falsify the next test.
    """
    try:
        return os.preadv(fd, [bytearray(1)], max(0, end - 1), _CACHED) == 1
    except BlockingIOError:
        return False
    except OSError:
        return True


def _switch(fd: int, on: bool) -> bool:
    """Set or clear O_DIRECT; whether that succeeded."""
    if not _DIRECT:
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:
        return False
    return True
