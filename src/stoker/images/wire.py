"""HTTP for registries: redirects carry no credentials to other hosts, everything is bounded, addresses are checked.

    Wire.base     the URL of a registry: https, or http where the rules allow it and it has no TLS
    Wire.open     one request, redirects followed; the answer is read inside the `with`

An `authorization` is sent only to the origin it is for (scheme, host and port).
"""

from __future__ import annotations

import contextlib
import http.client
import random
import ssl
import threading
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from stoker.errors import ImageError, RegistryUnreachable, TooLarge
from stoker.images.connection import (
    READ_TIMEOUT,
    Connection,
    FileBody,
    Origin,
    joined,
    proxy_for,
    resolve,
    shown,
    translated,
)
from stoker.images.rules import HostRules

DOCUMENT_DEADLINE: Final = 120.0
"""Seconds for one whole document, however slowly it arrives."""
_PROBE_TIMEOUT = 5.0
_REDIRECTS = 5
_PAUSES = (0.2, 1.0)
"""Seconds before a failed read is repeated, each with up to the same amount of jitter."""
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_REDIRECT = frozenset({301, 302, 303, 307, 308})
_READING = frozenset({"GET", "HEAD"})
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Call:
    method: str
    url: str
    registry: str
    """Base URL of the registry concerned. Other hosts are contacted only because it named them."""
    headers: Mapping[str, str] = field(default_factory=dict)
    authorization: str | None = field(default=None, repr=False)
    body: bytes | FileBody | None = field(default=None, repr=False)


class Answer:
    """The head of an answer. The body is read once, while the connection is open."""

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        self.url = url
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.challenges = response.headers.get_all("WWW-Authenticate") or []
        self._response = response

    def read(self, limit: int, what: str) -> bytes:
        """The whole document. Raises TooLarge beyond `limit` bytes and RegistryUnreachable beyond the deadline."""
        end = time.monotonic() + DOCUMENT_DEADLINE
        data = bytearray()
        for piece in self.pieces():
            data += piece
            if len(data) > limit:
                raise TooLarge(f"{what} is larger than {limit >> 10} KiB, the limit")
            if time.monotonic() > end:
                raise RegistryUnreachable(
                    f"{shown(self.url)} took more than {DOCUMENT_DEADLINE:.0f} s for {what}"
                )
        return bytes(data)

    def pieces(self) -> Iterator[bytes]:
        with translated(Origin.of(self.url)):
            while data := self._response.read1(_BLOCK):
                yield data
            if self._response.length:
                raise ConnectionResetError("the answer ended early")


