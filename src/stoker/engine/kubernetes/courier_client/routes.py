"""The routes to a pod's courier, and the choice of one that works.

    direct    the pod's own address: inside the cluster, or on a machine that can reach the pod network
    proxy     through the API server, one HTTP request per call
    forward   through the API server, a tunnel: where proxying is forbidden or another host interferes with it

`auto` tries them in this order and keeps the first that works. After a failure the next call takes the next route;
callers try again anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.courier_client import StreamTransport, Transport, direct
from stoker.engine.kubernetes.courier_client.transport import tls
from stoker.errors import EngineUnavailable, StokerError
from stoker.task import courier_protocol

log = logging.getLogger(__name__)

_PROBE_SECONDS = 1.0
"""Seconds in which a pod's own address must answer to count as reachable."""
_RETRY_SECONDS = 300.0
"""Seconds after which an address that could not be reached is tried again, with another pod."""

_REFUSALS = 4
"""Refused connections in a row after which another route is tried."""

Answer = tuple[int, Mapping[str, str], bytes]


class Routes:
    """What is known of the routes into one cluster. Shared by all its pods."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unreachable_until = 0.0

    def to(self, pod: str, certificate: str) -> Transport:
        wanted = self._cluster.config.reach
        order = ("direct", "proxy", "forward") if wanted == "auto" else (wanted,)
        return _CurrentRoute(self, self._cluster, pod, certificate, order)

    async def reachable(self, address: str) -> bool:
        """Whether the pod network can be reached from this machine, tested by connecting to one of its addresses."""
        if time.monotonic() < self._unreachable_until:
            return False
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _, writer = await asyncio.open_connection(address, courier_protocol.PORT)
        except ConnectionRefusedError:
            return True  # the pod is reachable, although its courier does not listen yet
        except OSError:
            self._unreachable_until = time.monotonic() + _RETRY_SECONDS
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True


class _CurrentRoute:
    """Implements Transport over the current route."""

    def __init__(
        self, routes: Routes, cluster: Cluster, pod: str, certificate: str, order: tuple[str, ...]
    ) -> None:
        self._routes = routes
        self._cluster = cluster
        self._pod = pod
        self._certificate = certificate
        self._order = order
        self._at = 0
        self._worked = False
        self._refused = 0
        self._last = ""
        self._transports: dict[tuple[str, str], Transport] = {}

    async def call(self, path: str, headers: Mapping[str, str], body: bytes, timeout: float) -> Answer:
        transport = await self._current()
        try:
            answer = await transport.call(path, headers, body, timeout)
        except ConnectionRefusedError:
            self._refused += 1
            if self._refused % _REFUSALS == 0:  # another host may have this address in the local network
                self._next_route()
            raise  # the route works: the courier does not listen yet
        except (OSError, StokerError):
            self._next_route()
            raise
        if courier_protocol.SESSION.lower() not in answer[1]:
            # Not the courier's answer: it comes from the API server or another host on the way.
            self._next_route()
        else:
            self._worked = True
        return answer

    async def close(self) -> None:
        for made in self._transports.values():
            if isinstance(made, StreamTransport):
                await made.close()
        self._transports.clear()

    def _next_route(self) -> None:
        """A route that worked gets a second chance: pods change often, routes rarely."""
        if self._worked:
            self._worked = False
        else:
            self._at = (self._at + 1) % len(self._order)

    async def _current(self) -> Transport:
        address = self._address()
        untried = self._order[self._at] == "direct" and ("direct", address) not in self._transports
        if untried and len(self._order) > 1 and not (address and await self._routes.reachable(address)):
            self._at = 1
        name = self._order[self._at]
        if name == "direct" and not address:
            raise EngineUnavailable(f"pod {self._pod} has no address")
        key = name, address if name == "direct" else ""
        if key not in self._transports:
            self._transports[key] = self._make(name, address)
        return self._transports[key]

    def _make(self, name: str, address: str) -> Transport:
        if name == "direct":
            return direct(address, courier_protocol.PORT, self._certificate)
        if name == "proxy":
            return _Proxy(self._cluster, self._pod)
        context = tls()

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            kube = self._cluster.kube
            return await kube.forward(
                kube.namespace,
                self._pod,
                courier_protocol.PORT,
                ssl=context,
                server_hostname="stoker-courier",
            )

        return StreamTransport(connect, certificate=self._certificate)

    def _address(self) -> str:
        """The last known address: the direct route works without the API server."""
        with contextlib.suppress(EngineUnavailable):
            pod = self._cluster.pod(self._pod) or {}
            self._last = str((pod.get("status") or {}).get("podIP") or "") or self._last
        return self._last


class _Proxy:
    """Implements Transport over the API server's pod proxy. TLS ends there, but requests are signed."""

    def __init__(self, cluster: Cluster, pod: str) -> None:
        self._cluster = cluster
        self._pod = pod

    async def call(self, path: str, headers: Mapping[str, str], body: bytes, timeout: float) -> Answer:
        kube = self._cluster.kube
        where = (
            f"/api/v1/namespaces/{kube.namespace}/pods/https:{self._pod}:{courier_protocol.PORT}/proxy{path}"
        )
        answer = await kube.request(
            "POST", where, body=body, headers=headers, timeout=timeout, max_bytes=courier_protocol.MAX_BODY
        )
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.body
