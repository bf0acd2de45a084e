"""A blob store as tests look at it."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.blobs import BlobStore


def stored(blobs: BlobStore, kind: str = "objects") -> int:
    """How many blobs are stored, or with "trees" how many manifests."""
    return sum(path.is_file() for path in (blobs.root / kind).rglob("*"))


def place(
    blobs: BlobStore, tree: str, destination: Path, *, verify: bool = False, replace: bool = False
) -> None:
    parent = os.open(destination.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        blobs.place_at(tree, parent, destination.name, verify=verify, replace=replace)
    finally:
        os.close(parent)
