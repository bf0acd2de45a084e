"""Mark and sweep over the directories of a blob store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StokerError

GRACE = 24 * 3600.0
"""Seconds that an unreferenced blob is kept: longer than any upload, transfer or submit takes."""


@dataclass(frozen=True)
class Freed:
    blobs: int = 0
    bytes: int = 0


def collect(
    objects: Path,
    trees: Path,
    temporary: Path,
    members: Callable[[str], Iterable[str]],
    roots: set[str],
    grace: float,
) -> Freed:
    """Deletes what is referenced neither by `roots` nor by anything younger than `grace`. `members` gives the blobs
    of a tree; when it raises, nothing has been deleted yet."""
    oldest = time.time() - grace
    keep = set(roots)
    for name, path in _entries(trees):
        if name in roots or _stat(path)[1] >= oldest:
            keep.add(name)
            keep.update(members(name))
    blobs = size = 0
    for base in (objects, trees):
        for name, path in _entries(base):
            length, mtime = _stat(path)
            if name in keep or mtime >= oldest:
                continue
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                blobs += 1
                size += length
    _sweep(temporary, oldest)
    return Freed(blobs, size)


REST = "rest"
"""The kind of what no tree of any kind has."""


def usage(
    objects: Path,
    trees: Path,
    members: Callable[[str], Iterable[str]],
    kinds: Mapping[str, Iterable[str]],
) -> dict[str, int]:
    """Bytes of everything stored, each counted for the first kind with a tree that has it. A tree for which `members`
    raises has nothing but itself."""
    owner: dict[str, str] = {}
    for kind, names in kinds.items():
        for name in names:
            owner.setdefault(name, kind)
            # It is missing or damaged. Its runs report that when they need it; here it only counts as nothing.
            with contextlib.suppress(StokerError, OSError):
                for blob in members(name):
                    owner.setdefault(blob, kind)
    found = dict.fromkeys([*kinds, REST], 0)
    for base in (objects, trees):
        for name, path in _entries(base):
            found[owner.get(name, REST)] += _stat(path)[0]
    return found


def discard(
    objects: Path,
    trees: Path,
    members: Callable[[str], Iterable[str]],
    dropped: set[str],
    roots: set[str],
    grace: float,
) -> tuple[Freed, set[str]]:
    """Deletes these trees, and their blobs that no other tree has. What was used within `grace` seconds may be about
    to be referenced again and stays: its trees are returned, to be tried later."""
    oldest = time.time() - grace
    gone = {name for name in dropped if name not in roots}
    theirs = {name: set(members(name)) for name, _ in _entries(trees) if name in gone}
    shared: set[str] = set()
    candidates = set().union(*theirs.values())
    for name, _ in _entries(trees):
        if name not in gone and candidates:
            shared.update(candidates.intersection(members(name)))
    blobs = size = 0
    left = set()
    for tree, blobs_of in theirs.items():
        paths = [_path(objects, blob) for blob in blobs_of - shared]
        if (
            any(_stat(path)[1] >= oldest for path in paths if path.exists())
            or _stat(_path(trees, tree))[1] >= oldest
        ):
            left.add(tree)
            continue
        for path in [*paths, _path(trees, tree)]:
            length = _stat(path)[0]
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                blobs += 1
                size += length
    return Freed(blobs, size), left


def _entries(base: Path) -> Iterator[tuple[str, Path]]:
    """(digest, path) of everything stored. Files with other names are not the store's and are ignored."""
    for shard in _names(base):
        if len(shard) == 2:
            for rest in _names(base / shard):
                if len(rest) == 62:
                    yield shard + rest, base / shard / rest


def _path(base: Path, digest: str) -> Path:
    return base / digest[:2] / digest[2:]


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sweep(temporary: Path, oldest: float) -> None:
    for name in _names(temporary):
        if _stat(temporary / name)[1] < oldest:
            (temporary / name).unlink(missing_ok=True)


def _stat(path: Path) -> tuple[int, float]:
    """Size and modification time. A file that has vanished counts as fresh, so that nothing is done with it."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return 0, float("inf")
    return info.st_size, info.st_mtime
