"""The queue of change notices from an engine's watchers to its reader. Every engine that watches uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

Key = tuple[str, int, str]
"""run, attempt, task"""


class ChangeFeed:
    """A queue in which each task waits at most once. Fed from any thread, read by one coroutine.

    Make it inside the event loop that reads it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Key, None] = {}
        self._event = asyncio.Event()
        self._closed = False

    def put(self, key: Key) -> None:
        self._waiting[key] = None
        self._wake()

    def close(self) -> None:
        """End the iteration after the keys that are waiting."""
        self._closed = True
        self._wake()

    def __aiter__(self) -> AsyncIterator[Key]:
        return self

    async def __anext__(self) -> Key:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._event.clear()
            if not self._waiting and not self._closed:
                await self._event.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        return key

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)
