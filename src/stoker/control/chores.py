"""What has to be done now and then: copies of the database, bytes that nothing needs any more."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from stoker.blobs import BlobStore
from stoker.errors import StokerError
from stoker.settings import Settings
from stoker.store import Store

log = logging.getLogger(__name__)

_KEPT = 2
_FREE_EVERY = 15.0
"""Seconds between looks for checkpoints to free: a big one every minute must not fill the disk."""
_SWEEP_EVERY = 3600.0


async def backups(settings: Settings, store: Store) -> None:
    """Automatic copies of the database: what `backup restore` falls back to when nobody made one by hand."""
    while True:
        try:
            await asyncio.to_thread(_backup, settings.home.backups / "auto", store)
        except (StokerError, OSError) as exc:
            log.warning("automatic backup failed: %s", exc)
        await asyncio.sleep(settings.control.backup_every)


class Sweeper:
    """Frees the bytes of checkpoints that retention let go of. `dropped` belongs to the control loop's thread; what a
    server that died did not get to, the slow sweep over everything finds."""

    def __init__(self, store: Store, blobs: BlobStore) -> None:
        self._store = store
        self._blobs = blobs
        self.dropped: set[str] = set()
        """Trees of checkpoints that are not kept any more."""

    async def run(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_FREE_EVERY)
            try:
                if self.dropped:
                    trees, self.dropped = self.dropped, set()
                    self.dropped |= await asyncio.to_thread(self._free, trees)
                if time.monotonic() - last > _SWEEP_EVERY:
                    last = time.monotonic()
                    await asyncio.to_thread(lambda: self._blobs.collect(self._store.blob_roots()))
            except (StokerError, OSError) as exc:
                log.warning("sweeping blobs failed: %s", exc)

    def _free(self, trees: set[str]) -> set[str]:
        return self._blobs.discard(trees, self._store.blob_roots())[1]


def _backup(directory: Path, store: Store) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = directory / time.strftime("stoker-%Y%m%d-%H%M%S.db", time.gmtime())
    if target.exists():
        return
    store.backup(target)
    for old in sorted(directory.glob("stoker-*.db"))[:-_KEPT]:
        old.unlink(missing_ok=True)
