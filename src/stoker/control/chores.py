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
_SWEEP_EVERY = 600.0


async def backups(settings: Settings, store: Store) -> None:
    """Automatic copies of the database: what `backup restore` falls back to when nobody made one by hand."""
    while True:
        try:
            await asyncio.to_thread(_backup, settings.home.backups / "auto", store)
        except (StokerError, OSError) as exc:
            log.warning("automatic backup failed: %s", exc)
        await asyncio.sleep(settings.control.backup_every)


async def sweep(store: Store, blobs: BlobStore) -> None:
    """Free the bytes of checkpoints that retention let go of."""
    while True:
        await asyncio.sleep(_SWEEP_EVERY)
        try:
            await asyncio.to_thread(lambda: blobs.collect(store.blob_roots()))
        except (StokerError, OSError) as exc:
            log.warning("sweeping blobs failed: %s", exc)


def _backup(directory: Path, store: Store) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = directory / time.strftime("stoker-%Y%m%d-%H%M%S.db", time.gmtime())
    if target.exists():
        return
    store.backup(target)
    for old in sorted(directory.glob("stoker-*.db"))[:-_KEPT]:
        old.unlink(missing_ok=True)
