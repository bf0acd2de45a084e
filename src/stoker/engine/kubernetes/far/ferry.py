"""Keeps a mirror up to date."""

from __future__ import annotations

from collections.abc import Callable

from stoker.engine.kubernetes.far.directory import FarDirectory

Key = tuple[str, int, str]
"""(run, attempt, task)"""


class Pace:
    """Shared by all ferries of an engine: how often they may call together."""

    def __init__(self, least: float = 0.1, per_second: float = 500.0) -> None:
        raise NotImplementedError


class Ferry:
    """Long-polls one courier for as long as `run` runs."""

    last_contact: float | None
    """When the courier last answered, time.monotonic(); None: never yet."""
    trouble: str
    """Why the last call failed; empty when it did not."""

    def __init__(
        self, directory: FarDirectory, key: Key, on_change: Callable[[Key], None], *, pace: Pace | None = None
    ) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        """Until cancelled. Never raises but CancelledError."""
        raise NotImplementedError
