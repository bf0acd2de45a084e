"""How many connections there are, and what each may cost.

Anybody on this machine may connect, and on loopback everybody has the same address. So connections are of two kinds.
A stranger has not shown the token yet. It may send one head, bounded in size and time, and is answered on that head
alone; its body is never kept. There are few strangers, and when another one comes the oldest goes, of the address
that has most. So whoever has the token gets in: the head is there a moment after the connection, and a connection
that has shown the token is counted apart, in room that strangers cannot take.
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
"""uvicorn warns of every malformed request. Strangers could fill the log with that, and push out what it held."""


@dataclass(frozen=True)
class Limits:
    """What connections may cost. Before the token is shown that is `crowd` times `head`, and a few objects each."""

    head: int = 32 << 10
    """Bytes a head may have: request line and headers."""
    fields: int = 100
    """Headers it may have. Each costs far more memory than the four bytes it can be sent in."""
    head_seconds: float = 10.0
    """For a stranger: from the connection to the end of all with it. Else: for each head, from its first byte."""
    body_seconds: float = 60.0
    """A body may take as long as it likes, but not without any byte for so long."""
    strangers: int = 256
    """Connections that have not shown the token, kept for `head_seconds`."""
    crowd: int = 1024
    """The same, for a moment: see `Connections`."""
    moment: float = 0.1
    """Seconds in which a new connection is not made to go, unless there is a crowd: it had no chance to speak."""
    known: int = 2048
    """Connections that have shown the token."""
    linger: int = 4 << 20
    """Bytes that are thrown away after the answer, so that a client which still sends can read it."""
    linger_seconds: float = 2.0

    def within(self, open_files: int) -> Limits:
        """With a quarter of the descriptors left for the server's work."""
        share = open_files // 4
        return Limits(
            **{
                **self.__dict__,
                "known": min(self.known, 2 * share),
                "crowd": min(self.crowd, share),
                "strangers": min(self.strangers, max(1, share // 4)),
            }
        )


class Connections:
    """All connections of one server. Used in its event loop only.

    A server under a flood accepts many connections before it reads from any. So a stranger goes only after a
    moment in which it could have spoken; only a crowd is cut down at once."""

    def __init__(self, recognises: Callable[[Headers], bool], limits: Limits) -> None:
        """`recognises`: whether these headers show the token."""
        self.recognises = recognises
        self.limits = limits
        self._strangers: dict[str, dict[GuardedProtocol, None]] = {}
        """Address -> its connections, the oldest first."""
        self._count = 0
        self._known: dict[GuardedProtocol, None] = {}
        """The one used least lately first."""
        self._clearing = False

    def admit(self, one: GuardedProtocol) -> None:
        self._strangers.setdefault(one.peer, {})[one] = None
        self._count += 1
        limits = self._now()
        while self._count > limits.crowd:
            self._drop(self._oldest())
        if self._count > limits.strangers and not self._clearing:
            self._clearing = True
            one.loop.call_later(limits.moment, self._clear, one.loop)

    def leave(self, one: GuardedProtocol) -> None:
        """May be called more than once."""
        self._known.pop(one, None)
        mine = self._strangers.get(one.peer, {})
        if one in mine:
            del mine[one]
            self._count -= 1
            if not mine:
                del self._strangers[one.peer]

    def welcome(self, one: GuardedProtocol) -> None:
        """It has shown the token: now, or before and uses the connection again."""
        self.leave(one)
        self._known[one] = None
        if len(self._known) > self._now().known:
            # Clients connect anew by themselves. Whoever has a request under way, as followers have, stays.
            self._drop(next((other for other in self._known if other is not one and other.idle), one))

    def _clear(self, loop: asyncio.AbstractEventLoop) -> None:
        self._clearing = False
        limits = self._now()
        while self._count > limits.strangers:
            oldest = self._oldest()
            young = oldest.since + limits.moment - loop.time()
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

    def __init__(self, door: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.logger = _quiet
        self._door = door
        self._limits = door.limits
        self.peer = ""
        """Where it comes from, for counting."""
        self.since = self._moved = self.loop.time()
        self.known = False
        """Whether the request read last showed the token."""
        self.lingers = False
        """Whether it is only kept until the other side has read the answer."""
        self._in_head = True
        self._head = self._fields = self._ignored = 0
        self._deaf = False
        """What comes from now on is thrown away."""
        self._timer: asyncio.TimerHandle | None = None

    # -- from the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        super().connection_made(_Polite(self, transport))
        self.peer = _network(self.client[0]) if self.client else ""
        self._timer = self.loop.call_later(self._limits.head_seconds, self.abort)
        self._door.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = self.loop.time()
        while data and not self._deaf and not self._raw.is_closing():
            # A head is taken in pieces, so that what is behind its end does not count as part of it.
            piece, data = (
                (data[: self._limits.head], data[self._limits.head :]) if self._in_head else (data, b"")
            )
            if self._in_head:
                self._head += len(piece)
                if self._timer is None:
                    self._timer = self.loop.call_later(self._limits.head_seconds, self.abort)
            super().data_received(piece)
            if not self._in_head:
                # A stranger is answered on its head alone.
                self._deaf = self._deaf or not self.known
            elif not self._deaf and (self._head > self._limits.head or self._fields > self._limits.fields):
                self._refuse_head()
        if self._deaf:
            self._ignored += len(data)
            if self._ignored > self._limits.linger:
                self.abort()

    # -- from the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request before this one is answered: thousands fit into what is read at once. Clients have to
            # expect that only the first is answered.
            self.cycle.keep_alive = False
            self._deaf = True
        if not self._deaf:
            self._fields = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if not self._deaf and self._fields <= self._limits.fields:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._deaf or self._fields > self._limits.fields:
            return
        self._in_head = False
        self.known = self._door.recognises(self.headers)
        if self.known:
            self._cancel()
            self._timer = self.loop.call_later(self._limits.body_seconds, self._look_at_body)
        super().on_headers_complete()
        if self.known:
            self._door.welcome(self)
        else:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self.known and not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deaf or self._fields > self._limits.fields:
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

    def reading_again(self) -> None:
        """After the server itself did not want to read."""
        self._moved = self.loop.time()

    def close(self) -> None:
        """Close when what was written is through. A socket that is closed with something unread in it resets the
        connection, and a client that still sends would not see the answer; so it may send a little longer."""
        if self.lingers or self._raw.is_closing():
            return
        if self._in_head and not self._deaf and self._head == 0:
            self._raw.close()
            return
        self._deaf = self.lingers = True
        self._cancel()
        self._timer = self.loop.call_later(self._limits.linger_seconds, self.abort)
        self.flow.resume_reading()
        self._raw.write_eof()

    def _refuse_head(self) -> None:
        self._raw.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        )
        self.close()

    def _look_at_body(self) -> None:
        left = self._moved + self._limits.body_seconds - self.loop.time()
        if self.flow.read_paused:
            left = self._limits.body_seconds
        if left <= 0:
            self.abort()
        else:
            self._timer = self.loop.call_later(left, self._look_at_body)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Polite(asyncio.Transport):
    """The transport as uvicorn sees it: closing it is left to the connection, which may have something to read."""

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
        self._connection.reading_again()
        self._raw.resume_reading()

    def abort(self) -> None:
        self._raw.abort()

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.lingers or self._raw.is_closing()


def _network(address: str) -> str:
    """Who has one IPv6 address has its whole /64."""
    if ":" not in address:
        return address
    try:
        found = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or int(found) >> 64)
