"""`Informer`: mirrors of a cluster's objects of some kinds, kept up to date by list and watch.

A silent watch may be healthy or dead; the client cannot tell. So each watch asks the server to end it after a while.
A mirror counts as up to date at moments that prove it: a list, an event, a bookmark, the watch's regular end. When the
last proof is too old, reading raises. A watch that does not end in time counts as broken, and the kind is listed again.
Behind a proxy that blocks watches the mirror is therefore updated by slow polling, and never returns stale data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker.engine.kubernetes.api.client import Kube, Object, Objects
from stoker.engine.kubernetes.api.errors import KubeError, KubeUnavailable, Stalled
from stoker.engine.kubernetes.api.kinds import Kind
from stoker.errors import EngineUnavailable, StokerError

log = logging.getLogger(__name__)

FIRST_WAIT: Final = 0.25
MAX_WAIT: Final = 5.0
"""Seconds between tries after failures: the first pause and the longest (each with jitter)."""

Key = tuple[str, str]
"""namespace, name"""


@dataclass(frozen=True)
class Select:
    """A selection of objects of one kind. Each has one list and one watch."""

    kind: Kind
    namespace: str | None = None
    """None: the configured namespace; "": all"""
    labels: str = ""
    fields: str = ""

    def __str__(self) -> str:
        return str(self.kind)


@dataclass(frozen=True)
class Change:
    select: Select
    namespace: str
    name: str
    object: Object
    """Its current state; the last one if `deleted`."""
    deleted: bool = False

    @property
    def kind(self) -> Kind:
        return self.select.kind


class Informer:
    """A mirror of each of `selects`. Belongs to one event loop.

    Reading never waits. It raises EngineUnavailable before the first list has arrived, and when there was no contact
    for that kind for `max_silence` seconds. It never returns an empty or stale answer instead. Returned objects are
    shared: read only. A kind that is selected only once may be named by its `Kind`, otherwise name the `Select`.
    """

    def __init__(
        self,
        kube: Kube,
        selects: Iterable[Select | Kind],
        *,
        max_silence: float = 30.0,
        trim: Callable[[Object], Object] | None = None,
    ) -> None:
        """`trim` may drop unused fields from each object (managedFields are always dropped)."""
        self._readers: weakref.WeakSet[Changes] = weakref.WeakSet()
        self._mirrors = {
            select: _Mirror(kube, select, max_silence, trim, self._notify)
            for select in (Select(item) if isinstance(item, Kind) else item for item in selects)
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start watching; inside the event loop, once."""
        self._tasks = [asyncio.create_task(mirror.run()) for mirror in self._mirrors.values()]

    async def close(self) -> None:
        """End the watches and the iterators from `changes`; no task is left running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reader in list(self._readers):
            reader.close()

    async def ready(self, timeout: float = 60) -> None:
        """Wait until every kind has been listed. EngineUnavailable, with the reason, after `timeout`."""
        try:
            async with asyncio.timeout(timeout):
                for mirror in self._mirrors.values():
                    await mirror.listed.wait()
        except TimeoutError:
            raise EngineUnavailable(self.problem() or f"nothing was heard within {timeout:g} s") from None

    def fresh(self, kind: Kind | Select | None = None) -> bool:
        """Whether reading (all kinds, or one) returns data now."""
        return all(mirror.fresh() for mirror in self._chosen(kind))

    def problem(self, kind: Kind | Select | None = None) -> str:
        """Why reading fails, or why the last try failed; "" if there is no problem."""
        return next((mirror.problem for mirror in self._chosen(kind) if mirror.problem), "")

    def get(self, kind: Kind | Select, name: str, namespace: str | None = None) -> Object | None:
        return self._one(kind).get(name, namespace)

    def list(self, kind: Kind | Select, labels: Mapping[str, str] | None = None) -> Objects:
        """The objects whose labels have all of these values."""
        found = self._one(kind).all()
        if not labels:
            return list(found)
        wanted = labels.items()
        return [obj for obj in found if wanted <= (obj["metadata"].get("labels") or {}).items()]

    def note(self, kind: Kind | Select, obj: Object) -> None:
        """Add the object that a write returned, so that it is visible before the watch delivers it. An older version
        is ignored."""
        self._one(kind).note(obj)

    def changes(self) -> Changes:
        """Changes from now on, each object queued at most once. After an outage, objects that vanished meanwhile are
        reported as deleted. Ends with `close`."""
        reader = Changes()
        self._readers.add(reader)
        return reader

    def _notify(self, change: Change) -> None:
        for reader in self._readers:
            reader.put(change)

    def _one(self, kind: Kind | Select) -> _Mirror:
        mirrors = list(self._chosen(kind))
        if len(mirrors) != 1:
            raise ValueError(f"{kind}: selected {len(mirrors)} times; name the Select")
        return mirrors[0]

    def _chosen(self, kind: Kind | Select | None) -> Iterator[_Mirror]:
        for select, mirror in self._mirrors.items():
            if kind is None or kind == select or kind == select.kind:
                yield mirror


class Changes:
    """Read by one coroutine. An object that changes again while it is queued is reported once, in its last state."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Select, str, str, bool], Change] = {}
        self._event = asyncio.Event()
        self._closed = False

    def put(self, change: Change) -> None:
        # A deletion is queued separately from, and before, a change of a new object with the same name.
        where = (change.select, change.namespace, change.name)
        if change.deleted:
            self._waiting.pop((*where, False), None)
        self._waiting[(*where, change.deleted)] = change
        self._event.set()

    def close(self) -> None:
        self._closed = True
        self._event.set()

    def __aiter__(self) -> AsyncIterator[Change]:
        return self

    async def __anext__(self) -> Change:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._event.clear()
            await self._event.wait()
        return self._waiting.pop(next(iter(self._waiting)))


