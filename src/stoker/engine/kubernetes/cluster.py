"""One cluster as the engine sees it: a connection, and informers that mirror its objects.

All reads come from list-and-watch mirrors. A `Cluster` belongs to one event loop. It connects on first use, and again
after a failed try. If the user may not list nodes or other pods, these are not watched and the engine works without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.client import Kube
from stoker.engine.kubernetes.api.errors import KubeError
from stoker.engine.kubernetes.api.informer import Change, Informer, Select
from stoker.engine.kubernetes.api.kinds import Kind
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.errors import EngineUnavailable, StokerError

log = logging.getLogger(__name__)

Object = dict[str, Any]

MAX_SILENCE = 30.0
"""Seconds after which the last known state of a kind of object is too old to be used."""
_LISTED = 20.0
"""Seconds that the first lists may take before a call reports that the cluster does not respond."""


class Cluster:
    """`home`: the label value of this server's objects."""

    def __init__(self, name: str, config: ClusterConfig, home: str) -> None:
        self.name = name
        self.config = config
        self.home = home
        self._kube: Kube | None = None
        self._own: Informer | None = None
        self._shared: Informer | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._ours = Select(kinds.PODS, labels=f"{names.HOME}={home},{names.CLUSTER}={name}")
        self._secrets = Select(kinds.SECRETS, labels=self._ours.labels)
        self._events = Select(kinds.EVENTS, fields="involvedObject.kind=Pod")
        self._others = Select(
            kinds.PODS,
            "",
            labels=f"{names.HOME}!={home}",
            fields="spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed",
        )
        self._listeners: list[Callable[[Change], None]] = []
        self._readers: list[asyncio.Task[None]] = []
        self._events_of: dict[str, dict[str, Object]] = {}
        self.sees_nodes = self.sees_others = False
        """What this user may list."""

    @property
    def kube(self) -> Kube:
        assert self._kube is not None, "connect first"
        return self._kube

    @property
    def calls(self) -> dict[str, int]:
        """How often the API server was called, by verb and kind."""
        counted = self._kube.calls if self._kube is not None else {}
        return {f"{verb} {kind}": number for (verb, kind), number in counted.items()}

    @property
    def namespace(self) -> str:
        return self.kube.namespace

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call the listener with every change, in the event loop. To be called before the first `connect`."""
        self._listeners.append(listener)

    async def connect(self) -> None:
        """Connect and wait for the first lists. Raises EngineUnavailable with the reason; the next call tries again."""
        task = self._connecting
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(task)
        assert self._own is not None
        await self._own.ready(_LISTED)
        if self._shared is not None:
            await self._shared.ready(_LISTED)

    async def close(self) -> None:
        tasks = [task for task in (self._connecting, *self._readers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for cache in (self._own, self._shared):
            if cache is not None:
                await cache.close()
        if self._kube is not None:
            await self._kube.close()
        self._kube = self._own = self._shared = self._connecting = None
        self._readers.clear()

    async def may(self, verb: str, resource: str, subresource: str = "", *, namespace: str = "") -> bool:
        """Whether this user is allowed to; without a namespace: in the whole cluster."""
        attributes = {"verb": verb, "resource": resource, "subresource": subresource, "namespace": namespace}
        kind = kinds.ACCESS_REVIEWS
        body = {
            "apiVersion": kind.api,
            "kind": kind.name,
            "metadata": {},
            "spec": {"resourceAttributes": attributes},
        }
        try:
            answer = await self.kube.create(kind, body)
        except KubeError as exc:
            log.warning("%s: cannot ask what is allowed: %s", self.name, exc)
            return False
        return bool((answer.get("status") or {}).get("allowed"))

    # -- reading: never waits, raises EngineUnavailable where the answer would be stale ------------------------

    def pods(self) -> list[Object]:
        return self._mirror.list(self._ours)

    def pod(self, name: str) -> Object | None:
        return self._mirror.get(self._ours, name)

    def secrets(self) -> list[Object]:
        return self._mirror.list(self._secrets)

    def secret(self, name: str) -> Object | None:
        return self._mirror.get(self._secrets, name)

    def nodes(self) -> list[Object] | None:
        """None: nodes may not be listed."""
        return self._shared.list(kinds.NODES) if self._shared is not None and self.sees_nodes else None

    def node(self, name: str) -> Object | None:
        if not name or self._shared is None or not self.sees_nodes:
            return None
        return self._shared.get(kinds.NODES, name)

    def others(self) -> list[Object]:
        """Pods of others that have a node; empty if they may not be listed."""
        return self._shared.list(self._others) if self._shared is not None and self.sees_others else []

    def events(self, pod: Mapping[str, Any]) -> list[Object]:
        """The events of a pod, oldest first."""
        self._mirror.fresh()
        found = self._events_of.get(_uid(pod), {})
        return sorted(found.values(), key=_when)

    def note(self, kind: Kind, obj: Object) -> None:
        """Take over the object that a write returned."""
        select = self._ours if kind is kinds.PODS else self._secrets
        self._mirror.note(select, obj)

    @property
    def _mirror(self) -> Informer:
        if self._own is None:
            raise EngineUnavailable(f"{self.name}: not connected yet")
        return self._own

    # -- connecting ------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await self._open()
        except EngineUnavailable:
            raise
        except StokerError as exc:
            raise EngineUnavailable(f"{self.name}: {exc.message}", hint=exc.hint) from exc

    async def _open(self) -> None:
        if self._kube is not None:
            await self._kube.close()
        config = await asyncio.to_thread(load, self.config)
        self._kube = Kube.from_config(config)
        self.sees_nodes, self.sees_others = await asyncio.gather(
            self.may("list", "nodes"), self.may("list", "pods")
        )
        self._own = Informer(
            self._kube, [self._ours, self._secrets, self._events], max_silence=MAX_SILENCE, trim=_trimmed
        )
        around = [kinds.NODES] if self.sees_nodes else []
        selects: list[Select | Kind] = [*around, *([self._others] if self.sees_others else [])]
        if selects:
            self._shared = Informer(self._kube, selects, max_silence=MAX_SILENCE, trim=_trimmed)
        for cache in (self._own, self._shared):
            if cache is not None:
                self._readers.append(asyncio.create_task(self._read(cache.changes())))
                cache.start()

    async def _read(self, changes: AsyncIterator[Change]) -> None:
        async for change in changes:
            if change.kind is kinds.EVENTS:
                self._take_event(change)
            for listener in self._listeners:
                listener(change)

    def _take_event(self, change: Change) -> None:
        uid = str((change.object.get("involvedObject") or {}).get("uid", ""))
        found = self._events_of.setdefault(uid, {})
        if not change.deleted:
            found[change.name] = change.object
        else:
            found.pop(change.name, None)
        if not found:
            self._events_of.pop(uid, None)


def load(config: ClusterConfig) -> KubeConfig:
    """Credentials and address according to the cluster's settings. SpecError names the wrong file."""
    from dataclasses import replace

    found = KubeConfig.load(config.kubeconfig, config.context)
    return replace(found, namespace=config.namespace) if config.namespace else found


def _trimmed(obj: Object) -> Object:
    """Drop fields that are never read: of nodes the images, of pods of others all but their requests."""
    if obj.get("kind") == "Node":
        (obj.get("status") or {}).pop("images", None)
        return obj
    metadata = obj["metadata"]
    if obj.get("kind") != "Pod" or names.HOME in (metadata.get("labels") or {}):
        return obj
    spec = obj.get("spec") or {}
    kept = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in metadata}
    return {
        "kind": "Pod",
        "metadata": kept,
        "spec": {
            "nodeName": spec.get("nodeName"),
            "overhead": spec.get("overhead"),
            "resources": spec.get("resources"),
            "containers": [_sizes(one) for one in spec.get("containers") or ()],
            "initContainers": [_sizes(one) for one in spec.get("initContainers") or ()],
        },
        "status": {"phase": (obj.get("status") or {}).get("phase")},
    }


def _sizes(container: Mapping[str, Any]) -> Object:
    return {key: container[key] for key in ("resources", "restartPolicy") if key in container}


def _uid(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"].get("uid", ""))


def _when(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event.get("firstTimestamp")
        or ""
    )
