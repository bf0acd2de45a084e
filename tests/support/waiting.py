"""Waiting for a condition. The limit only stops a wait that cannot succeed: no test depends on a duration."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

LIMIT = 120.0


def wait(
    look: Callable[[], Any], good: Callable[[Any], bool] = bool, limit: float = LIMIT, what: str = ""
) -> Any:
    """The first result of `look` that is good. Fails after the limit, with the last result."""
    began = time.monotonic()
    while True:
        seen = look()
        if good(seen):
            return seen
        time.sleep(_pause(began, limit, seen, what))


async def wait_async(
    look: Callable[[], Any], good: Callable[[Any], bool] = bool, limit: float = LIMIT, what: str = ""
) -> Any:
    """As `wait`, in an event loop. `look` may be a coroutine function."""
    began = time.monotonic()
    while True:
        seen = look()
        if inspect.isawaitable(seen):
            seen = await seen
        if good(seen):
            return seen
        await asyncio.sleep(_pause(began, limit, seen, what))


def is_there(seen: object) -> bool:
    """For `good`: accepts any answer but None, even a false or empty one."""
    return seen is not None


def _pause(began: float, limit: float, seen: object, what: str) -> float:
    """The next pause. It grows with time: on two cores, frequent looks slow down what the test waits for."""
    waited = time.monotonic() - began
    assert waited < limit, f"waited {limit:.0f} s for {what or 'a condition'}; last seen: {seen!r}"
    return min(0.01 + waited / 40, 0.25)
