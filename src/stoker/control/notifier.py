"""Wakes what waits for a run to change: followers of logs, `wait`, the web page."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict

_REMEMBERED = 100_000


class Notifier:
    """A counter per run that only rises, from 0. `publish` may be called from any thread; `changed` may be awaited in
    any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[str, int] = OrderedDict()
        self._waiters: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        self._floor = 0

    def version(self, run: str) -> int:
        with self._lock:
            return self._versions.get(run, self._floor)

    def publish(self, run: str) -> None:
        with self._lock:
            self._versions[run] = self._versions.get(run, self._floor) + 1
            self._versions.move_to_end(run)
            if len(self._versions) > _REMEMBERED:
                # The floor keeps the counter of a forgotten run from falling. Waiters may wake once too often.
                self._floor = max(self._floor, self._versions.popitem(last=False)[1])
            waiters = self._waiters.pop(run, set())
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_settle, future)
            except RuntimeError:
                continue  # that loop is closed: nothing waits in it any more

    async def changed(self, run: str, seen: int, timeout: float) -> int:
        """The version once it differs from `seen`, or the same version after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        waiter = (loop, future)
        with self._lock:
            version = self._versions.get(run, self._floor)
            if version != seen:
                return version
            self._waiters.setdefault(run, set()).add(waiter)
        try:
            await asyncio.wait_for(future, timeout)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                waiters = self._waiters.get(run)
                if waiters is not None:
                    waiters.discard(waiter)
                    if not waiters:
                        del self._waiters[run]
        return self.version(run)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
