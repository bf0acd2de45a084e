"""Connections to the courier: who may speak, and how many at once.

Anybody in the cluster may connect, and so may the training beside it. Who has not shown the key gets a few
connections for a few seconds each and no memory; when another one comes the oldest goes, of the address that has
most: so one that knocks without end is in nobody's way but its own.
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
from stoker.courier.sync import Gone
from stoker.task import courier_protocol
from stoker.task.courier_protocol import Forged, Guard, Malformed, WrongBoot

STRANGERS = 8
FRIENDS = 24
INTRODUCTION = 10.0
"""Seconds in which a connection has to show the key."""
IDLE = 90.0
"""Seconds that a connection may wait for its next request, and for a body or an answer to get through."""
TICK = 0.5


class _Visit:
    """One connection and its thread."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.channel = Channel(sock)
        self.peer = peer
        self.trusted = False
        self.since = time.monotonic()


class CourierServer:
    """Serves until `stop`. One thread per connection; the caller's thread accepts."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        key: bytes,
        verbs: Handlers,
        touch: Callable[[], None],
    ) -> None:
        """`touch`: called for every authentic request."""
        self._listener = listener
        self._context = context
        self._key = key
        self._verbs = verbs
        self._touch = touch
        self._guard = Guard()
        self._buffers = Buffers()
        self._lock = threading.Lock()
        self._visits: List[_Visit] = []

    def serve(self, over: Callable[[], bool]) -> None:
        """Until `over` says so, which is asked now and then."""
        self._listener.settimeout(TICK)
        while not over():
            try:
                sock, address = self._listener.accept()
            except socket.timeout:
                continue
            except OSError:
                time.sleep(TICK)  # out of descriptors, for now
                continue
            visit = _Visit(sock, str(address[0]))
            self._admit(visit)
            try:
                threading.Thread(target=self._receive, args=(visit,), daemon=True).start()
            except RuntimeError:
                self._leave(visit)  # the training has taken every process there is in the pod, for now

    def _admit(self, visit: _Visit) -> None:
        """Make room for it among its equals."""
        with self._lock:
            self._visits.append(visit)
            leave = self._surplus(trusted=False, most=STRANGERS) + self._surplus(trusted=True, most=FRIENDS)
        for one in leave:
            one.channel.cut()

    def _surplus(self, *, trusted: bool, most: int) -> List[_Visit]:
        equals = sorted((one for one in self._visits if one.trusted is trusted), key=lambda one: one.since)
        leave: List[_Visit] = []
        while len(equals) > most:
            # Friends come from one server, by whatever address; among them the oldest goes.
            count = Counter("" if trusted else one.peer for one in equals)
            busiest = count.most_common(1)[0][0]
            goes = next(one for one in equals if trusted or one.peer == busiest)
            equals.remove(goes)
            leave.append(goes)
        return leave

    def _receive(self, visit: _Visit) -> None:
        try:
            visit.channel.secure(self._context, INTRODUCTION)
            while self._exchange(visit):
                pass
        except (OSError, BadRequest, Gone):
            pass  # TLS that is not ours, a connection that broke: nobody is there to hear of it
        except Exception as exc:  # noqa: BLE001 - a mistake in this program: others are still served
            sys.stderr.write(f"courier: {type(exc).__name__}: {exc}\n")
        finally:
            self._leave(visit)

    def _leave(self, visit: _Visit) -> None:
        with self._lock:
            self._visits.remove(visit)
        visit.channel.close()

    def _exchange(self, visit: _Visit) -> bool:
        """One request and its answer; whether there may be another."""
        channel = visit.channel
        head = channel.head(
            IDLE if visit.trusted else max(0.1, visit.since + INTRODUCTION - time.monotonic())
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
            return self._obey(visit, head, claim, lent)

    def _obey(
        self, visit: _Visit, head: Head, claim: courier_protocol.Claim, lent: contextlib.ExitStack
    ) -> bool:
        channel = visit.channel
        try:
            body = lent.enter_context(self._buffers.lend(head.length))
        except Busy as exc:
            self._answer(channel, claim.nonce, Reply({"error": str(exc)}, status=503))
            return False
        # A head with a valid signature may be a copy: until the body is there too, it has no time without end.
        channel.fill(body, None if visit.trusted else IDLE)
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
        self._trust(visit)
        self._touch()
        try:
            header, data = courier_protocol.unpack(body)
        except Malformed as exc:
            reply = Reply({"error": str(exc)}, status=400)
        else:
            lend = lambda length: lent.enter_context(self._buffers.lend(length))  # noqa: E731
            reply = self._verbs.obey(head.path, Request(header, data, lend, channel.fileno()))
        self._answer(channel, claim.nonce, reply)
        return True

    def _trust(self, visit: _Visit) -> None:
        visit.since = time.monotonic()
        if not visit.trusted:
            visit.trusted = True
            with self._lock:
                leave = self._surplus(trusted=True, most=FRIENDS)
            for one in leave:
                one.channel.cut()

    def _answer(self, channel: Channel, nonce: str, reply: Reply) -> None:
        body = [courier_protocol.head(reply.header), *reply.data]
        headers: Dict[str, str] = {
            courier_protocol.SESSION: courier_protocol.sign_answer(self._key, nonce, reply.status, body)
        }
        channel.answer(reply.status, body, headers)


def listen(port: int, host: Optional[str] = None) -> socket.socket:
    """On every address, of both families where there are both."""
    if host is None:
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
        except (OSError, ValueError):
            host = "0.0.0.0"
    return socket.create_server((host, port), backlog=64)
