"""Requests to one API server: credentials, connections, bounded tries, and errors in Stoker's terms."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import socket
import ssl
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn
from urllib.parse import urlencode

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from stoker.engine.kubernetes.api import proxies
from stoker.engine.kubernetes.api.credentials import Identity, Login, StoredLogin
from stoker.engine.kubernetes.api.errors import Disconnected, KubeError, KubeUnavailable, Stalled
from stoker.engine.kubernetes.api.exec_plugin import PluginLogin
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from stoker.engine.kubernetes.api.tls import Tls
from stoker.errors import TooLarge

CONNECT_TIMEOUT: Final = 10.0
TRIES: Final = 4
CONCURRENCY: Final = 32
"""Requests in progress at a time; long ones (watch, logs, proxy, exec, forward) are not counted."""
MAX_WAIT: Final = 10.0
"""The longest `Retry-After` in seconds that is obeyed here; a longer one is left to the caller."""
IDLE: Final = 30.0
"""Seconds that an unused connection is kept; load balancers drop such connections silently after about a minute."""
CLOSE_SECONDS: Final = 0.25
"""Seconds that closing a connection may wait for TLS's close notification. A dead server never sends it."""
_BIG: Final = 1 << 20


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Case-insensitive."""
    body: bytes = field(repr=False)

    def json(self) -> Any:
        """KubeUnavailable if it is not JSON: it was truncated, or a host on the way answered."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise Disconnected(
                f"the answer is not JSON, or only a part of it ({len(self.body)} bytes)", status=self.status
            ) from None


@dataclass(frozen=True)
class Call:
    """One request, before it has credentials."""

    verb: str
    """The verb it is counted as: `list`, `proxy`"""
    kind: str
    method: str
    path: str
    params: Mapping[str, str] | Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = field(default=None, repr=False)
    max_bytes: int = 256 << 20

    def __str__(self) -> str:
        return f"{self.verb} {self.kind}"