class _Mirror:
    """One select: its objects, and the loop that keeps them up to date."""

    def __init__(
        self,
        kube: Kube,
        select: Select,
        max_silence: float,
        trim: Callable[[Object], Object] | None,
        notify: Callable[[Change], None],
    ) -> None:
        self._kube = kube
        self._select = select
        self._max_silence = max_silence
        self._trim = trim
        self._notify = notify
        self._objects: dict[Key, Object] = {}
        self._version = ""
        """From where the next watch continues; "": list first."""
        self._last_contact = float("-inf")
        self.listed = asyncio.Event()
        self.problem = ""

    # -- reading

    def fresh(self) -> bool:
        return _now() - self._last_contact <= self._max_silence

    def get(self, name: str, namespace: str | None) -> Object | None:
        self._check()
        return self._objects.get((self._namespace(namespace), name))

    def all(self) -> Iterable[Object]:
        self._check()
        return self._objects.values()

    def note(self, obj: Object) -> None:
        if self._version and _newer(_version(obj), self._version):
            self._put(self._trimmed({**obj, "metadata": dict(obj["metadata"])}))

    def _check(self) -> None:
        if not self.fresh():
            silence = f"nothing was heard of its {self._select} for {self._max_silence:g} s"
            if not self.listed.is_set():
                silence = f"its {self._select} have not been listed yet"
            raise EngineUnavailable(f"{silence}{f': {self.problem}' if self.problem else ''}")

    def _namespace(self, namespace: str | None) -> str:
        if not self._select.kind.namespaced:
            return ""
        return namespace or self._select.namespace or self._kube.namespace

    # -- keeping up

    async def run(self) -> None:
        failures = 0
        while True:
            began = _now()
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                problem = ""
            except StokerError as exc:
                problem = exc.message
                self._lost(exc)
            except Exception as exc:  # of `trim`, or an unexpected object: keep watching this kind
                log.exception("watching %s", self._select)
                problem, self._version = f"{type(exc).__name__}: {exc}", ""
            failures = failures + 1 if self._last_contact < began or _now() - began < 1 else 0
            if problem and problem != self.problem:
                log.warning("watching %s: %s", self._select, problem)
            self.problem = problem
            if failures:
                await asyncio.sleep(min(MAX_WAIT, FIRST_WAIT * 2 ** (failures - 1)) * random.uniform(0.5, 1))

    def _lost(self, exc: StokerError) -> None:
        """After a lost connection continue from the last version. List again when that version has expired, or when
        the server responds but its watch delivers nothing."""
        if isinstance(exc, (KubeError, Stalled)) or not isinstance(exc, KubeUnavailable):
            self._version = ""

    async def _list(self) -> None:
        select = self._select
        found, version = await self._kube.snapshot(
            select.kind,
            select.namespace,
            labels=select.labels,
            fields=select.fields,
            trim=self._trimmed,
        )
        before, self._objects = self._objects, {}
        for obj in found:
            key = _key(obj)
            old = before.pop(key, None)
            self._objects[key] = obj
            if old is None or _version(old) != _version(obj):
                self._changed(old, obj)
        for obj in before.values():
            self._changed(obj, None)
        self._version = version
        self._record_contact()
        self.listed.set()

    async def _watch(self) -> None:
        select = self._select
        watch = self._kube.watch(
            select.kind,
            select.namespace,
            resource_version=self._version,
            labels=select.labels,
            fields=select.fields,
            timeout=self._max_silence * random.uniform(0.5, 0.7),
        )
        async with contextlib.aclosing(watch) as events:
            async for name, obj in events:
                if name == "DELETED":
                    self._drop(obj)
                elif name != "BOOKMARK":
                    self._put(self._trimmed(obj))
                self._version = _version(obj)
                self._record_contact()
        self._record_contact()

    def _record_contact(self) -> None:
        self._last_contact = _now()
        self.problem = ""

    def _put(self, obj: Object) -> None:
        key = _key(obj)
        old = self._objects.get(key)
        if old is not None and (_version(old) == _version(obj) or _newer(_version(old), _version(obj))):
            return
        self._objects[key] = obj
        self._changed(old, obj)

    def _drop(self, obj: Object) -> None:
        old = self._objects.get(_key(obj))
        if old is not None and _uid(old) == _uid(obj):
            del self._objects[_key(obj)]
            self._changed(self._trimmed(obj), None)

    def _changed(self, old: Object | None, new: Object | None) -> None:
        if old is not None and (new is None or _uid(new) != _uid(old)):
            self._notify(Change(self._select, *_key(old), old, deleted=True))
        if new is not None:
            self._notify(Change(self._select, *_key(new), new))

    def _trimmed(self, obj: Object) -> Object:
        obj["metadata"].pop("managedFields", None)
        kept: Object = _shared(obj if self._trim is None else self._trim(obj))
        return kept


def _shared(value: Any) -> Any:
    """The value with each short string interned, which halves the memory of a pod."""
    if type(value) is dict:
        return {sys.intern(key): _shared(item) for key, item in value.items()}
    if type(value) is list:
        return [_shared(item) for item in value]
    return sys.intern(value) if type(value) is str and len(value) < 64 else value


def _key(obj: Object) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid", ""))


def _newer(version: str, than: str) -> bool:
    """Versions are numbers on all current API servers. Where they are not, no version is newer than another."""
    return version.isdigit() and than.isdigit() and int(version) > int(than)


def _now() -> float:
    """A clock that runs while the machine sleeps, where there is one: after a sleep all data counts as old."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
