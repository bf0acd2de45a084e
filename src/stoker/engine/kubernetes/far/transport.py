"""One call to a courier, however it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Makes a new connection to a courier, TLS included."""


class Transport(Protocol):
    """Sends a POST and brings the answer. Used from one event loop, by several callers at once."""

    async def call(
        self, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers (names in lower case) and body of the answer, whatever its status.

        Reads at most `wire.MAX_BODY` bytes of it. Raises OSError (TimeoutError is one) or StokerError when there
        is no answer. Sends at most once: trying again is the caller's, who signs anew.
        """
        ...


class StreamTransport:
    """HTTP/1.1 over connections of one's own making; idle ones are used again. `close` ends them."""

    def __init__(self, connect: Connect) -> None:
        raise NotImplementedError

    async def call(
        self, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def direct(host: str, port: int, certificate: str) -> StreamTransport:
    """TLS to the courier's own address; its certificate must be exactly this one (PEM)."""
    raise NotImplementedError
