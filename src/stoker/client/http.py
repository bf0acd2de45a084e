"""A small HTTP/1.1 client.

The standard library's http.client imports the email package and ssl, which takes 25 ms, half of the time of a whole
command. Stoker needs little of HTTP: keep-alive, bodies with a length or chunked, and errors that name the server
that did not answer. TLS is loaded only for https.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import Final

from stoker.errors import ServerUnreachable, SpecError

CONNECT_TIMEOUT: Final = 10.0
_MAX_LINE = 65536
_MAX_HEADERS = 200


class Address:
    """The address of a server: scheme, host, port and base path of a URL."""

    __slots__ = ("base", "host", "port", "secure", "url")

    def __init__(self, url: str) -> None:
        scheme, found, rest = url.partition("://")
        if not found or scheme not in ("http", "https"):
            raise SpecError(f"not the URL of a server: {url!r}", hint="Use http://HOST:PORT or https://HOST.")
        where, _, path = rest.partition("/")
        host, port = _host_and_port(where, url)
        self.url = url.rstrip("/")
        self.secure = scheme == "https"
        self.host = host
        self.port = port or (443 if self.secure else 80)
        self.base = "/" + path.strip("/") if path.strip("/") else ""

    @property
    def netloc(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{name}:{self.port}"


class Response:
    """An answer whose body has not been read yet. Read it to its end or close it."""

    def __init__(self, status: int, headers: dict[str, str], connection: Connection) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self._left = int(length) if length is not None and length.isdigit() else None
        self._done = status in (204, 304)
        if self._left == 0 and not self._chunked:
            self._finish()

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The body in pieces, as they arrive."""
        while not self._done:
            with self._connection.translating():
                data = self._piece()
            if data:
                yield data

    def lines(self) -> Iterator[bytes]:
        """Complete lines of the body, without line ends."""
        rest = b""
        for data in self.chunks():
            *lines, rest = (rest + data).split(b"\n")
            yield from lines
        if rest:
            yield rest

    def close(self) -> None:
        """Gives up the rest of the body. The connection cannot be used again."""
        if not self._done:
            self._done = True
            self._connection.close()

    @property
    def reusable(self) -> bool:
        """Whether the body was read to its end and the connection stays open."""
        return self._done and self.headers.get("connection", "").lower() != "close"

    def _piece(self) -> bytes:
        reader = self._connection.reader
        if self._chunked:
            return self._chunk(reader)
        if self._left is None:
            data = reader.read1(_MAX_LINE)
            self._done = not data
            return data
        data = reader.read1(min(self._left, 1 << 20))
        if not data:
            raise ConnectionResetError("the answer ended early")
        self._left -= len(data)
        if self._left == 0:
            self._finish()
        return data

    def _chunk(self, reader: BufferedReader) -> bytes:
        line = reader.readline(_MAX_LINE)
        try:
            size = int(line.partition(b";")[0].strip(), 16)
        except ValueError as exc:
            raise ConnectionResetError("the answer ended early") from exc
        data = reader.read(size)
        end = reader.readline(_MAX_LINE)
        if len(data) != size or end not in (b"\r\n", b"\n"):
            raise ConnectionResetError("the answer ended early")
        if size == 0:
            self._finish()
        return data

    def _finish(self) -> None:
        self._done = True


class Connection:
    """One connection, one request at a time. Operating system errors become ServerUnreachable, and end it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._reader: BufferedReader | None = None
        self.fresh = True
        """Whether no request has been answered on it yet."""

    @property
    def reader(self) -> BufferedReader:
        if self._reader is None:
            raise ConnectionResetError("the connection is closed")
        return self._reader

    def request(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | Iterable[bytes] | None,
        timeout: float | None,
    ) -> Response:
        """Sends a request and reads the head of its answer. An iterable body is sent chunked."""
        with self.translating():
            sock = self._connected(timeout)
            lines = [f"{method} {self._address.base}{path} HTTP/1.1", f"Host: {self._address.netloc}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            if isinstance(body, bytes):
                lines.append(f"Content-Length: {len(body)}")
            elif body is not None:
                lines.append("Transfer-Encoding: chunked")
            head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
            self._send(sock, head, body)
            response = self._head()
            self.fresh = False
            return response

    def stale(self) -> bool:
        """Whether the server closed an idle connection, or sent bytes that belong to no request."""
        if self._socket is None:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @contextlib.contextmanager
    def translating(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self.close()
            raise unreachable(self._address.url, exc) from exc
        except BaseException:  # an interrupt within an answer: the rest must not be read as the next answer
            self.close()
            raise

    def _connected(self, timeout: float | None) -> socket.socket:
        if self._socket is None:
            wait = CONNECT_TIMEOUT if timeout is None else min(timeout, CONNECT_TIMEOUT)
            sock = socket.create_connection((self._address.host, self._address.port), wait)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._address.secure:
                import ssl  # lazy: only https pays for it

                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self._address.host)
            self._socket = sock
            self._reader = sock.makefile("rb")
        self._socket.settimeout(timeout)
        return self._socket

    def _send(self, sock: socket.socket, head: bytes, body: bytes | Iterable[bytes] | None) -> None:
        try:
            if body is None:
                sock.sendall(head)
            elif isinstance(body, bytes):
                # One packet for small requests, so that the server need not wait for a second one.
                sock.sendall(head + body if len(body) < _MAX_LINE else head)
                if len(body) >= _MAX_LINE:
                    sock.sendall(body)
            else:
                sock.sendall(head)
                for data in body:
                    if data:
                        sock.sendall(b"%x\r\n" % len(data))
                        sock.sendall(data)
                        sock.sendall(b"\r\n")
                sock.sendall(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a body answers before it has read all of it. Read that answer.
            if not select.select([sock], [], [], 1.0)[0]:
                raise

    def _head(self) -> Response:
        reader = self.reader
        status = _status(reader.readline(_MAX_LINE))
        headers: dict[str, str] = {}
        for _ in range(_MAX_HEADERS):
            line = reader.readline(_MAX_LINE)
            if line in (b"\r\n", b"\n"):
                return Response(status, headers, self)
            name, found, value = line.decode("latin-1").partition(":")
            if not found:
                break
            headers[name.strip().lower()] = value.strip()
        raise ConnectionResetError("the answer is not HTTP")


def unreachable(url: str, exc: OSError) -> ServerUnreachable:
    if isinstance(exc, TimeoutError):
        text = f"the server at {url} did not answer in time"
    elif isinstance(exc, ConnectionRefusedError):
        text = f"no server listens at {url}"
    else:
        text = f"the server at {url} cannot be reached: {exc}"
    return ServerUnreachable(
        text,
        hint="See `stoker server status`; tasks that run go on without the server.",
        details={"url": url},
    )


def _status(line: bytes) -> int:
    parts = line.split(None, 2)
    if not line:
        raise ConnectionResetError("the server closed the connection")
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise ConnectionResetError("the answer is not HTTP")
    return int(parts[1])


def _host_and_port(where: str, url: str) -> tuple[str, int | None]:
    if "@" in where:
        raise SpecError(
            "the URL of a server must not contain a password", hint="Put the token into STOKER_TOKEN."
        )
    if where.startswith("["):
        host, _, rest = where[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = where.partition(":")
    if not host or (port and not port.isdigit()) or (port and int(port) > 65535):
        raise SpecError(f"not the URL of a server: {url!r}", hint="Use http://HOST:PORT or https://HOST.")
    return host, int(port) if port else None
