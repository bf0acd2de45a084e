"""Checks the files of a SQLite database before SQLite opens them.

SQLite tolerates what Stoker must not: it takes a file emptied by accident for a new database, and an overwritten
write-ahead log ends early for it, without every transaction after that point. With `synchronous=FULL` a transaction
is on disk before it is acknowledged. So such a log means damage, and is told apart here from what a crash leaves.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.linux.descriptors import Closing

SCHEME = "sqlite"
MAGIC = b"SQLite format 3\0"
STALE = 3600.0
"""Seconds after which an unfinished file counts as abandoned."""
_WAL_HEADER = 32
_FRAME_HEADER = 24
_WAL_MAGIC = (0x377F0682, 0x377F0683)
_GENERATIONS = 1 << 20
"""How many resets ago a leftover frame may have been written: each adds one to the first salt."""


@dataclass(frozen=True)
class Log:
    """The write-ahead log as it is on disk. `commits`: positions (from 1) of the frames that end a transaction of the
    current generation, whether or not their checksums are right."""

    salts: tuple[int, int]
    commits: tuple[int, ...]

    def lost(self, valid_frames: int) -> bool:
        """Whether acknowledged transactions lie behind the last frame that SQLite accepts. A single one may: the
        power failed while it was written, and it was not acknowledged. A second one proves that the first had been
        synced."""
        return sum(position > valid_frames for position in self.commits) > 1


def wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def companions(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]


def problem(path: Path) -> str | None:
    """What is obviously wrong with the main file. Raises OSError when it cannot be opened for reading and writing.

    Call it only before SQLite opens the file: closing the file releases all locks that this process holds on it."""
    with open(path, "r+b") as file:
        header = file.read(100)
    if not header:
        return "the file is empty"
    if len(header) < 100:
        return f"the file is cut off after {len(header)} bytes"
    if header[:16] != MAGIC:
        return "the file does not start like a database"
    page_size = struct.unpack(">H", header[16:18])[0]
    page_size = 65536 if page_size == 1 else page_size
    if page_size < 512 or page_size & (page_size - 1):
        return f"its header names an impossible page size of {page_size}"
    return None


def read_log(path: Path) -> Log | str | None:
    """The write-ahead log beside a database: None when it is empty, a string when it is damaged."""
    try:
        fd = os.open(wal(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with Closing(fd):
        header = os.pread(fd, _WAL_HEADER, 0)
        if len(header) < _WAL_HEADER:
            return None
        size = os.fstat(fd).st_size
        if not any(header):
            return "the start of its write-ahead log is erased" if _any_after(fd, _WAL_HEADER, size) else None
        if not _header_is_valid(header):
            return "the start of its write-ahead log is overwritten"
        return _read_frames(fd, header, size)


def _read_frames(fd: int, header: bytes, size: int) -> Log | str:
    page_size, _, salt1, salt2 = struct.unpack(">4I", header[8:24])
    step = _FRAME_HEADER + page_size
    commits = []
    for position in range((size - _WAL_HEADER) // step):
        frame = os.pread(fd, _FRAME_HEADER, _WAL_HEADER + position * step)
        if len(frame) < _FRAME_HEADER or not any(frame):
            continue
        _, pages, one, two = struct.unpack(">4I", frame[:16])
        if (one, two) == (salt1, salt2):
            if pages:
                commits.append(position + 1)
        elif not 0 < (salt1 - one) % 2**32 < _GENERATIONS:
            return f"its write-ahead log is overwritten at frame {position + 1}"
    return Log((salt1, salt2), tuple(commits))


def _header_is_valid(header: bytes) -> bool:
    magic = struct.unpack(">I", header[:4])[0]
    if magic not in _WAL_MAGIC:
        return False
    words = struct.unpack(">6I" if magic & 1 else "<6I", header[:24])
    one = two = 0
    for position in range(0, 6, 2):
        one = (one + words[position] + two) % 2**32
        two = (two + words[position + 1] + one) % 2**32
    return (one, two) == struct.unpack(">2I", header[24:32])


def _any_after(fd: int, start: int, size: int) -> bool:
    while start < size:
        chunk = os.pread(fd, 1 << 20, start)
        if any(chunk):
            return True
        if not chunk:
            return False
        start += len(chunk)
    return False


def sync(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_name(path: Path) -> None:
    """Syncs the name of a file. Does not open the file itself: closing it would release the locks that SQLite holds on
    it for this process."""
    _sync(path.parent, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    with Closing(os.open(path, flags | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def temporary(path: Path) -> Path:
    """A temporary name. Deletes leftovers of killed processes under such names."""
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.tmp*"):
        with contextlib.suppress(OSError):
            if time.time() - stale.stat().st_mtime > STALE:
                stale.unlink()
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def make_empty(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def forget(path: Path) -> None:
    for leftover in [path, *companions(path)]:
        # Cleaning up must not hide the first error: the directory may be missing or forbidden.
        with contextlib.suppress(OSError):
            leftover.unlink(missing_ok=True)


def name_once(temporary: Path, path: Path) -> None:
    """Renames a file to `path` unless that exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        if not path.exists():  # the file system has no hard links
            temporary.rename(path)


def move_aside(path: Path) -> Path | None:
    """Moves the files into a directory beside them, log included; None when there are none."""
    old = [found for found in (path, *companions(path)) if found.exists()]
    if not old:
        return None
    aside = path.with_name(f"{path.name}.replaced-{time.time_ns()}")
    aside.mkdir(mode=0o700)
    # The main file first: a log without its database is noticed, a database without its log is not.
    for found in old:
        found.rename(aside / found.name)
    return aside