class Session:
    """Belongs to one event loop and is made inside it. Nothing is connected before the first request."""

    def __init__(self, config: KubeConfig) -> None:
        self.config = config
        self.calls: Counter[tuple[str, str]] = Counter()
        self._proxy = proxies.proxy_for(config.server, config.proxy_url, os.environ) or None
        self._tls = Tls(config)
        self._login: Login = (
            StoredLogin(config) if config.user.plugin is None else PluginLogin(config, config.user.plugin)
        )
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._connector = _connector(self._socket)
        self._http = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"stoker/{_version()}"},
            trust_env=False,
            middlewares=(self._refused_upgrade,),
        )

    async def close(self) -> None:
        """Close everything, including connections whose other side is dead."""
        await self._login.close()
        await self._connector.close(abort_ssl=True)
        await self._http.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4 * CLOSE_SECONDS):
                while any(each.fileno() != -1 for each in self._sockets):  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.01)

    async def send(self, call: Call, *, timeout: float) -> Answer:
        """A successful answer; KubeError or KubeUnavailable for every other. A GET is tried again after a failed
        connection or a server error; other methods only when the server says when to retry."""
        problem = ""
        try:
            async with asyncio.timeout(timeout):
                for attempt in range(TRIES):
                    try:
                        async with self._slots:
                            answer = await self._once(call)
                        if answer.status < 400:
                            return answer
                        wait = _wait(call, answer, attempt)
                        if wait is None:
                            self._raise(call, answer)
                        problem = f", last: {answer.status} {_status(answer)[1]}"
                    except Disconnected as exc:
                        if call.method != "GET" or attempt == TRIES - 1:
                            raise
                        problem, wait = f", last: {exc.message}", _backoff(attempt)
                    await asyncio.sleep(wait)
        except TimeoutError:
            raise Stalled(
                f"{call}: no answer from {self.config.server} within {timeout:g} s{problem}"
            ) from None
        raise AssertionError("the last try returns or raises")

    async def raw(self, call: Call, *, timeout: float) -> Answer:
        """One request, with any status as answer. It is outside the concurrency limit, because it may take long."""
        try:
            async with asyncio.timeout(timeout):
                return await self._once(call)
        except TimeoutError:
            raise Stalled(f"{call}: no answer from {self.config.server} within {timeout:g} s") from None

    @contextlib.asynccontextmanager
    async def stream(self, call: Call, *, idle: float | None) -> AsyncIterator[aiohttp.StreamReader]:
        """The body as it arrives. `Stalled` if nothing arrives for `idle` seconds."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=idle)
        with self._translated(call):
            async with self._exchange(call, timeout) as response:
                if response.status >= 400:
                    self._raise(call, await _answer(call, response))
                yield response.content

    async def websocket(
        self, call: Call, protocols: tuple[str, ...], *, timeout: float
    ) -> aiohttp.ClientWebSocketResponse:
        """The caller closes it. A message may be as large as the other side sends it."""
        try:
            with self._translated(call):
                async with asyncio.timeout(timeout):
                    return await self._upgrade(call, protocols)
        except TimeoutError:
            raise Stalled(f"{call}: no answer from {self.config.server} within {timeout:g} s") from None

    # -- helpers

    async def _once(self, call: Call) -> Answer:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        with self._translated(call):
            async with self._exchange(call, timeout) as response:
                return await _answer(call, response)

    @contextlib.asynccontextmanager
    async def _exchange(
        self, call: Call, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request, and a second one with new credentials if the first ones are refused."""
        for last in (False, True):
            identity = await self._identity()
            self.calls[call.verb, call.kind] += 1
            async with self._http.request(
                call.method,
                self._url(call),
                data=io.BytesIO(call.body) if call.body is not None and len(call.body) > _BIG else call.body,
                timeout=timeout,
                allow_redirects=False,
                read_bufsize=1 << 18,
                **self._arguments(call, identity),
            ) as response:
                if response.status != 401 or last or not await self._login.renew(identity):
                    yield response
                    return

    async def _upgrade(self, call: Call, protocols: tuple[str, ...]) -> aiohttp.ClientWebSocketResponse:
        for last in (False, True):
            identity = await self._identity()
            self.calls[call.verb, call.kind] += 1
            try:
                ws: aiohttp.ClientWebSocketResponse = await self._http.ws_connect(
                    self._url(call),
                    protocols=protocols,
                    max_msg_size=0,
                    heartbeat=IDLE,
                    **self._arguments(call, identity),
                )
                return ws
            except _Refused as exc:
                if exc.answer.status != 401 or last or not await self._login.renew(identity):
                    self._raise(call, exc.answer)
        raise AssertionError("the last try returns or raises")

    async def _identity(self) -> Identity:
        if self._http.closed:
            raise KubeUnavailable(f"the client of {self.config.server} was closed")
        return await self._login.identity()

    async def _refused_upgrade(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """aiohttp drops the body of an answer that is not an upgrade, and with it the reason."""
        response = await handler(request)
        if response.status != 101 and request.headers.get("Upgrade") == "websocket":
            async with response:
                raise _Refused(
                    Answer(response.status, response.headers, await response.content.read(1 << 16))
                )
        return response

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Watches and long polls are silent for long, so the kernel checks that the other side still exists."""
        made = socket.socket(family=info[0], type=info[1], proto=info[2])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sockets.add(made)
        return made

    def _url(self, call: Call) -> URL:
        query = f"?{urlencode(call.params)}" if call.params else ""
        return URL(f"{self.config.server}{call.path}{query}", encoded=True)

    def _arguments(self, call: Call, identity: Identity) -> dict[str, Any]:
        headers = CIMultiDict(call.headers)
        for name, value in identity.headers:
            headers.add(name, value)
        context = self._tls.context(identity)
        return {
            "headers": headers,
            "proxy": self._proxy,
            "ssl": True if context is None else context,
            "server_hostname": self.config.tls_server_name or None,
        }

    def _raise(self, call: Call, answer: Answer) -> NoReturn:
        reason, message = _status(answer)
        status = answer.status
        if status == 401:
            raise KubeUnavailable(
                f"{call}: {self.config.server} does not accept the credentials: {message}",
                status=status,
                hint=self._login.hint,
            )
        if status == 429 or status >= 500:
            raise KubeUnavailable(f"{call}: {self.config.server} answered {status}: {message}", status=status)
        raise KubeError(f"{call}: {message}", status=status, reason=reason)

    @contextlib.contextmanager
    def _translated(self, call: Call) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, ssl.SSLError, OSError) as exc:
            if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ClientError):
                raise  # the caller's own timeout
            raise self._unreachable(call, exc) from exc

    def _unreachable(self, call: Call, exc: Exception) -> KubeUnavailable:
        server = self.config.server
        match exc:
            case aiohttp.ClientConnectorCertificateError() | ssl.SSLCertVerificationError():
                why = getattr(exc, "certificate_error", exc)
                return KubeUnavailable(
                    f"{call}: the certificate of {server} is not trusted: {getattr(why, 'verify_message', why)}",
                    hint="Check certificate-authority and tls-server-name in the kubeconfig.",
                )
            case aiohttp.ClientHttpProxyError() | aiohttp.ClientProxyConnectionError():
                status = (
                    f"it answered {exc.status}" if isinstance(exc, aiohttp.ClientHttpProxyError) else str(exc)
                )
                return Disconnected(
                    f"{call}: the proxy {proxies.shown(self._proxy or '')} does not connect to {server}: {status}",
                    hint="Check proxy-url in the kubeconfig, HTTPS_PROXY and NO_PROXY.",
                )
            case aiohttp.ConnectionTimeoutError():
                return Disconnected(
                    f"{call}: no connection to {server} within {CONNECT_TIMEOUT:g} s", hint=_REACH
                )
            case aiohttp.SocketTimeoutError():
                return Stalled(f"{call}: {server} sends nothing")
            case aiohttp.ClientConnectorError():
                return Disconnected(
                    f"{call}: no connection to {server}: {exc.os_error.strerror or exc.os_error}", hint=_REACH
                )
            case aiohttp.ClientPayloadError():
                return Disconnected(f"{call}: the answer of {server} ended early")
        return Disconnected(f"{call}: the connection to {server} was lost: {str(exc) or type(exc).__name__}")


_KEEP_ALIVE: Final = (
    ("TCP_KEEPIDLE", 15),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 30_000),
)
_REACH: Final = "Is the cluster running, and is this its address? A VPN or proxy may be needed."


class _Refused(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


async def _answer(call: Call, response: aiohttp.ClientResponse) -> Answer:
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > call.max_bytes:
            raise TooLarge(f"{call}: the answer has more than {call.max_bytes} bytes")
        pieces.append(piece)
    return Answer(response.status, response.headers, b"".join(pieces))


def _status(answer: Answer) -> tuple[str, str]:
    """The reason and message of Kubernetes, or the beginning of what another host on the way wrote."""
    with contextlib.suppress(ValueError):
        body = json.loads(answer.body)
        if isinstance(body, dict) and body.get("kind") == "Status":
            return str(body.get("reason") or ""), str(
                body.get("message") or body.get("reason") or answer.status
            )
    text = " ".join(answer.body[:300].decode("utf-8", "replace").split())
    return "", text or f"status {answer.status}"


def _wait(call: Call, answer: Answer, attempt: int) -> float | None:
    """Seconds until the request may be sent again; None: no retry."""
    if attempt == TRIES - 1 or not (answer.status == 429 or answer.status >= 500):
        return None
    asked = answer.headers.get("Retry-After", "")
    if asked.isdigit():
        return float(asked) + random.uniform(0, 0.5) if int(asked) <= MAX_WAIT else None
    return _backoff(attempt) if call.method == "GET" else None


def _backoff(attempt: int) -> float:
    return 0.2 * 2.5**attempt * random.uniform(0.5, 1.5)


def _version() -> str:
    return str(sys.modules["stoker"].__version__)  # an import of `stoker` would count as importing the SDK


def _connector(factory: Callable[[Any], socket.socket]) -> aiohttp.TCPConnector:
    with warnings.catch_warnings():
        # Deprecated without a replacement; without it closing takes up to 30 seconds.
        warnings.simplefilter("ignore", DeprecationWarning)
        return aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE, socket_factory=factory, ssl_shutdown_timeout=CLOSE_SECONDS
        )
