"""A fixed number of big buffers. Requests wait for a free one, so the courier's memory does not grow."""

from __future__ import annotations

import contextlib
import mmap
import queue
from typing import Iterator

from stoker.task import courier_protocol

SMALL = 64 << 10
COUNT = 3
WAIT = 20.0


class Busy(Exception):
    """Too many requests at once. The client tries again."""


class Buffers:
    """May be used from any thread. Pages of a buffer that were never used take no memory."""

    def __init__(self, count: int = COUNT, size: int = courier_protocol.MAX_BODY, wait: float = WAIT) -> None:
        self._size = size
        self._wait = wait
        self._free: queue.LifoQueue[mmap.mmap] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(mmap.mmap(-1, size))

    @contextlib.contextmanager
    def lend(self, length: int) -> Iterator[memoryview]:
        """A buffer of `length` bytes for the duration of the block. Raises Busy when none becomes free."""
        if length <= SMALL:
            yield memoryview(bytearray(length))
            return
        if length > self._size:
            raise ValueError(f"{length} bytes are more than any buffer has")
        try:
            buffer = self._free.get(timeout=self._wait)
        except queue.Empty:
            raise Busy("every buffer is in use") from None
        try:
            yield memoryview(buffer)[:length]
        finally:
            self._free.put(buffer)
