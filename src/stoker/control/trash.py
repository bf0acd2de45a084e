"""Empties the trash: rows, logs and blobs of runs that were removed some time ago."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from stoker import disks
from stoker.blobs import BlobStore
from stoker.errors import StokerError
from stoker.settings import Home
from stoker.store import Store

log = logging.getLogger(__name__)

TRASH_FOR = 7 * 86400.0
"""Seconds for which a removed run can be brought back."""


@dataclass(frozen=True)
class Emptied:
    runs: list[str]
    held: list[str]
    """Removed runs that stay for now: an engine still holds something of them."""
    bytes: int
    """What was freed of the disk."""
    later: set[str]
    """Trees that were used a moment ago: to be freed when they were left alone for a while."""


class Trash:
    """Blocks; any thread, one at a time. The rows go first: what a crash leaves of the files after that is found by the
    hourly sweep of the blobs, and by `tidy`."""

    def __init__(self, store: Store, blobs: BlobStore, home: Home) -> None:
        self._store = store
        self._blobs = blobs
        self._home = home

    def empty(self, before: float) -> Emptied:
        """Delete for good what was removed before this time."""
        expired, held = self._store.expired(before)
        runs, trees, freed = [], set(), 0
        for run in expired:
            found = self._store.purge(run, before)
            if found is not None:
                runs.append(run)
                trees |= found
                freed += self._delete(self._home.runs / run)
        if not trees:
            return Emptied(runs, held, freed, set())
        try:
            gone, later = self._blobs.discard(trees, self._store.blob_roots())
        except (StokerError, OSError) as exc:
            log.warning("the blobs of %d purged run(s) are left to the sweep: %s", len(runs), exc)
            return Emptied(runs, held, freed, set())
        return Emptied(runs, held, freed + gone.bytes, later)

    def tidy(self) -> None:
        """Delete the logs of runs whose rows are deleted already."""
        try:
            names = [path.name for path in self._home.runs.iterdir()]
        except FileNotFoundError:
            return
        for run in self._store.purged(names):
            self._delete(self._home.runs / run)

    def _delete(self, directory: Path) -> int:
        size = disks.used(directory)
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            return 0
        except OSError as exc:
            log.warning("%s of a purged run is not deleted yet: %s", directory, exc)
            return 0
        return size
