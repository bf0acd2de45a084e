"""The server's connections to couriers: one task directory and one poller per pod."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.engine.change_feed import Key
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.courier_client import Courier, Mirror, Poller, PollInterval, RemoteTaskDir
from stoker.engine.kubernetes.courier_client.routes import Routes
from stoker.engine.kubernetes.manifests import credentials
from stoker.linux.process import boot_id
from stoker.task.formats import Order
from stoker.task.local_directory import LocalTaskDir

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Contact:
    """The state of the connection to a courier."""

    ever: bool = False
    """The courier has answered this server."""
    silence: float = 0.0
    """Seconds since the last answer, or since polling began. 0 while there is no failure: a courier that has nothing
    new does not answer at once."""
    problem: str = ""
    known: bool = False
    """The mirrored task had an order to run before."""


@dataclass
class _Connection:
    uid: str
    directory: RemoteTaskDir
    mirror: Mirror
    poller: Poller
    transport: Any
    polling: asyncio.Task[None] | None = None
    since: float = 0.0


class Connections:
    """Belongs to one event loop. A connection, with all that has arrived, stays until its attempt is removed."""

    def __init__(self, cluster: Cluster, root: Path, changed: Callable[[Key], None]) -> None:
        self._cluster = cluster
        self._root = root
        self._changed = changed
        self._routes = Routes(cluster)
        self._interval = PollInterval()
        self._connections: dict[Key, _Connection] = {}
        self._boot_id = boot_id()
        self._stored_keys: set[Key] | None = None
        self._closing: set[asyncio.Future[None]] = set()

    def connect(self, key: Key, pod: str, uid: str, secret: Object) -> RemoteTaskDir | None:
        """The directory in this pod; None if its Secret is damaged. The same pod gives the same directory again."""
        known = self._connections.get(key)
        if known is not None and known.uid == uid:
            return known.directory
        found = credentials.read(secret)
        if found is None:
            return None
        if known is not None:
            self._close_in_background(known)
        transport = self._routes.to(pod, found[1])
        mirror = Mirror(self.path(key), source=uid, boot_id=self._boot_id)
        shares = bool(self._cluster.config.checkpoints)
        loop = asyncio.get_running_loop()
        directory = RemoteTaskDir(Courier(found[0], transport), mirror, loop, shares=shares)
        poller = Poller(directory, key, self._changed, pace=self._interval)
        self._connections[key] = _Connection(uid, directory, mirror, poller, transport)
        return directory

    def start_polling(self, key: Key) -> None:
        """The courier is up: keep the mirror up to date."""
        connection = self._connections.get(key)
        if connection is not None and connection.polling is None:
            connection.since = time.monotonic()
            connection.polling = asyncio.create_task(connection.poller.run())

    def pod_ended(self, key: Key) -> None:
        """The courier is gone: end polling. What has arrived stays."""
        connection = self._connections.get(key)
        if connection is not None:
            connection.directory.abandon("its pod has ended")
            self._close_in_background(connection)

    def directory(self, key: Key) -> RemoteTaskDir | None:
        connection = self._connections.get(key)
        return None if connection is None else connection.directory

    def contact(self, key: Key) -> Contact:
        connection = self._connections.get(key)
        if connection is None or connection.polling is None:
            return Contact()
        last = connection.poller.last_contact
        since = connection.since if last is None else max(last, connection.since)
        return Contact(
            ever=last is not None,
            silence=time.monotonic() - since if connection.poller.problem else 0.0,
            problem=connection.poller.problem,
            known=connection.directory.order() is not None,
        )

    def path(self, key: Key) -> Path:
        run, attempt, task = key
        return self._root / run / str(attempt) / task

    def is_of(self, key: Key, uid: str) -> bool:
        """Whether this task's connection is to that pod."""
        connection = self._connections.get(key)
        return connection is not None and connection.uid == uid

    def known(self) -> list[Key]:
        """Tasks with a mirror on this machine, including those of earlier servers."""
        if self._stored_keys is None:
            self._stored_keys = set(_on_disk(self._root))
        return sorted(self._stored_keys | set(self._connections))

    async def drop(self, run: str, attempt: int) -> None:
        """Delete the mirrors of an attempt."""
        for key in [key for key in self._connections if key[:2] == (run, attempt)]:
            connection = self._connections.pop(key)
            await self._close(connection)
            await asyncio.to_thread(connection.mirror.drop)
        if self._stored_keys is not None:
            self._stored_keys = {key for key in self._stored_keys if key[:2] != (run, attempt)}
        path = self._root / run / str(attempt)
        await asyncio.to_thread(shutil.rmtree, path, True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    async def close(self) -> None:
        """Called when the server ends; mirrors stay."""
        await asyncio.gather(*(self._close(connection) for connection in self._connections.values()))
        self._connections.clear()
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    async def _close(self, connection: _Connection) -> None:
        polling, connection.polling = connection.polling, None
        if polling is not None:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        await connection.transport.close()

    def _close_in_background(self, connection: _Connection) -> None:
        closing = asyncio.ensure_future(self._close(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class NoAddress(LocalTaskDir):
    """The directory of a task of which nothing exists: never created, or removed."""

    def exists(self) -> bool:
        return False

    def write_order(self, order: Order) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such task", self.root)

    def write_secrets(self, values: Mapping[str, str]) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such task", self.root)


def _on_disk(root: Path) -> Iterator[Key]:
    for run in _directories(root):
        for attempt in _directories(run):
            if attempt.name.isdecimal():
                for task in _directories(attempt):
                    yield run.name, int(attempt.name), task.name


def _directories(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
