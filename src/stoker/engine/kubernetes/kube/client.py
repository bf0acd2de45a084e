"""`Kube`: the Kubernetes API with plain dicts."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from stoker.engine.kubernetes.kube.config import KubeConfig
from stoker.engine.kubernetes.kube.http import Answer
from stoker.engine.kubernetes.kube.kinds import Kind
from stoker.engine.kubernetes.kube.streams import Ended

Object = dict[str, Any]


class Kube:
    """One cluster, as one user. Belongs to one event loop; any number of coroutines may use it at once.

    Every call raises KubeError when the API server said no, and KubeUnavailable when it did not say anything
    (after a bounded number of tries where trying again is harmless). `namespace=None` is the configured one, `""`
    (list and watch only) all of them. `timeout` is for the whole call, in seconds. Objects are the caller's to
    keep or change. Nothing is done twice: a write is sent again only if the server said that it was not done.
    """

    calls: Counter[tuple[str, str]]
    """Requests sent, by (verb, kind): ("list", "pods"), ("proxy", "pods"). Tries count."""
    namespace: str

    @classmethod
    def from_config(cls, config: KubeConfig, *, concurrency: int = 32) -> Kube:
        """`concurrency`: requests under way at a time; what lasts (watch, logs, proxy, exec, forward) is not
        counted. Connects to nothing yet; must be called inside the event loop."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends everything under way, connections and forwards included. May be called twice."""

    async def version(self) -> str:
        """`v1.37.0`"""
        raise NotImplementedError

    # -- objects

    async def get(
        self, kind: Kind, name: str, namespace: str | None = None, *, timeout: float = 30
    ) -> Object:
        raise NotImplementedError

    async def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        timeout: float = 60,
    ) -> list[Object]:
        """All of them, in pages, as of one moment. Each has its `apiVersion` and `kind`."""
        raise NotImplementedError

    async def create(
        self,
        kind: Kind,
        obj: Object,
        namespace: str | None = None,
        *,
        dry_run: bool = False,
        timeout: float = 30,
    ) -> Object:
        """KubeError with `.exists` if the name is taken."""
        raise NotImplementedError

    async def replace(
        self,
        kind: Kind,
        obj: Object,
        namespace: str | None = None,
        *,
        subresource: str = "",
        timeout: float = 30,
    ) -> Object:
        """KubeError with `.conflict` if `obj` has a resourceVersion and it is not the newest."""
        raise NotImplementedError

    async def patch(
        self,
        kind: Kind,
        name: str,
        patch: Object | Sequence[Object],
        namespace: str | None = None,
        *,
        how: Literal["merge", "json", "strategic", "apply"] = "merge",
        subresource: str = "",
        timeout: float = 30,
    ) -> Object:
        """`how="apply"` is server-side apply, forced, as field manager `stoker`; "json" takes a list."""
        raise NotImplementedError

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        grace: int | None = None,
        uid: str = "",
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
        timeout: float = 30,
    ) -> bool:
        """False: it was not there (or, with `uid`, another one of that name is). `grace` in seconds; 0 forces."""
        raise NotImplementedError

    async def delete_all(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str,
        grace: int | None = None,
        timeout: float = 60,
    ) -> None:
        """All that match; an empty selector is refused."""
        raise NotImplementedError

    def watch(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        resource_version: str = "",
        labels: str = "",
        fields: str = "",
        timeout: float = 60,
    ) -> AsyncIterator[tuple[str, Object]]:
        """("ADDED" | "MODIFIED" | "DELETED" | "BOOKMARK", object) until the server ends it after `timeout`. KubeError
        with `.expired` when `resource_version` is too old. Close it (contextlib.aclosing) to be rid of the
        connection at once. For keeping up with something use `Cache`."""
        raise NotImplementedError

    # -- requests as they are

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Any = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30,
        max_bytes: int = 64 << 20,
    ) -> Answer:
        """Any status is an answer here, redirects are not followed, and nothing is sent twice (but after a 401
        with new credentials). `path` begins with `/` and is sent as it is. TooLarge past `max_bytes`."""
        raise NotImplementedError

    # -- containers

    def logs(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        previous: bool = False,
        timestamps: bool = False,
        since: str = "",
        tail: int | None = None,
        limit_bytes: int | None = None,
        idle: float | None = None,
    ) -> AsyncIterator[bytes]:
        """Pieces as they come. `since`: RFC 3339. `idle`: seconds without a byte until KubeUnavailable; None: 60,
        or no limit when following."""
        raise NotImplementedError

    async def exec(
        self,
        namespace: str,
        pod: str,
        container: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float = 60,
        max_bytes: int = 8 << 20,
    ) -> Ended:
        """Run it to its end."""
        raise NotImplementedError

    async def forward(
        self,
        namespace: str,
        pod: str,
        port: int,
        *,
        ssl: ssl.SSLContext | None = None,
        server_hostname: str = "",
        timeout: float = 30,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a port inside the pod, with TLS of the caller's on top if asked for. Closing the writer
        ends it; so does `close`."""
        raise NotImplementedError