class Wire:
    """Connections to registries and to the hosts they name. May be used from any thread."""

    def __init__(self, rules: HostRules | None = None) -> None:
        self.rules = rules or HostRules()
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[Connection]] = defaultdict(list)
        self._bases: dict[str, str] = {}
        self._context: ssl.SSLContext | None = None

    def base(self, host: str) -> str:
        """`https://HOST`; `http://HOST` for a host that may be plain and does not answer to TLS."""
        if host in self._bases:
            return self._bases[host]
        secure, plain = f"https://{host}", f"http://{host}"
        base = secure
        if self.rules.may_be_plain(*Origin.of(plain)[1:]) and not self._knows_tls(secure):
            base = plain
        with self._lock:
            self._bases[host] = base
        return base

    @contextlib.contextmanager
    def open(self, call: Call) -> Iterator[Answer]:
        """Sends a request and follows redirects. Reads are repeated when the network or the server fails."""
        pauses = list(_PAUSES) if call.method in _READING else []
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    answer = self._followed(call, stack)
                except RegistryUnreachable as exc:
                    if not pauses or not exc.details.get("again"):
                        raise
                else:
                    if answer.status not in _TRANSIENT or not pauses:
                        yield answer
                        return
            time.sleep(pauses.pop(0) * (1 + random.random()))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, defaultdict(list)
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _knows_tls(self, base: str) -> bool:
        origin = Origin.of(base)
        try:
            connection = self._connection(origin, base, timeout=_PROBE_TIMEOUT)
            with translated(origin):
                connection.connect()
        except RegistryUnreachable as exc:
            if exc.details.get("untrusted"):
                raise
            return False
        connection.close()
        return True

    def _followed(self, call: Call, stack: contextlib.ExitStack) -> Answer:
        url, authorization, start = call.url, call.authorization, Origin.of(call.url)
        for _ in range(_REDIRECTS + 1):
            origin = Origin.of(url)
            if origin != start:
                authorization = None  # for good: a redirect back from another host is not trusted either
            step = contextlib.ExitStack()
            answer = step.enter_context(self._once(call, url, origin, authorization))
            if answer.status not in _REDIRECT or call.method not in _READING:
                stack.push(step)
                return answer
            step.close()
            target = joined(url, answer.headers.get("location", ""))
            self._check_step(origin, target)
            url = target
        raise ImageError(f"{call.url} redirects more than {_REDIRECTS} times")

    def _check_step(self, origin: Origin, target: str) -> None:
        there = Origin.of(target)
        if origin.scheme == "https" and there.scheme == "http" and not self.rules.may_be_plain(*there[1:]):
            raise ImageError(
                f"{origin.host} redirects from https to {shown(target)}: refused",
                hint="An admin can add the host to `plain` under [images] in config.toml.",
            )

    @contextlib.contextmanager
    def _once(self, call: Call, url: str, origin: Origin, authorization: str | None) -> Iterator[Answer]:
        parts = urllib.parse.urlsplit(url)
        target = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
            f"?{parts.query}" if parts.query else ""
        )
        headers = {"User-Agent": "stoker", "Accept-Encoding": "identity", **call.headers}
        if authorization:
            headers["Authorization"] = authorization
        connection, response = self._sent(call, origin, target, headers)
        try:
            yield Answer(url, response)
        finally:
            self._put_back(origin, connection, response)

    def _sent(
        self, call: Call, origin: Origin, target: str, headers: dict[str, str]
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """One request. If the server has closed an idle connection, the request is sent again on a new one."""
        while connection := self._take(origin):
            with contextlib.suppress(OSError, http.client.HTTPException):
                return connection, connection.exchange(call.method, target, headers, call.body)
            connection.close()
        connection = self._connection(origin, call.registry)
        try:
            with translated(origin):
                return connection, connection.exchange(call.method, target, headers, call.body)
        except BaseException:  # raised again; only closes the connection
            connection.close()
            raise

    def _take(self, origin: Origin) -> Connection | None:
        with self._lock:
            return self._idle[origin].pop() if self._idle[origin] else None

    def _put_back(self, origin: Origin, connection: Connection, response: http.client.HTTPResponse) -> None:
        if response.length == 0:
            response.read()  # there is no body; tells http.client that it was read
        if not response.isclosed() or response.will_close:
            response.close()
            connection.close()
            return
        with self._lock:
            self._idle[origin].append(connection)

    def _connection(self, origin: Origin, registry: str, timeout: float = READ_TIMEOUT) -> Connection:
        proxy = proxy_for(origin)
        addresses = resolve(origin, must=proxy is None)
        own = None if origin.host == Origin.of(registry).host else self._home(registry)
        self.rules.check(origin.host, origin.port, [address for address, _ in addresses], own)
        context = self._tls() if origin.scheme == "https" else None
        return Connection(origin, [where for _, where in addresses], proxy, context, timeout)

    def _home(self, registry: str) -> Callable[[], list[str]]:
        """The addresses of the registry itself. They are checked too: its name may resolve differently by now."""

        def addresses() -> list[str]:
            home = Origin.of(registry)
            found = [address for address, _ in resolve(home, must=False)]
            self.rules.check(home.host, home.port, found, None)
            return found

        return addresses

    def _tls(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                context = ssl.create_default_context()
                for path in self.rules.ca_files:
                    try:
                        context.load_verify_locations(path)
                    except OSError as exc:  # ssl.SSLError is one
                        raise ImageError(f"the certificates in {path} cannot be read: {exc}") from exc
                self._context = context
            return self._context
