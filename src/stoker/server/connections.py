"""Limits the number of connections, and what each may cost.

Any process on this machine may connect, and on loopback all have the same address. So connections are of two kinds.
An unauthenticated connection has not sent the token yet. It may send one request head, bounded in size and time, and
is answered from that head alone; its body is discarded. Few of them are kept: when another one comes, the oldest one
of the address with the most is closed. A client with the token still gets in, because its head arrives right after
it connects. Authenticated connections are counted separately, so that the others cannot take their room.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

Headers = Iterable[tuple[bytes, bytes]]

_quiet = logging.getLogger("uvicorn.error.connections")
_quiet.setLevel(logging.ERROR)
"""uvicorn logs every malformed request. Clients without the token could fill the log and rotate its lines away."""


@dataclass(frozen=True)
class Limits:
    """What connections may cost. Before authentication at most `burst` times `head`, and a few objects each."""

    head: int = 32 << 10
    """Bytes of a request head: request line and headers."""
    fields: int = 100
    """Headers of a request. Each costs far more memory than the four bytes that it can be sent in."""
    head_seconds: float = 10.0
    """Seconds of a whole connection before authentication; afterwards of each head, from its first byte."""
    body_seconds: float = 60.0
    """Seconds without a byte after which a body is given up. A body may take any time in all."""
    unauthenticated: int = 256
    """Connections without the token that are kept, for `head_seconds`."""
    burst: int = 1024
    """The same, for `min_age` seconds: see `Connections`."""
    min_age: float = 0.1
    """Seconds in which a new connection is not closed, unless there are `burst`: it could not send its head yet."""
    known: int = 2048
    """Connections that have sent the token."""
    linger: int = 4 << 20
    """Bytes discarded after the answer, so that a client which is still sending can read the answer."""
    linger_seconds: float = 2.0

    def within(self, open_files: int) -> Limits:
        """These limits, reduced so that a quarter of the file descriptors is left for the server's work."""
        share = open_files // 4
        return Limits(
            **{
                **self.__dict__,
                "known": min(self.known, 2 * share),
                "burst": min(self.burst, share),
                "unauthenticated": min(self.unauthenticated, max(1, share // 4)),
            }
        )


class Connections:
    """All connections of one server. Used in its event loop only.

    Under a flood the server accepts many connections before it reads from any. So an unauthenticated connection is
    closed only after `min_age`, in which it could have sent its head; above `burst` at once."""

    def __init__(self, recognises: Callable[[Headers], bool], limits: Limits) -> None:
        """`recognises`: whether these headers hold the token."""
        self.recognises = recognises
        self.limits = limits
        self._strangers: dict[str, dict[GuardedProtocol, None]] = {}
        """Address -> its connections, oldest first."""
        self._count = 0
        self._known: dict[GuardedProtocol, None] = {}
        """Least recently used first."""
        self._clearing = False

    def admit(self, one: GuardedProtocol) -> None:
        self._strangers.setdefault(one.peer, {})[one] = None
        self._count += 1
        limits = self._now()
        while self._count > limits.burst:
            self._drop(self._oldest())
        if self._count > limits.unauthenticated and not self._clearing:
            self._clearing = True
            one.loop.call_later(limits.min_age, self._clear, one.loop)

    def leave(self, one: GuardedProtocol) -> None:
        """May be called more than once."""
        self._known.pop(one, None)
        mine = self._strangers.get(one.peer, {})
        if one in mine:
            del mine[one]
            self._count -= 1
            if not mine:
                del self._strangers[one.peer]

    def mark_authenticated(self, one: GuardedProtocol) -> None:
        """The connection has sent the token, for the first time or again."""
        self.leave(one)
        self._known[one] = None
        if len(self._known) > self._now().known:
            # Clients connect anew by themselves. A connection with a request under way, as of a follower, stays.
            self._drop(next((other for other in self._known if other is not one and other.idle), one))

    def _clear(self, loop: asyncio.AbstractEventLoop) -> None:
        self._clearing = False
        limits = self._now()
        while self._count > limits.unauthenticated:
            oldest = self._oldest()
            young = oldest.since + limits.min_age - loop.time()
            if young > 0:
                self._clearing = True
                loop.call_later(young, self._clear, loop)
                return
            self._drop(oldest)

    def _oldest(self) -> GuardedProtocol:
        most = max(self._strangers.values(), key=lambda those: (len(those), -next(iter(those)).since))
        return next(iter(most))

    def _drop(self, one: GuardedProtocol) -> None:
        self.leave(one)
        one.abort()

    def _now(self) -> Limits:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self.limits if soft == resource.RLIM_INFINITY else self.limits.within(soft)


class GuardedProtocol(HttpToolsProtocol):
    """One connection, held to the limits."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.logger = _quiet
        self._connections = connections
        self._limits = connections.limits
        self.peer = ""
        """The client's network, for counting."""
        self.since = self._moved = self.loop.time()
        self.known = False
        """Whether the newest request had the token."""
        self.lingers = False
        """Whether it is kept only until the client has read the answer."""
        self._in_head = True
        self._head = self._fields = self._ignored = 0
        self._discarding = False
        """Whether further input is discarded."""
        self._timer: asyncio.TimerHandle | None = None

    # -- from the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        super().connection_made(_DeferredClose(self, transport))
        self.peer = _network(self.client[0]) if self.client else ""
        self._timer = self.loop.call_later(self._limits.head_seconds, self.abort)
        self._connections.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = self.loop.time()
        while data and not self._discarding and not self._raw.is_closing():
            # A head is fed in pieces, so that what follows its end does not count as part of it.
            piece, data = (
                (data[: self._limits.head], data[self._limits.head :]) if self._in_head else (data, b"")
            )
            if self._in_head:
                self._head += len(piece)
                if self._timer is None:
                    self._timer = self.loop.call_later(self._limits.head_seconds, self.abort)
            super().data_received(piece)
            if not self._in_head:
                # Without the token only the head is answered.
                self._discarding = self._discarding or not self.known
            elif not self._discarding and (
                self._head > self._limits.head or self._fields > self._limits.fields
            ):
                self._refuse_head()
        if self._discarding:
            self._ignored += len(data)
            if self._ignored > self._limits.linger:
                self.abort()

    # -- from the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request came before this one was answered: thousands fit into one read. HTTP lets a server
            # answer only the first, and clients expect that.
            self.cycle.keep_alive = False
            self._discarding = True
        if not self._discarding:
            self._fields = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._discarding:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if not self._discarding and self._fields <= self._limits.fields:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._discarding or self._fields > self._limits.fields:
            return
        self._in_head = False
        self.known = self._connections.recognises(self.headers)
        if self.known:
            self._cancel()
            self._timer = self.loop.call_later(self._limits.body_seconds, self._check_body)
        super().on_headers_complete()
        if self.known:
            self._connections.mark_authenticated(self)
        else:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self.known and not self._discarding:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._discarding or self._fields > self._limits.fields:
            return
        self._in_head = True
        self._head = 0
        if self.known:
            self._cancel()
        super().on_message_complete()

    # -- ending ----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self._in_head and (self.cycle is None or self.cycle.response_complete)

    def abort(self) -> None:
        self._raw.abort()

    def reading_resumed(self) -> None:
        """The server had paused reading and resumes: that time does not count as silence."""
        self._moved = self.loop.time()

    def close(self) -> None:
        """Closes once everything is written. A socket that is closed with unread input resets the connection, and a
        client that is still sending would not see the answer. So the client may send a little longer."""
        if self.lingers or self._raw.is_closing():
            return
        if self._in_head and not self._discarding and self._head == 0:
            self._raw.close()
            return
        self._discarding = self.lingers = True
        self._cancel()
        self._timer = self.loop.call_later(self._limits.linger_seconds, self.abort)
        self.flow.resume_reading()
        self._raw.write_eof()

    def _refuse_head(self) -> None:
        self._raw.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        )
        self.close()

    def _check_body(self) -> None:
        left = self._moved + self._limits.body_seconds - self.loop.time()
        if self.flow.read_paused:
            left = self._limits.body_seconds
        if left <= 0:
            self.abort()
        else:
            self._timer = self.loop.call_later(left, self._check_body)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _DeferredClose(asyncio.Transport):
    """The transport as uvicorn sees it. Closing is left to the connection, which may have input to discard."""

    def __init__(self, connection: GuardedProtocol, raw: asyncio.Transport) -> None:
        super().__init__()
        self._connection = connection
        self._raw = raw

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._connection.lingers:
            self._raw.write(data)

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._connection.reading_resumed()
        self._raw.resume_reading()

    def abort(self) -> None:
        self._raw.abort()

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.lingers or self._raw.is_closing()


def _network(address: str) -> str:
    """The address; of IPv6 the /64, because one client owns a whole /64."""
    if ":" not in address:
        return address
    try:
        found = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or int(found) >> 64)
