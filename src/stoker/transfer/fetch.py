"""Getting the bytes of a far task directory.

What has arrived of a file lies beside the mirror's files until it is whole, so a journey that was cut short goes on
in the middle of a file. What was taken is remembered: a journal that names content which this task never handed over
does not get it from the store by naming it.
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
"""Bytes that are asked for at a time."""
AT_ONCE = 3
"""Ranges of one file on their way."""
_PARTS = ".fetch"


class FetchedFiles:
    """What a task handed over: digests and sizes. One process and one journey at a time; any thread of it."""

    def __init__(self, task_dir: RemoteAccess) -> None:
        root = Path(task_dir.root)
        self._path = root.with_name(f"{root.name}.taken")
        """Not in the mirror, which is dropped now and then."""
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
                # One that was cut short by a full disk or a power cut is closed off, and names nothing.
                os.write(fd, f"\n{line}\n".encode())
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            self._known.add(line)


class Fetcher:
    """Brings files of one far directory. Its threads end with `close`, or the `with` block."""

    def __init__(self, task_dir: RemoteAccess) -> None:
        self._task_dir = task_dir
        self._parts = Path(task_dir.root) / _PARTS
        self._parts.mkdir(mode=0o700, exist_ok=True)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch")

    def fetch(self, path: str, digest: str, size: int, pause: Pause = none) -> Path:
        """A file of ours with `size` bytes of a file there. `digest` names what has arrived of it; whether it is
        that, the caller finds out. `pause` is called for each range that has arrived. Raises FileNotFoundError and UnsafePath, and BlobDamaged when the file there is
        shorter or longer."""
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
        """A file of ours with all there is now of a file there. Raises TooLarge past `limit`."""
        part = self._parts / f"now-{secrets.token_hex(8)}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while data := self._task_dir.fetch(path, done, RANGE):
                if done + len(data) > limit:
                    raise TooLarge(f"{path!r} has grown beyond {limit} bytes")
                done += _append(fd, data, done)
        except BaseException:  # raised again: only half a file must not stay, whoever broke it off
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
        """The rest of a file, one byte beyond its end included if there is one. Short: the file is."""
        on_their_way: deque[tuple[int, Future[bytes]]] = deque()
        at = begin
        try:
            while True:
                while len(on_their_way) < AT_ONCE and at <= size:
                    wanted = min(RANGE, size + 1 - at)
                    on_their_way.append(
                        (wanted, self._threads.submit(self._task_dir.fetch, path, at, wanted))
                    )
                    at += wanted
                if not on_their_way:
                    return
                wanted, future = on_their_way.popleft()
                data = future.result()
                yield data
                if len(data) < wanted:
                    return
        finally:
            for _, future in on_their_way:
                future.cancel()
            for _, future in on_their_way:
                with contextlib.suppress(Exception):  # nobody wants it any more
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
    """Move what arrived into the store, hashed on the way. What does not have its digest is gone afterwards."""
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
