"""Periodic work: backups of the database, the trash, and the deletion of blobs that nothing refers to."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

from stoker.blobs import BlobStore
from stoker.blobs.collect import Freed
from stoker.control.trash import TRASH_FOR, Emptied, Trash
from stoker.errors import StokerError
from stoker.settings import Home, Settings
from stoker.store import Store, home_contents
from stoker.store.dialects import sqlite_copies as copies

log = logging.getLogger(__name__)

_FREE_EVERY = 15.0
"""Seconds between looks for dropped checkpoints: a big one every minute must not fill the disk."""
_SWEEP_EVERY = 3600.0
"""Seconds between sweeps over all blobs, and between looks into the trash."""


class Backups:
    """Automatic backups of the database: `backup restore` uses them if there is no manual one."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._every = settings.control.backup_every
        self._directory = settings.home.backups / "auto"
        self._store = store
        self._making = threading.Lock()
        self._damaged_copied = False
        """A copy was made after the database was found damaged or missing: nothing new will follow."""

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._make)
            await asyncio.sleep(self._every)

    def _make(self) -> None:
        """Make one copy, unless one is being made. When the database fails, sessions follow each other quickly, and a
        copy may outlive its session."""
        if self._damaged_copied or not self._making.acquire(blocking=False):
            return
        try:
            damaged = self._store.damaged is not None
            _backup(self._directory, self._store)
            self._damaged_copied = damaged
        except (StokerError, OSError) as exc:
            log.warning("automatic backup failed: %s", exc)
        finally:
            self._making.release()


class Sweeper:
    """Frees the blobs of checkpoints that retention dropped. `dropped` belongs to the control loop's thread. The hourly
    sweep over all blobs finds what a server that died left behind.

    The sweep deletes every blob that the database does not refer to. So it does nothing while the home has runs that
    the database does not know: they are `unknown` until an operator has them forgotten."""

    def __init__(self, store: Store, blobs: BlobStore, home: Home, dropped: set[str]) -> None:
        """`dropped`: trees of checkpoints that are not kept any more. Other parts of control add to it."""
        self._store = store
        self._blobs = blobs
        self._home = home
        self._dropped = dropped
        self._trash = Trash(store, blobs, home)
        self._emptying = asyncio.Lock()
        self.unknown: list[dict[str, Any]] = []
        """`{"id", "name"?, "t"?}` of each, as the last look found them. The list is replaced, never changed."""

    async def run(self) -> None:
        last = time.monotonic()
        emptied = -math.inf
        await self._look_guarded()
        while True:
            await asyncio.sleep(_FREE_EVERY)
            try:
                if self._dropped:
                    trees = set(self._dropped)
                    self._dropped -= trees
                    self._dropped |= await asyncio.to_thread(self._free, trees)
                if time.monotonic() - emptied > _SWEEP_EVERY:
                    emptied = time.monotonic()
                    await self.empty_trash(time.time() - TRASH_FOR)
                    await asyncio.to_thread(self._trash.tidy)
                if time.monotonic() - last > _SWEEP_EVERY:
                    last = time.monotonic()
                    await asyncio.to_thread(self.sweep)
            except (StokerError, OSError) as exc:
                log.warning("sweeping blobs failed: %s", exc)

    async def empty_trash(self, before: float) -> Emptied:
        """Delete for good the runs that were removed before this time. In the control loop's thread."""
        async with self._emptying:
            emptied = await asyncio.to_thread(self._trash.empty, before)
        self._dropped |= emptied.later
        return emptied

    async def _look_guarded(self) -> None:
        try:
            await asyncio.to_thread(self.look)
        except (StokerError, OSError) as exc:
            log.warning("cannot compare the database with the home: %s", exc)

    def look(self) -> list[dict[str, Any]]:
        """Find the runs of this home that the database does not know. Any thread may call it."""
        # The home first: a new run is in the database before it is anywhere in the home.
        claims = home_contents.claims(self._home)
        self.unknown = self._store.missing_runs(claims)
        return self.unknown

    def sweep(self) -> Freed | None:
        """None: nothing was swept, because the database does not know all runs of the home, or is empty."""
        if unknown := self.look():
            log.warning(
                "blobs are not swept: the database does not know %d run(s) of this home (%s, ...); "
                "restore a copy that does, or stoker backup forget",
                len(unknown), unknown[0]["id"],
            )  # fmt: skip
            return None
        if self._store.is_empty():
            return None
        return self._blobs.collect(self._store.blob_roots())

    def _free(self, trees: set[str]) -> set[str]:
        return self._blobs.discard(trees, self._store.blob_roots())[1]


def _backup(directory: Path, store: Store) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = directory / copies.name_of_new(time.time())
    if target.exists():
        return
    store.backup(target)
    if kept := copies.rotate(directory):
        log.info("%s holds runs that the newest copy does not, and is kept", kept)
