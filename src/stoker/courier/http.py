"""The part of HTTP/1.1 that the courier needs, parsed strictly: one request at a time, with a length."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import Dict, Iterable, NamedTuple, Optional

from stoker.task.courier_protocol import Bytes

HEAD = 16 << 10
"""The most bytes of a request's head."""
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 409: "Conflict"}
_REASONS.update({413: "Too Large", 422: "Unprocessable", 500: "Internal Error", 503: "Busy"})


class BadRequest(Exception):
    """An invalid request. The connection is closed."""


class Head(NamedTuple):
    method: str
    path: str
    headers: Dict[str, str]
    """Names in lower case."""

    @property
    def length(self) -> int:
        raw = self.headers.get("content-length", "0")
        if "transfer-encoding" in self.headers or not raw.isascii() or not raw.isdigit() or len(raw) > 12:
            raise BadRequest("the body has no length")
        return int(raw)


class Channel:
    """One connection. Used by one thread; only `cut` may be called from any."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""

    def secure(self, context: ssl.SSLContext, seconds: float) -> None:
        """Switch to TLS. Raises OSError if the handshake is not done within `seconds`."""
        sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        self.sock = sock
        sock.settimeout(seconds)
        sock.do_handshake()

    def fileno(self) -> int:
        return self.sock.fileno()

    def head(self, seconds: float) -> Optional[Head]:
        """The next request; None at the end of the connection. Raises BadRequest, and OSError after `seconds`."""
        data = self._rest
        deadline = time.monotonic() + seconds
        while True:
            end = data.find(b"\r\n\r\n")
            if end >= 0:
                break
            if len(data) > HEAD:
                raise BadRequest("the head is too long")
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            more = self.sock.recv(HEAD)
            if not more:
                if data:
                    raise BadRequest("the request ended early")
                return None
            data += more
        self._rest = data[end + 4 :]
        return _parse(data[:end])

    def fill(self, view: memoryview, seconds: Optional[float] = None) -> None:
        """Read exactly `len(view)` bytes. Raises OSError after `seconds`, even if some have arrived."""
        deadline = None if seconds is None else time.monotonic() + seconds
        taken = min(len(self._rest), len(view))
        view[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        while taken < len(view):
            if deadline is not None:
                self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            count = self.sock.recv_into(view[taken:])
            if count == 0:
                raise BadRequest("the body ended early")
            taken += count

    def answer(
        self, status: int, body: Iterable[Bytes], headers: Dict[str, str], *, close: bool = False
    ) -> None:
        pieces = [piece for piece in body if len(piece)]
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Other')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [
            "Content-Type: application/octet-stream",
            f"Content-Length: {sum(len(piece) for piece in pieces)}",
            "Connection: close" if close else "Connection: keep-alive",
        ]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if pieces and len(head) + len(pieces[0]) < HEAD:
            pieces[0] = head + bytes(pieces[0])
            head = b""
        for piece in [head, *pieces] if head else pieces:
            self.sock.sendall(piece)

    def cut(self) -> None:
        """Shut the connection down: the thread that uses it gets an error and closes it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self.sock.close()


def _parse(data: bytes) -> Head:
    lines = data.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not words[1].startswith("/"):
        raise BadRequest("not an HTTP request")
    headers: Dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequest("invalid header")
        name = name.lower()
        if name in headers and name in ("content-length", "stoker-session"):
            raise BadRequest("duplicate header")
        headers[name] = value.strip()
    return Head(words[0], words[1], headers)
