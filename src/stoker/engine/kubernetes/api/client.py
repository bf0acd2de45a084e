"""`Kube`: the Kubernetes API with plain dicts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Literal

from stoker.engine.kubernetes.api import streams
from stoker.engine.kubernetes.api.errors import KubeError
from stoker.engine.kubernetes.api.kinds import PODS, Kind, counted
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from stoker.engine.kubernetes.api.session import Answer, Call, Session
from stoker.engine.kubernetes.api.streams import Ended

Object = dict[str, Any]
Objects = list[Object]

PAGE = 500
"""Objects per request of a list."""
FIELD_MANAGER = "stoker"
_PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
_JSON = {"Content-Type": "application/json"}


class Kube:
    """One cluster, as one user. Belongs to one event loop; any number of coroutines may use it at once.

    Every call raises KubeError when the API server refused, and KubeUnavailable when there was no answer (after a
    bounded number of tries where a retry is harmless). `namespace=None` is the configured one, `""` (list and watch
    only) all of them. `timeout` is for the whole call, in seconds. The caller may keep or change returned objects.
    Create and patch are sent again only if the server said that they were not done. A delete whose
    connection broke is sent again once, because it has the same effect.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._forwards: set[asyncio.Task[None]] = set()

    @classmethod
    def from_config(cls, config: KubeConfig) -> Kube:
        """Does not connect yet; must be called inside the event loop."""
        return cls(Session(config))

    async def close(self) -> None:
        """End all requests, connections and forwards. May be called twice."""
        for task in self._forwards:
            task.cancel()
        await asyncio.gather(*self._forwards, return_exceptions=True)
        await self._session.close()

    @property
    def namespace(self) -> str:
        """The configured namespace."""
        return self._session.config.namespace

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """Requests sent, by (verb, kind): ("list", "pods"), ("proxy", "pods"). Every try and every page counts."""
        return self._session.calls

    async def version(self) -> str:
        """`v1.37.0`"""
        answer = await self._session.send(Call("get", "version", "GET", "/version"), timeout=30)
        return str(answer.json()["gitVersion"])

    # -- objects

    async def get(
        self, kind: Kind, name: str, namespace: str | None = None, *, timeout: float = 30
    ) -> Object:
        return await self._send("get", kind, "GET", self._path(kind, namespace, name), timeout=timeout)

    async def snapshot(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        trim: Callable[[Object], Object] | None = None,
        timeout: float = 60,
    ) -> tuple[Objects, str]:
        """All objects, read in pages, as of one moment, each with its `apiVersion` and `kind`; and the resource version
        from which a watch continues. `trim` is applied to each page."""
        path = self._path(kind, namespace)
        selectors = _selectors(labels, fields)
        params = {"limit": str(PAGE), **selectors}
        found: Objects = []
        until = time.monotonic() + timeout
        while True:
            left = max(0.1, until - time.monotonic())
            try:
                page = await self._send("list", kind, "GET", path, params=params, timeout=left)
            except KubeError as exc:
                if not exc.expired or "continue" not in params:
                    raise
                # The snapshot of the first page has expired: list again, without pages.
                params = selectors
                found.clear()
                continue
            for item in page.get("items") or ():
                item.update(apiVersion=kind.api, kind=kind.name)
                found.append(item if trim is None else trim(item))
            if not (more := page["metadata"].get("continue")):
                return found, str(page["metadata"]["resourceVersion"])
            params = {**params, "continue": more}

    async def create(
        self,
        kind: Kind,
        obj: Object,
        namespace: str | None = None,
        *,
        dry_run: bool = False,
        timeout: float = 30,
    ) -> Object:
        """KubeError with `.exists` if the name is taken. The namespace is the argument, the object's own, or the
        configured one, in this order."""
        params = {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        path = self._path(kind, _namespace(obj, namespace))
        return await self._send("create", kind, "POST", path, params=params, content=obj, timeout=timeout)

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
        params = {"fieldManager": FIELD_MANAGER, **({"force": "true"} if how == "apply" else {})}
        path = self._path(kind, namespace, name, subresource)
        headers = {"Content-Type": _PATCHES[how]}
        return await self._send(
            "patch", kind, "PATCH", path, params=params, content=patch, headers=headers, timeout=timeout
        )

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        grace: int | None = None,
        uid: str = "",
        timeout: float = 30,
    ) -> bool:
        """False: it does not exist (or, with `uid`, another object has the name). `grace` in seconds; 0 forces."""
        options: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid:
            options["preconditions"] = {"uid": uid}
        path = self._path(kind, namespace, name)
        try:
            await self._send("delete", kind, "DELETE", path, content=options, timeout=timeout)
        except KubeError as exc:
            if exc.absent or (uid and exc.conflict):
                return False
            raise
        return True

    async def watch(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        resource_version: str = "",
        labels: str = "",
        fields: str = "",
        timeout: float = 60,
    ) -> AsyncGenerator[tuple[str, Object]]:
        """("ADDED" | "MODIFIED" | "DELETED" | "BOOKMARK", object) until the server ends it after `timeout`.

        KubeError with `.expired` when `resource_version` is too old. KubeUnavailable when the connection is lost or
        nothing arrives for clearly longer than `timeout`. Close it (contextlib.aclosing) to release the connection at
        once. To keep a mirror up to date, use `Informer`."""
        seconds = max(1, int(timeout))
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
            **({"resourceVersion": resource_version} if resource_version else {}),
            **_selectors(labels, fields),
        }
        call = Call("watch", kind.plural, "GET", self._path(kind, namespace), params)
        async with (
            self._session.stream(call, idle=seconds + min(5, seconds / 4)) as reader,
            contextlib.aclosing(streams.events(reader, str(call))) as events,
        ):
            async for event in events:
                yield event

    # -- raw requests

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
        """Any status is returned as an answer and redirects are not followed. Nothing is sent twice, except after a
        401 with new credentials. `path` begins with `/` and is sent unchanged. TooLarge beyond `max_bytes`."""
        verb, kind = counted(method, path)
        sent = {"Accept-Encoding": "identity", **({} if json is None else _JSON), **(headers or {})}
        content = _dumped(json) if json is not None else body
        call = Call(verb, kind, method, path, params or {}, sent, content, max_bytes)
        return await self._session.raw(call, timeout=timeout)

    # -- containers

    async def logs(
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
    ) -> AsyncGenerator[bytes]:
        """Log data as it arrives. `since`: RFC 3339. `idle`: seconds without a byte until KubeUnavailable; None: 60,
        or no limit when following."""
        asked = {
            "container": container,
            "follow": "true" if follow else "",
            "previous": "true" if previous else "",
            "timestamps": "true" if timestamps else "",
            "sinceTime": since,
            "tailLines": "" if tail is None else str(tail),
            "limitBytes": "" if limit_bytes is None else str(limit_bytes),
        }
        params = {key: value for key, value in asked.items() if value}
        call = Call("log", "pods", "GET", self._path(PODS, namespace, pod, "log"), params)
        if idle is None and not follow:
            idle = 60
        async with self._session.stream(call, idle=idle) as reader:
            async for piece in reader.iter_any():
                yield piece

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
        """Run a command to its end. KubeError if it could not be started. KubeUnavailable if the result is not known;
        the command may then still run."""
        path = self._path(PODS, namespace, pod, "exec")
        return await streams.run(
            self._session, path, container, argv, stdin=stdin, timeout=timeout, max_bytes=max_bytes
        )

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
        """A connection to a port inside the pod, on request with the caller's TLS on top. Closing the writer ends it;
        so does `close`. It cannot be closed in one direction only. If nothing listens on the port, the first read
        returns the end of the stream."""

        def keep(task: asyncio.Task[None]) -> None:
            self._forwards.add(task)
            task.add_done_callback(self._forwards.discard)

        path = self._path(PODS, namespace, pod, "portforward")
        return await streams.forward(
            self._session, path, port, keep, tls=ssl, server_hostname=server_hostname, timeout=timeout
        )

    # -- helpers

    def _path(self, kind: Kind, namespace: str | None, name: str = "", subresource: str = "") -> str:
        return kind.path(self.namespace if namespace is None else namespace, name, subresource)

    async def _send(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: Any = None,
        headers: Mapping[str, str] = _JSON,
        timeout: float,
    ) -> Object:
        call = Call(
            verb,
            kind.plural,
            method,
            path,
            params or {},
            {"Accept": "application/json", **(headers if content is not None else {})},
            None if content is None else _dumped(content),
        )
        answer = (await self._session.send(call, timeout=timeout)).json()
        assert isinstance(answer, dict)
        return answer


def _dumped(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _namespace(obj: Object, namespace: str | None) -> str | None:
    return namespace if namespace is not None else obj["metadata"].get("namespace")


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {
        **({"labelSelector": labels} if labels else {}),
        **({"fieldSelector": fields} if fields else {}),
    }
