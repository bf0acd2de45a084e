"""Keeps a mirror up to date by long polling."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from stoker.engine.kubernetes.courier_client.task_directory import RemoteTaskDir

log = logging.getLogger(__name__)

Key = tuple[str, int, str]
"""(run, attempt, task)"""

WAIT = 20.0
"""Seconds, with jitter, that a courier waits for something new before it answers that there is nothing."""
FIRST_BACKOFF = 0.25
LONGEST_BACKOFF = 30.0


class PollInterval:
    """How often pollers ask, shared by all pollers of an engine. A courier that has nothing new delays its answer; the
    interval limits calls to those that always have something new."""

    def __init__(self, least: float = 0.1, per_second: float = 500.0) -> None:
        """`least`: seconds between two calls to one courier that both brought something; `per_second`: the
        approximate number of calls that all pollers together may make."""
        self._least = least
        self._per_second = per_second
        self.pollers = 0

    def pause(self) -> float:
        return max(self._least, self.pollers / self._per_second) * random.uniform(0.75, 1.25)


class Poller:
    """Long-polls one courier while `run` runs. One per directory."""

    def __init__(
        self,
        directory: RemoteTaskDir,
        key: Key,
        on_change: Callable[[Key], None],
        *,
        pace: PollInterval | None = None,
    ) -> None:
        self._directory = directory
        self._key = key
        self._on_change = on_change
        self._interval = pace or PollInterval()
        self.last_contact: float | None = None
        """When the courier last answered, time.monotonic(); None: never yet."""
        self.problem = ""
        """Why the last call failed; empty when it did not."""

    async def run(self) -> None:
        """Until cancelled. Raises nothing but CancelledError."""
        self._interval.pollers += 1
        try:
            await self._run()
        finally:
            self._interval.pollers -= 1

    async def _run(self) -> None:
        backoff = 0.0
        mark: Any = None
        while True:
            try:
                changed, mark = await self._directory.sync(
                    wait=0.0 if mark is not None else WAIT * random.uniform(0.75, 1.25), mark=mark
                )
            except Exception as exc:  # noqa: BLE001 - a pod may answer anything; the next call tries again
                self._failed(exc)
                mark = None
                backoff = min(max(backoff * 2, FIRST_BACKOFF), LONGEST_BACKOFF)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
                continue
            backoff = 0.0
            self.last_contact = time.monotonic()
            self.problem = ""
            if changed:
                self._on_change(self._key)
                await asyncio.sleep(0 if mark is not None else self._interval.pause())

    def _failed(self, exc: Exception) -> None:
        text = str(exc) or type(exc).__name__
        if text != self.problem:
            log.info("%s, attempt %s, %s: %s", *self._key, text)
        self.problem = text
