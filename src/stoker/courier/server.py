"""Connections to the courier: authentication, and limits on their number.

Every host in the cluster can connect, and so can the training in the same pod. A connection that has not shown the key
is one of few, has a few seconds, and gets no buffer. When another one comes, the oldest is closed, from the address
with the most connections. So a client that connects again and again blocks only itself.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from typing import Callable, Dict, List, Optional

from stoker.courier.buffers import Buffers, Busy
from stoker.courier.handlers import Handlers, Reply, Request
from stoker.courier.http import BadRequest, Channel, Head
from stoker.courier.sync import ClientGone
from stoker.task import courier_protocol
from stoker.task.courier_protocol import Forged, Guard, Malformed, WrongBoot

MAX_UNTRUSTED = 8
MAX_TRUSTED = 24
KEY_TIMEOUT = 10.0
"""Seconds in which a connection must show the key."""
IDLE = 90.0
"""Seconds that a connection may wait for its next request, and that sending a body or an answer may take."""
TICK = 0.5


class _Connection:
    """One connection and its thread."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.channel = Channel(sock)
        self.peer = peer
        self.trusted = False
        self.since = time.monotonic()


class CourierServer:
    """Serves until `over` returns True. One thread per connection; the caller's thread accepts."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        key: bytes,
        handlers: Handlers,
        touch: Callable[[], None],
    ) -> None:
        """`touch`: called for every authentic request."""
        self._listener = listener
        self._context = context
        self._key = key
        self._handlers = handlers
        self._touch = touch
        self._guard = Guard()
        self._buffers = Buffers()
        self._lock = threading.Lock()
        self._connections: List[_Connection] = []

    def serve(self, over: Callable[[], bool]) -> None:
        """Serve until `over` returns True; it is called at least every TICK seconds."""
        self._listener.settimeout(TICK)
        while not over():
            try:
                sock, address = self._listener.accept()
            except socket.timeout:
                continue
            except OSError:
                time.sleep(TICK)  # no descriptors left, for now
                continue
            connection = _Connection(sock, str(address[0]))
            self._admit(connection)
            try:
                threading.Thread(target=self._receive, args=(connection,), daemon=True).start()
            except RuntimeError:
                self._leave(connection)  # the pod's process limit is reached, for now

    def _admit(self, connection: _Connection) -> None:
        """Add a connection, and close others of its kind if there are too many."""
        with self._lock:
            self._connections.append(connection)
            leave = self._surplus(trusted=False, most=MAX_UNTRUSTED)
            leave += self._surplus(trusted=True, most=MAX_TRUSTED)
        for one in leave:
            one.channel.cut()

    def _surplus(self, *, trusted: bool, most: int) -> List[_Connection]:
        equals = sorted(
            (one for one in self._connections if one.trusted is trusted), key=lambda one: one.since
        )
        leave: List[_Connection] = []
        while len(equals) > most:
            # Trusted connections come from one server, over any address; the oldest is closed.
            count = Counter("" if trusted else one.peer for one in equals)
            busiest = count.most_common(1)[0][0]
            goes = next(one for one in equals if trusted or one.peer == busiest)
            equals.remove(goes)
            leave.append(goes)
        return leave

    def _receive(self, connection: _Connection) -> None:
        try:
            connection.channel.secure(self._context, KEY_TIMEOUT)
            while self._exchange(connection):
                pass
        except (OSError, BadRequest, ClientGone):
            pass  # another protocol or a broken connection: there is no client left to answer
        except Exception as exc:  # noqa: BLE001 - a bug in this program: other connections are still served
            sys.stderr.write(f"courier: {type(exc).__name__}: {exc}\n")
        finally:
            self._leave(connection)

    def _leave(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.remove(connection)
        connection.channel.close()

    def _exchange(self, connection: _Connection) -> bool:
        """Handle one request; whether there may be another."""
        channel = connection.channel
        head = channel.head(
            IDLE if connection.trusted else max(0.1, connection.since + KEY_TIMEOUT - time.monotonic())
        )
        if head is None:
            return False
        if head.method == "GET" and head.path == courier_protocol.HEALTH:
            channel.answer(200, [b"ok"], {})
            return True
        try:
            claim = courier_protocol.check_request(
                self._key, head.method, head.path, head.headers.get("stoker-session", "")
            )
        except Forged:
            channel.answer(403, [], {}, close=True)
            return False
        if head.method != "POST" or head.length > courier_protocol.MAX_BODY:
            self._answer(channel, claim.nonce, Reply({"error": "not a POST, or too large"}, status=413))
            return False
        channel.sock.settimeout(IDLE)
        with contextlib.ExitStack() as lent:
            return self._handle(connection, head, claim, lent)

    def _handle(
        self, connection: _Connection, head: Head, claim: courier_protocol.Claim, lent: contextlib.ExitStack
    ) -> bool:
        channel = connection.channel
        try:
            body = lent.enter_context(self._buffers.lend(head.length))
        except Busy as exc:
            self._answer(channel, claim.nonce, Reply({"error": str(exc)}, status=503))
            return False
        # A head with a valid signature may be a replay, so its body has a time limit too.
        channel.fill(body, None if connection.trusted else IDLE)
        channel.sock.settimeout(IDLE)
        try:
            courier_protocol.check_body(claim, body)
            self._guard.admit(claim)
        except Forged:
            channel.answer(403, [], {}, close=True)
            return False
        except WrongBoot:
            self._answer(channel, claim.nonce, Reply({"boot": self._guard.boot}, status=409))
            return True
        self._trust(connection)
        self._touch()
        try:
            header, data = courier_protocol.unpack(body)
        except Malformed as exc:
            reply = Reply({"error": str(exc)}, status=400)
        else:
            lend = lambda length: lent.enter_context(self._buffers.lend(length))  # noqa: E731
            reply = self._handlers.handle(head.path, Request(header, data, lend, channel.fileno()))
        self._answer(channel, claim.nonce, reply)
        return True

    def _trust(self, connection: _Connection) -> None:
        connection.since = time.monotonic()
        if not connection.trusted:
            connection.trusted = True
            with self._lock:
                leave = self._surplus(trusted=True, most=MAX_TRUSTED)
            for one in leave:
                one.channel.cut()

    def _answer(self, channel: Channel, nonce: str, reply: Reply) -> None:
        body = [courier_protocol.head(reply.header), *reply.data]
        headers: Dict[str, str] = {
            courier_protocol.SESSION: courier_protocol.sign_answer(self._key, nonce, reply.status, body)
        }
        channel.answer(reply.status, body, headers)


def listen(port: int, host: Optional[str] = None) -> socket.socket:
    """Listen on every address, IPv6 and IPv4 if both exist."""
    if host is None:
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
        except (OSError, ValueError):
            host = "0.0.0.0"
    return socket.create_server((host, port), backlog=64)
