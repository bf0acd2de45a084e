"""Streams of an API server: watches, logs, exec, port-forward.

Exec and port-forward use WebSocket with a channel byte before each message (`v4.channel.k8s.io` and, for exec, its
successor `v5`), which every supported API server has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from stoker.engine.kubernetes.api.errors import Disconnected, KubeError, KubeUnavailable, Stalled
from stoker.engine.kubernetes.api.session import Call, Session
from stoker.errors import TooLarge

log = logging.getLogger(__name__)

MAX_LINE: Final = 64 << 20
"""Bytes of one watch event; the API server's own limit for an object is far lower."""
PIECE: Final = 1 << 16


@dataclass(frozen=True)
class Ended:
    """The result of a command that ran in a container to its end."""

    code: int
    stdout: bytes = field(repr=False)
    stderr: bytes = field(repr=False)


async def events(reader: aiohttp.StreamReader, what: str) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """(type, object) of each line of a watch. An ERROR is raised as the KubeError it describes."""
    async for line in _lines(reader, what):
        try:
            event = json.loads(line)
            name, obj = event["type"], event["object"]
        except (ValueError, KeyError, TypeError):
            raise Disconnected(
                f"{what}: an event is not JSON, or only a part of it ({len(line)} bytes)"
            ) from None
        if name == "ERROR":
            raise _error(what, obj)
        yield name, obj


async def _lines(reader: aiohttp.StreamReader, what: str) -> AsyncIterator[bytes]:
    """Lines of any length: the library's own line reader has a limit that a large object exceeds."""
    rest = bytearray()
    async for piece in reader.iter_any():
        seen = len(rest)
        rest += piece
        if b"\n" not in piece:
            if len(rest) > MAX_LINE:
                raise TooLarge(f"{what}: an event has more than {MAX_LINE} bytes")
            continue
        *lines, tail = bytes(rest).split(b"\n") if seen else piece.split(b"\n")
        for line in lines:
            if line:
                yield line
        rest = bytearray(tail)
    if rest:
        yield bytes(rest)


def _error(what: str, status: dict[str, Any]) -> KubeError | KubeUnavailable:
    code, message = (
        int(status.get("code") or 0),
        str(status.get("message") or status.get("reason") or "no reason"),
    )
    if code == 429 or code >= 500:
        return KubeUnavailable(f"{what}: {message}", status=code)
    return KubeError(f"{what}: {message}", status=code, reason=str(status.get("reason") or ""))


# -- exec


async def run(
    session: Session,
    path: str,
    container: str,
    argv: Sequence[str],
    *,
    stdin: bytes,
    timeout: float,
    max_bytes: int,
) -> Ended:
    flags = [
        ("container", container),
        ("stdout", "true"),
        ("stderr", "true"),
        ("stdin", "true" if stdin else "false"),
    ]
    call = Call("exec", "pods", "GET", path, [*flags, *(("command", arg) for arg in argv)])
    try:
        async with asyncio.timeout(timeout):
            ws = await session.websocket(call, ("v5.channel.k8s.io", "v4.channel.k8s.io"), timeout=timeout)
            async with contextlib.aclosing(_Closing(ws)):
                if stdin:
                    await _feed(ws, stdin)
                return await _collect(ws, max_bytes)
    except TimeoutError:
        raise Stalled(f"exec of {argv[0]!r} did not end within {timeout:g} s") from None


class _Closing:
    """Closes a WebSocket without waiting long for the other side, which may be dead."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws

    async def aclose(self) -> None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(1):
                await self._ws.close()


async def _feed(ws: aiohttp.ClientWebSocketResponse, stdin: bytes) -> None:
    if ws.protocol != "v5.channel.k8s.io":
        raise KubeError("this cluster is too old for exec with input: the end of the input cannot be sent")
    for start in range(0, len(stdin), PIECE):
        await ws.send_bytes(b"\x00" + stdin[start : start + PIECE])
    await ws.send_bytes(b"\xff\x00")


async def _collect(ws: aiohttp.ClientWebSocketResponse, max_bytes: int) -> Ended:
    out: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
    async for message in ws:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == 3:
            return Ended(_code(json.loads(data)), bytes(out[1]), bytes(out[2]))
        if channel in out:
            out[channel] += data
            if len(out[1]) + len(out[2]) > max_bytes:
                raise TooLarge(f"exec printed more than {max_bytes} bytes")
    raise Disconnected("exec: the connection was lost before the command ended")


def _code(status: dict[str, Any]) -> int:
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    # The connection worked and the container runtime refused, usually because the program does not exist.
    raise KubeError(
        f"exec: {status.get('message') or 'it could not be started'}", status=int(status.get("code") or 0)
    )


# -- port-forward


async def forward(
    session: Session,
    path: str,
    port: int,
    keep: Callable[[asyncio.Task[None]], None],
    *,
    tls: ssl.SSLContext | None,
    server_hostname: str,
    timeout: float,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A pair of sockets with the WebSocket behind one of them, so that the caller has real streams, TLS included.
    `keep` receives the task that moves the bytes; it ends when either side closes."""
    call = Call("portforward", "pods", "GET", path, {"ports": str(port)})
    ws = await session.websocket(call, ("v4.channel.k8s.io",), timeout=timeout)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    task = asyncio.create_task(_relay(ws, ours))
    keep(task)
    try:
        async with asyncio.timeout(timeout):
            return await asyncio.open_connection(
                sock=theirs, ssl=tls, server_hostname=(server_hostname or "") if tls else None
            )
    except BaseException as exc:  # also when cancelled: neither the socket nor the task may stay behind
        theirs.close()
        task.cancel()
        if isinstance(exc, OSError):  # TimeoutError and ssl.SSLError too
            raise Disconnected(f"port-forward to {port}: no connection: {exc or type(exc).__name__}") from exc
        raise


async def _relay(ws: aiohttp.ClientWebSocketResponse, end: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    async def outwards() -> None:
        while data := await loop.sock_recv(end, PIECE):
            await ws.send_bytes(b"\x00" + data)

    async def inwards() -> None:
        announced = {0: False, 1: False}
        async for message in ws:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel = message.data[0]
            if channel in announced and not announced[channel]:
                announced[channel] = True  # the first message on each channel is the port number
            elif channel == 0:
                await loop.sock_sendall(end, memoryview(message.data)[1:])
            elif channel == 1:
                log.warning("port-forward: %s", message.data[1:].decode("utf-8", "replace").strip())
                return

    directions = [asyncio.create_task(outwards()), asyncio.create_task(inwards())]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        for result in await asyncio.gather(*directions, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, (OSError, aiohttp.ClientError)):
                log.error("port-forward ended", exc_info=result)
        end.close()
        await _Closing(ws).aclose()
