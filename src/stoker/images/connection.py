"""One connection to a host that was checked, and the translation of its errors.

Origin       scheme, host and port: what credentials and connections belong to
resolve      every address of a host
Connection   http.client, but to given addresses, or through the proxy of HTTPS_PROXY
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from stoker.errors import ImageError, RegistryUnreachable

CONNECT_TIMEOUT: Final = 10.0
READ_TIMEOUT: Final = 60.0
"""Seconds without a byte."""
_BLOCK = 1 << 20


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Raises ImageError for anything but http and https, and for URLs that contain a password."""
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ImageError(f"the registry named an invalid address: {shown(url)}") from exc
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ImageError(f"the registry named an address that is not allowed: {shown(url)}")
        return cls(parts.scheme, parts.hostname.lower(), port or (443 if parts.scheme == "https" else 80))


@dataclass(frozen=True)
class FileBody:
    """Part of a file, read anew for each try."""

    path: Path
    offset: int
    size: int

    def pieces(self) -> Iterator[bytes]:
        left = self.size
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while left and (data := file.read(min(left, _BLOCK))):
                left -= len(data)
                yield data


Where = tuple[int, tuple[str, int] | tuple[str, int, int, int]]
"""Address family and socket address."""


class Connection(http.client.HTTPConnection):
    """A connection to checked addresses: the name is not resolved a second time."""

    def __init__(
        self,
        origin: Origin,
        addresses: list[Where],
        proxy: str | None,
        context: ssl.SSLContext | None,
        timeout: float,
    ) -> None:
        super().__init__(origin.host, origin.port, timeout=timeout, blocksize=_BLOCK)
        if origin.port == (443 if context else 80):
            self.default_port = origin.port
        self._origin = origin
        self._addresses = addresses
        self._proxy = proxy
        self._context = context

    def connect(self) -> None:
        wait = min(CONNECT_TIMEOUT, self.timeout or CONNECT_TIMEOUT)
        sock = _tunnel(self._proxy, self._origin, wait) if self._proxy else _dial(self._addresses, wait)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_hostname=self._origin.host)
            sock.settimeout(self.timeout)
        except BaseException:  # raised again; only closes the socket
            sock.close()
            raise
        self.sock = sock

    def exchange(
        self, method: str, target: str, headers: dict[str, str], body: bytes | FileBody | None
    ) -> http.client.HTTPResponse:
        if isinstance(body, FileBody):
            headers = {**headers, "Content-Length": str(body.size)}
        try:
            self.request(
                method, target, body=body.pieces() if isinstance(body, FileBody) else body, headers=headers
            )
        except (BrokenPipeError, ConnectionResetError) as exc:
            # A registry that refuses a body answers before it has read all of it. Read that answer.
            try:
                return self.getresponse()
            except (OSError, http.client.HTTPException):
                raise exc from None
        return self.getresponse()


def _dial(addresses: list[Where], timeout: float) -> socket.socket:
    problem: OSError = ConnectionRefusedError("it has no address")
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(address)
            return sock
        except OSError as exc:
            sock.close()
            problem = exc
    raise problem


def _tunnel(proxy: str, origin: Origin, timeout: float) -> socket.socket:
    """A tunnel through an HTTP proxy, which resolves the name itself."""
    parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    sock = socket.create_connection((parts.hostname or "", parts.port or 3128), timeout)
    try:
        name = f"[{origin.host}]" if ":" in origin.host else origin.host
        lines = [f"CONNECT {name}:{origin.port} HTTP/1.1", f"Host: {name}:{origin.port}"]
        if parts.username:
            pair = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
            lines.append("Proxy-Authorization: Basic " + base64.b64encode(pair.encode()).decode())
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        head = b""
        while not head.endswith(b"\r\n\r\n") and len(head) < 65536 and (data := sock.recv(1)):
            head += data
        if head.split(b" ", 2)[1:2] != [b"200"]:
            raise OSError(f"the proxy {parts.hostname} answered {head[:60]!r}")
    except BaseException:  # raised again; only closes the socket
        sock.close()
        raise
    return sock


def proxy_for(origin: Origin) -> str | None:
    """The proxy by HTTPS_PROXY and NO_PROXY, with their usual meaning. Registries without TLS are local: no proxy."""
    if origin.scheme != "https" or urllib.request.proxy_bypass(origin.host):
        return None
    return urllib.request.getproxies().get("https")


def resolve(origin: Origin, *, must: bool) -> list[tuple[str, Where]]:
    """Every address of the host, as text and as a socket address. Behind a proxy the host may be unknown here."""
    try:
        found = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        if not must:
            return []
        raise RegistryUnreachable(
            f"there is no host {origin.host!r}: {exc}",
            hint="Check the image's name: what comes before the first slash is the registry's host.",
            details={"host": origin.host},
        ) from exc
    return [(str(where[0]), (family, where)) for family, _, _, _, where in found]  # type: ignore[misc]


@contextlib.contextmanager
def translated(origin: Origin) -> Iterator[None]:
    """Turns errors of the network into RegistryUnreachable; `again` says that another try may help."""
    try:
        yield
    except ssl.SSLCertVerificationError as exc:
        raise RegistryUnreachable(
            f"the certificate of {origin.host}:{origin.port} is not trusted: {exc.verify_message}",
            hint="Give the certificate of the CA that signed it.",
            details={"host": origin.host, "untrusted": True},
        ) from exc
    except (OSError, http.client.HTTPException) as exc:
        if isinstance(exc, TimeoutError):
            text = f"{origin.host}:{origin.port} did not answer in time"
        elif isinstance(exc, ConnectionRefusedError):
            text = f"nothing listens at {origin.host}:{origin.port}"
        else:
            text = f"{origin.host}:{origin.port} cannot be reached: {exc or type(exc).__name__}"
        broken = isinstance(exc, ConnectionError | http.client.HTTPException)
        again = broken and not isinstance(exc, ConnectionRefusedError)
        raise RegistryUnreachable(
            text,
            hint="Check the registry's address, the network and the proxy settings.",
            details={"host": origin.host, "again": again},
        ) from exc


def joined(url: str, location: str) -> str:
    """The URL that a Location header names."""
    try:
        return urllib.parse.urljoin(url, location)
    except ValueError as exc:
        raise ImageError(f"{Origin.of(url).host} named an invalid address") from exc


def shown(url: str) -> str:
    """The URL without its query, which may hold a signature, and without a password."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "(not a URL)"
    if not url.isprintable():
        return "(a URL with control characters)"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:200]
