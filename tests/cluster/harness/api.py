"""The few requests that the harness itself makes to the API server: JSON in, JSON out."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from harness.errors import HarnessError
from harness.layout import Layout

__all__ = ["Api", "answers", "until"]


def until(
    condition: Callable[[], bool], what: str, limit: float = 120, evidence: Callable[[], str] = str
) -> None:
    """Wait for a condition; fails after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise HarnessError(f"waited {limit:.0f} s for {what}\n{evidence()}".rstrip())
        time.sleep(0.1)


def answers(address: str) -> bool:
    """Whether a GET of the address is answered with 200."""
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Api:
    """A client with the rights of the cluster's administrator; one short connection per request."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __call__(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """The JSON of the answer; any status but 2xx raises an error with the server's message."""
        status, said = self.raw(method, path, body, kind)
        if not 200 <= status < 300:
            raise HarnessError(f"the API server answers {status} to {method} {path}: {said[:1000].decode()}")
        return json.loads(said)

    def raw(
        self, method: str, path: str, body: object = None, kind: str = "application/json", timeout: float = 30
    ) -> tuple[int, bytes]:
        connection = self._connect(timeout)
        headers: Mapping[str, str] = {"Content-Type": kind} if body is not None else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def lines(self, path: str) -> Iterator[bytes]:
        """The lines of a streaming answer, until the server ends it or goes away."""
        connection = self._connect(timeout=400)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            while line := answer.readline():
                yield line
        finally:
            connection.close()

    def answers(self, path: str = "/readyz") -> bool:
        try:
            return self.raw("GET", path, timeout=5)[0] == 200
        except OSError:
            return False

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        target = urlsplit(self._layout.server)
        return http.client.HTTPSConnection(
            str(target.hostname), target.port, timeout=timeout, context=self._tls
        )

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Made once: reading certificates takes longer than most requests."""
        pki = self._layout.pki
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        return context
