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
    trouble: str = ""
    known: bool = False
    """The mirrored task had an order to run before."""


@dataclass
class _Link:
    uid: str
    directory: RemoteTaskDir
    mirror: Mirror
    ferry: Poller
    transport: Any
    sailing: asyncio.Task[None] | None = None
    since: float = 0.0


class Connections:
    """Belongs to one event loop. A connection, with all that has arrived, stays until its attempt is removed."""

    def __init__(self, cluster: Cluster, root: Path, changed: Callable[[Key], None]) -> None:
        self._cluster = cluster
        self._root = root
        self._changed = changed
        self._ways = Routes(cluster)
        self._pace = PollInterval()
        self._links: dict[Key, _Link] = {}
        self._boot_id = boot_id()
        self._found: set[Key] | None = None
        self._closing: set[asyncio.Future[None]] = set()

    def take(self, key: Key, pod: str, uid: str, secret: Object) -> RemoteTaskDir | None:
        """The directory in this pod; None if its Secret is damaged. The same pod gives the same directory again."""
        known = self._links.get(key)
        if known is not None and known.uid == uid:
            return known.directory
        found = credentials.read(secret)
        if found is None:
            return None
        if known is not None:
            self._dock(known)
        transport = self._ways.to(pod, found[1])
        mirror = Mirror(self.path(key), source=uid, boot_id=self._boot_id)
        shares = bool(self._cluster.config.checkpoints)
        loop = asyncio.get_running_loop()
        directory = RemoteTaskDir(Courier(found[0], transport), mirror, loop, shares=shares)
        ferry = Poller(directory, key, self._changed, pace=self._pace)
        self._links[key] = _Link(uid, directory, mirror, ferry, transport)
        return directory

    def sail(self, key: Key) -> None:
        """The courier is up: keep the mirror up to date."""
        link = self._links.get(key)
        if link is not None and link.sailing is None:
            link.since = time.monotonic()
            link.sailing = asyncio.create_task(link.ferry.run())

    def rest(self, key: Key) -> None:
        """The courier is gone: end polling. What has arrived stays."""
        link = self._links.get(key)
        if link is not None:
            link.directory.abandon("its pod has ended")
            self._dock(link)

    def directory(self, key: Key) -> RemoteTaskDir | None:
        link = self._links.get(key)
        return None if link is None else link.directory

    def contact(self, key: Key) -> Contact:
        link = self._links.get(key)
        if link is None or link.sailing is None:
            return Contact()
        last = link.ferry.last_contact
        since = link.since if last is None else max(last, link.since)
        return Contact(
            ever=last is not None,
            silence=time.monotonic() - since if link.ferry.trouble else 0.0,
            trouble=link.ferry.trouble,
            known=link.directory.order() is not None,
        )

    def path(self, key: Key) -> Path:
        run, attempt, task = key
        return self._root / run / str(attempt) / task

    def is_of(self, key: Key, uid: str) -> bool:
        """Whether this task's connection is to that pod."""
        link = self._links.get(key)
        return link is not None and link.uid == uid

    def known(self) -> list[Key]:
        """Tasks with a mirror on this machine, including those of earlier servers."""
        if self._found is None:
            self._found = set(_on_disk(self._root))
        return sorted(self._found | set(self._links))

    async def drop(self, run: str, attempt: int) -> None:
        """Delete the mirrors of an attempt."""
        for key in [key for key in self._links if key[:2] == (run, attempt)]:
            link = self._links.pop(key)
            await self._close(link)
            await asyncio.to_thread(link.mirror.drop)
        if self._found is not None:
            self._found = {key for key in self._found if key[:2] != (run, attempt)}
        path = self._root / run / str(attempt)
        await asyncio.to_thread(shutil.rmtree, path, True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    async def close(self) -> None:
        """Called when the server ends; mirrors stay."""
        await asyncio.gather(*(self._close(link) for link in self._links.values()))
        self._links.clear()
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    async def _close(self, link: _Link) -> None:
        sailing, link.sailing = link.sailing, None
        if sailing is not None:
            sailing.cancel()
            await asyncio.gather(sailing, return_exceptions=True)
        await link.transport.close()

    def _dock(self, link: _Link) -> None:
        closing = asyncio.ensure_future(self._close(link))
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
