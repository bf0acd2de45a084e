"""A cache of the trees that were read last.

A reader that wants many files of one tree sends a request per file, or per thousand files. Reading and checking the
manifest each time would cost the square of their number. A tree never changes under its digest, so the cached content
stays valid; whether the tree is still stored is checked each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from stoker.blobs.store import BlobStore
from stoker.spec.tree import Tree, TreeFile

ENTRIES = 250_000
"""Files of all cached trees, about 0.4 KB each. The tree read last is kept whatever its size."""


class Listing:
    """The files of one tree, without its links. Read only."""

    def __init__(self, tree: Tree) -> None:
        self.files: dict[str, TreeFile] = {file.path: file for file in tree.files if file.link is None}
        """By path, in the order of the tree."""
        self.sizes: dict[str, int] = tree.blobs()
        """By digest."""


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listing: Listing | None = None


class Listings:
    """May be used from any thread. One thread reads a tree that several want at once."""

    def __init__(self, blobs: BlobStore, entries: int = ENTRIES) -> None:
        self._blobs = blobs
        self._entries = entries
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Entry] = OrderedDict()
        """The least recently used one first."""

    def get(self, digest: str) -> Listing:
        """Raises what `BlobStore.tree` raises, NotFound also for a tree that was deleted since it was read."""
        with self._lock:
            entry = self._kept.setdefault(digest, _Entry())
            self._kept.move_to_end(digest)
        with entry.lock:
            if entry.listing is None or not self._blobs.has_tree(digest):
                entry.listing = None
                self._read(digest, entry)
            listing = entry.listing
        assert listing is not None
        self._trim()
        return listing

    def _read(self, digest: str, entry: _Entry) -> None:
        try:
            entry.listing = Listing(self._blobs.tree(digest))
        finally:
            if entry.listing is None:
                with self._lock:
                    self._kept.pop(digest, None)

    def _trim(self) -> None:
        with self._lock:
            count = sum(len(entry.listing.files) for entry in self._kept.values() if entry.listing)
            while count > self._entries and len(self._kept) > 1:
                _, entry = self._kept.popitem(last=False)
                count -= len(entry.listing.files) if entry.listing else 0
