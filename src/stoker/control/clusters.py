"""The clusters of a server: adds, changes, shows and removes them. The database keeps their configurations."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stoker.control.fleet import ANY, LOCAL
from stoker.control.loop import ControlLoop
from stoker.engine.base import Engine, Shows
from stoker.errors import Conflict, NotFound, Refused, SpecError, StokerError
from stoker.store import Store
from stoker.store.rows import ClusterRow


class Backend(Protocol):
    """A kind of cluster: reads configurations and makes engines."""

    def make(self, name: str, config: Mapping[str, Any]) -> Engine:
        """Make an engine without connecting to the cluster. SpecError: the configuration is not valid."""
        ...

    def changed(self, config: Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
        """Apply each `key=value` to the configuration and return plain JSON. SpecError: a change is not valid."""
        ...


_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


class Clusters:
    """May be called from any thread. An acknowledged change is durable."""

    def __init__(self, store: Store, loop: ControlLoop, backend: Backend | None) -> None:
        self._store = store
        self._loop = loop
        self._backend_or_none = backend

    def engines(self) -> list[Engine]:
        """An engine for each cluster in the database."""
        if self._backend_or_none is None:
            return []
        return [self._backend_or_none.make(row.name, row.config) for row in self._store.clusters()]

    def add(self, name: str, config: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
        return self._put(name, self._backend.changed(config, changes), new=True)

    def change(self, name: str, changes: Sequence[str]) -> dict[str, Any]:
        return self._put(name, self._backend.changed(self.config(name), changes), new=False)

    @property
    def _backend(self) -> Backend:
        if self._backend_or_none is None:
            raise Refused("this server runs on its own machine only")
        return self._backend_or_none

    def _put(self, name: str, config: Mapping[str, Any], *, new: bool) -> dict[str, Any]:
        _check_name(name)
        known = {row.name for row in self._store.clusters()}
        if new and name in known:
            raise Conflict(
                f"there is a cluster {name!r} already",
                hint=f"`stoker cluster set {name} key=value` changes it.",
            )
        engine = self._backend.make(name, config)
        self._store.put_cluster(name, dict(config), time.time())
        self._loop.ask(lambda: self._loop.join(engine))
        return self.show(name)

    def remove(self, name: str) -> None:
        known = {row.name for row in self._store.clusters()}
        if name not in known:
            raise _unknown(name, known)
        self._loop.ask(lambda: self._loop.part(name))
        self._store.remove_cluster(name)

    def config(self, name: str) -> dict[str, Any]:
        rows = {row.name: row for row in self._store.clusters()}
        if name not in rows:
            raise _unknown(name, set(rows))
        return rows[name].config

    def show(self, name: str) -> dict[str, Any]:
        return next(found for found in self.every() if found["name"] == name)

    def every(self) -> list[dict[str, Any]]:
        rows = {row.name: row for row in self._store.clusters()}

        async def look() -> list[dict[str, Any]]:
            return [self._view(name, rows.get(name)) for name in self._loop.context.fleet.names]

        return self._loop.ask(look)

    def check(self, name: str) -> list[dict[str, Any]]:
        """The results of the engine's checks, each with a hint."""

        async def look() -> list[dict[str, Any]]:
            engine = self._loop.context.fleet.member(name).engine
            if not isinstance(engine, Shows):
                return [{"name": "reachable", "ok": True, "text": "this machine", "hint": ""}]
            return [dict(found) for found in await engine.check()]

        return self._loop.ask(look, timeout=120.0)

    def _view(self, name: str, row: ClusterRow | None) -> dict[str, Any]:
        member = self._loop.context.fleet.member(name)
        nodes = member.nodes
        return {
            "name": name,
            "default": name == self._loop.context.fleet.default,
            "reachable": member.known and member.trouble is None,
            "trouble": member.trouble,
            "nodes": len(nodes),
            "ready": sum(node.ready for node in nodes),
            "cpu": sum(node.cpu for node in nodes),
            "memory": sum(node.memory for node in nodes),
            "gpus": sum(len(node.gpus) for node in nodes),
            "runs": sum(
                live.attempt is not None and live.engine == name for live in self._loop.context.runs.values()
            ),
            "calls": dict(getattr(member.engine, "calls", {})),
            "config": dict(row.config) if row else {},
        }


def _check_name(name: str) -> None:
    if name in (LOCAL, ANY):
        raise SpecError(f"a cluster cannot be called {name!r}", hint="The name is reserved.")
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name[:60]!r} cannot be a cluster's name",
            hint="Small letters, digits and dashes, at most 40 of them, such as `gpu-prod`.",
        )


def _unknown(name: str, known: set[str]) -> StokerError:
    there = ", ".join(sorted(known)) or "none yet"
    return NotFound(f"no cluster {name[:60]!r}", hint=f"There are: {there}.")
