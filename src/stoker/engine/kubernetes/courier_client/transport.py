"""One call to a courier, over any route."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from stoker.task import courier_protocol

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Opens a new connection to a courier, with TLS as `tls` sets it up."""

IDLE = 60.0
"""Seconds after which an idle connection is not used again; the courier closes idle ones after 90."""
SPARE = 4
"""Idle connections that are kept."""
LIMIT = 1 << 20
"""Bytes that are read ahead."""
_HEAD = 16 << 10


class Transport(Protocol):
    """Sends a POST and returns the answer. Used from one event loop, by several callers at once."""

    async def call(
        self, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers (names in lower case) and body of the answer, whatever its status.

        Reads at most `courier_protocol.MAX_BODY` bytes of it. Raises OSError (TimeoutError is one) or StokerError when
        there is no answer. Sends at most once: the caller signs again for a retry.
        """
        ...


class StreamTransport:
    """HTTP/1.1 over connections from `connect`; idle ones are reused. `close` ends them."""

    def __init__(self, connect: Connect, *, certificate: str = "") -> None:
        """`certificate`: PEM; the courier must present exactly this one. Empty: any (the MACs are still checked)."""
        self._connect = connect
        self._certificate = ssl.PEM_cert_to_DER_cert(certificate) if certificate else None
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(
        self, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        async with asyncio.timeout(timeout):
            reader, writer = await self._take()
            try:
                await _send(writer, path, headers, body)
                status, answered, data = await _receive(reader)
            except EOFError as exc:
                writer.transport.abort()
                raise ConnectionError("the connection ended before the answer did") from exc
            except (ValueError, asyncio.LimitOverrunError) as exc:
                writer.transport.abort()
                raise ConnectionError(f"the peer does not speak HTTP: {exc}") from exc
            except BaseException:
                # Also when cancelled: this connection has half an answer and must not be reused. It ends at once,
                # because the event loop may be about to end.
                writer.transport.abort()
                raise
        if answered.get("connection") == "close" or len(self._idle) >= SPARE:
            writer.transport.abort()
        else:
            self._idle.append((time.monotonic(), reader, writer))
        return status, answered, data

    async def close(self) -> None:
        """Without waiting for TLS's close notification, which a frozen pod never sends."""
        idle, self._idle = self._idle, []
        for _, _, writer in idle:
            writer.transport.abort()
        for _, _, writer in idle:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < IDLE and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.transport.abort()
        reader, writer = await self._connect()
        shown = writer.get_extra_info("ssl_object")
        if self._certificate is not None and (
            shown is None or shown.getpeercert(binary_form=True) != self._certificate
        ):
            writer.transport.abort()
            raise ConnectionError("the peer has another certificate than the courier")
        return reader, writer


def tls() -> ssl.SSLContext:
    """For connections to couriers. A courier is identified by its exact certificate, not by an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def direct(host: str, port: int, certificate: str) -> StreamTransport:
    """TLS to the courier's own address; its certificate must be exactly this one (PEM)."""
    context = tls()

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(host, port, ssl=context, limit=LIMIT)

    return StreamTransport(connect, certificate=certificate)


async def _send(writer: asyncio.StreamWriter, path: str, headers: Mapping[str, str], body: bytes) -> None:
    lines = [f"POST {path} HTTP/1.1", "Host: courier", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    writer.write(body)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    if len(head) > _HEAD:
        raise ValueError("the head is too long")
    first, *rest = head[:-4].split("\r\n")
    version, _, status = first.partition(" ")
    if version != "HTTP/1.1" or not status[:3].isdigit():
        raise ValueError("not an HTTP answer")
    headers = {}
    for line in rest:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = headers.get("content-length", "")
    if (
        not length.isascii()
        or not length.isdigit()
        or len(length) > 12
        or int(length) > courier_protocol.MAX_BODY
    ):
        raise ValueError(f"an answer of {length[:20] or 'unknown'} bytes")
    return int(status[:3]), headers, await reader.readexactly(int(length))
