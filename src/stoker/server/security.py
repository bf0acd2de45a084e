"""Checks before every route: the client's token, its origin and the size of its request.

Pure ASGI and outermost, so that a client without the token gets no answer, not even "no such route". A browser is
the likeliest attacker of a server on loopback: a foreign page can make it send requests here, and by DNS rebinding
even under a name of its own. So the Host and the Origin must be this server's, and requests that a browser itself
calls cross-site are refused. The token alone stops all of these; the other checks hold even when a token has leaked
into a page.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.errors import StokerError, TooLarge, Unauthorized
from stoker.server.responses import error, unexpected

OPEN = frozenset({"/healthz", "/readyz"})
"""The paths that need no token."""
BODY = 2 << 20
"""Bytes of a request, unless its path is among the caps given to Security."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ANYWHERE = frozenset({"", "0.0.0.0", "::"})
"""Addresses that mean every interface."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FAILURES = 30
"""Wrong tokens in a row before the answer is "too many"; one more is allowed each second. The right token is always
accepted: otherwise any user of this machine could lock the owner out."""


class Security:
    """Refuses a request or passes it on. `caps`: path -> bytes of its body."""

    def __init__(
        self, app: ASGIApp, *, token: str, hosts: Iterable[str] = (), caps: dict[str, int] | None = None
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = frozenset(host.lower() for host in hosts)
        self._caps = caps or {}
        self._failures = Failures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There are no WebSockets here. Closing before the handshake refuses them.
            await send({"type": "websocket.close", "code": 1008})
            return
        sending = _WithHeaders(send)
        refusal = self._refuse(scope)
        if refusal is not None:
            await error(*refusal)(scope, receive, sending)
            return
        bounded = _Bounded(receive, self._caps.get(scope["path"], BODY))
        try:
            bounded.check_length(scope)
            await self._app(scope, bounded, sending)
        except ClientDisconnect:
            # The client has gone, which is no fault of the server.
            return
        except Exception as exc:  # whatever a route raises, the client gets an answer
            if sending.started:
                # Half of the answer is sent already. Only cutting the connection shows that it failed.
                unexpected(exc)
                raise
            answer = error(exc) if isinstance(exc, StokerError) else unexpected(exc)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, sending)

    def _refuse(self, scope: Scope) -> tuple[StokerError, int] | None:
        """The error and its status; None lets the request pass."""
        headers = _Headers(scope)
        host = headers.one(b"host")
        if host is None or not self._names_this_server(host, scope):
            return Unauthorized("the Host header does not name this server", hint=_HOST_HINT), 421
        origin = headers.all(b"origin")
        if origin and origin != [f"{scope.get('scheme', 'http')}://{host}".encode()]:
            return Unauthorized("requests from other sites are refused"), 403
        if any(site not in (b"same-origin", b"none") for site in headers.all(b"sec-fetch-site")):
            return Unauthorized("requests from other sites are refused"), 403
        if scope["path"] in OPEN and scope["method"] == "GET":
            return None
        if has_token(self._token, scope["headers"]):
            return None
        if not self._failures.allowed():
            return Unauthorized("too many requests with a wrong token"), 429
        return Unauthorized("missing or wrong token", hint="Send `Authorization: Bearer TOKEN`."), 401

    def _names_this_server(self, host: str, scope: Scope) -> bool:
        name, port = split_host(host)
        if name in self._hosts or host.lower() in self._hosts:
            return True
        server = scope.get("server")
        ours = str(server[1]) if server and server[1] is not None else ""
        return name in LOOPBACK and (port or "80") == ours


class Failures:
    """Counts wrong tokens: a bucket that refills by one a second."""

    def __init__(self, burst: float = _FAILURES) -> None:
        self._burst = burst
        self._left = burst
        self._at = time.monotonic()

    def allowed(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + now - self._at)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def has_token(token: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether these headers hold this token, exactly once."""
    given = [value for name, value in headers if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], b"Bearer " + token)


def is_loopback(host: str) -> bool:
    return host in LOOPBACK


def split_host(host: str) -> tuple[str, str]:
    """Name (lower case, no brackets) and port of a Host header. An unusable header gives an empty name."""
    if host.startswith("["):
        name, closed, rest = host[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else ""
        bad = not closed or (rest and not rest.startswith(":"))
    else:
        name, _, port = host.partition(":")
        bad = ":" in port
    if bad or (port and not (port.isascii() and port.isdigit())):
        return "", ""
    return name.lower(), port


_HOST_HINT = "Use the URL in server.json, or add the name to allowed_hosts under [server] in config.toml."


class _Headers:
    def __init__(self, scope: Scope) -> None:
        self._raw: list[tuple[bytes, bytes]] = scope["headers"]

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._raw if key == name]

    def one(self, name: bytes) -> str | None:
        """The value, if there is exactly one."""
        found = self.all(name)
        return found[0].decode("latin-1") if len(found) == 1 else None


class _WithHeaders:
    """Adds the headers that every answer has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)


class _Bounded:
    """Counts what a request sends and stops at the cap, whatever its Content-Length says."""

    def __init__(self, receive: Receive, cap: int) -> None:
        self._receive = receive
        self._cap = cap
        self._seen = 0

    def check_length(self, scope: Scope) -> None:
        length = _Headers(scope).one(b"content-length")
        if length is not None and length.isdigit() and int(length) > self._cap:
            raise self._too_large()

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._cap:
                raise self._too_large()
        return message

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the request is over the cap of {self._cap} bytes")
