"""Fetches the files of a remote task directory.

A partly fetched file stays beside the mirror's files, so an interrupted transfer continues in the middle of it. The
contents that a task handed over are recorded: a journal cannot get other content from the store by naming its hash.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from stoker.blobs import BlobStore
from stoker.errors import BlobDamaged, TooLarge
from stoker.linux.idle_throttle import Pause, none
from stoker.task.directory import RemoteAccess

RANGE = 4 << 20
"""Bytes per request."""
AT_ONCE = 3
"""Ranges of one file that are requested at the same time."""
_PARTS = ".fetch"


class FetchedFiles:
    """Digests and sizes of what a task handed over. One transfer in one process at a time, from any of its threads."""

    def __init__(self, task_dir: RemoteAccess) -> None:
        root = Path(task_dir.root)
        self._path = root.with_name(f"{root.name}.taken")
        """Outside the mirror, which is dropped now and then."""
        self._lock = threading.Lock()
        try:
            self._known = set(self._path.read_text("ascii", "replace").split("\n")[:-1])
        except FileNotFoundError:
            self._known = set()

    def __contains__(self, content: tuple[str, int]) -> bool:
        return f"{content[0]} {content[1]}" in self._known

    def add(self, digest: str, size: int, *, durable: bool) -> None:
        line = f"{digest} {size}"
        with self._lock:
            if line in self._known:
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                # The leading newline ends a line that a full disk or a power cut left incomplete.
                os.write(fd, f"\n{line}\n".encode())
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            self._known.add(line)


class Fetcher:
    """Fetches files of one remote task directory. Its threads end with `close`, or with the `with` block."""

    def __init__(self, task_dir: RemoteAccess) -> None:
        self._task_dir = task_dir
        self._parts = Path(task_dir.root) / _PARTS
        self._parts.mkdir(mode=0o700, exist_ok=True)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch")

    def fetch(self, path: str, digest: str, size: int, pause: Pause = none) -> Path:
        """Fetch `size` bytes of a remote file into a local part file, and return its path.

        The part file is named by `digest`; the caller verifies the content. `pause` is called after each range. Raises
        FileNotFoundError, UnsafePath, and BlobDamaged: the remote file is shorter or longer."""
        part = self._parts / f"{digest}-{size}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            done = os.fstat(fd).st_size
            if done > size:
                os.ftruncate(fd, 0)
                done = 0
            with contextlib.closing(self._ranges(path, done, size)) as ranges:
                for data in ranges:
                    if done + len(data) > size:
                        raise BlobDamaged(f"{path!r} has more than the {size} bytes it had before")
                    done += _append(fd, data, done)
                    pause()
            if done < size:
                raise BlobDamaged(f"{path!r} has {done} bytes instead of {size}")
        finally:
            os.close(fd)
        return part

    def whole(self, path: str, limit: int) -> Path:
        """Fetch a remote file as it is now, of any size, into a local file. Raises TooLarge past `limit`."""
        part = self._parts / f"now-{secrets.token_hex(8)}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while data := self._task_dir.fetch(path, done, RANGE):
                if done + len(data) > limit:
                    raise TooLarge(f"{path!r} has grown beyond {limit} bytes")
                done += _append(fd, data, done)
        except BaseException:  # raised again: an incomplete file must not stay after any error
            part.unlink()
            raise
        finally:
            os.close(fd)
        return part

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ranges(self, path: str, begin: int, size: int) -> Generator[bytes]:
        """The ranges of a file from `begin`, and one more byte if the file is longer than `size`."""
        in_flight: deque[tuple[int, Future[bytes]]] = deque()
        at = begin
        try:
            while True:
                while len(in_flight) < AT_ONCE and at <= size:
                    wanted = min(RANGE, size + 1 - at)
                    in_flight.append((wanted, self._threads.submit(self._task_dir.fetch, path, at, wanted)))
                    at += wanted
                if not in_flight:
                    return
                wanted, future = in_flight.popleft()
                data = future.result()
                yield data
                if len(data) < wanted:
                    return
        finally:
            for _, future in in_flight:
                future.cancel()
            for _, future in in_flight:
                with contextlib.suppress(Exception):  # the result is not needed any more
                    future.exception()


def store(
    part: Path,
    blobs: BlobStore,
    *,
    durable: bool,
    digest: str | None = None,
    size: int | None = None,
    pause: Pause = none,
) -> tuple[str, int]:
    """Move a part file into the store and hash it on the way. It is deleted, also if its digest is wrong (BlobDamaged)."""
    fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        result = blobs.put_fd(
            fd, digest=digest, size=size, move=True, limit=size, durable=durable, pause=pause
        )
    except BlobDamaged:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    part.unlink(missing_ok=True)
    return result


def _append(fd: int, data: bytes, at: int) -> int:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        at, view = at + count, view[count:]
    return len(data)
