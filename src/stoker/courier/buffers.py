"""The few big buffers there are. Whoever needs one waits for it, so memory stays what it is."""

from __future__ import annotations

import contextlib
import mmap
import queue
from typing import Iterator

from stoker.task import courier_protocol

SMALL = 64 << 10
COUNT = 3
PATIENCE = 20.0


class Busy(Exception):
    """Too much at once. Ask again."""


class Buffers:
    """May be used from any thread. A page of a buffer that was never needed takes no memory."""

    def __init__(
        self, count: int = COUNT, size: int = courier_protocol.MAX_BODY, patience: float = PATIENCE
    ) -> None:
        self._size = size
        self._patience = patience
        self._free: queue.LifoQueue[mmap.mmap] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(mmap.mmap(-1, size))

    @contextlib.contextmanager
    def lend(self, length: int) -> Iterator[memoryview]:
        """`length` bytes, for as long as the block lasts. Raises Busy when none comes free."""
        if length <= SMALL:
            yield memoryview(bytearray(length))
            return
        if length > self._size:
            raise ValueError(f"{length} bytes are more than any buffer has")
        try:
            buffer = self._free.get(timeout=self._patience)
        except queue.Empty:
            raise Busy("every buffer is in use") from None
        try:
            yield memoryview(buffer)[:length]
        finally:
            self._free.put(buffer)
