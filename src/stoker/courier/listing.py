"""Lists a directory with the hashes of its files, page by page.

Entries are sorted by name, directory by directory, so each page continues after the last entry of the previous one.
No state is kept between two pages.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any, Collection, Dict, Iterator, List, Optional, Tuple

from stoker.linux.descriptors import Closing
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import Found, TooMany, check_depth, look, open_beneath, reopen

PAGE = 512 << 10
"""Approximate bytes of JSON in a page."""
PAUSE = 5.0
"""Seconds of hashing after which a page ends with the current file."""
_BLOCK = 1 << 20


def page(
    directory: str, path: str, after: str, max_entries: int, skip: Collection[str] = ()
) -> Dict[str, Any]:
    """The entries after `after` ("" for the beginning): {"entries", "seen", "after"}; `after` is None at the end.
    Raises TooMany past `max_entries`, counted per page: the client adds up `seen`. `skip`: names of directories that are
    neither listed nor counted."""
    entries: List[Dict[str, Any]] = []
    try:
        root = open_beneath(directory, path)
    except FileNotFoundError:
        return {"entries": entries, "seen": 0, "after": None}
    local = LocalTaskDir(directory)
    seen, size, end = 0, 0, time.monotonic() + PAUSE
    with Closing(root):
        for found, name in _walk(root, after.split("/") if after else [], max_entries, skip):
            seen += 1
            if seen > max_entries:
                raise TooMany(f"more than {max_entries} entries")
            entry = _describe(local, path, found) if found is not None else None
            if entry is not None:
                entries.append(entry)
                size += len(name) + 150
            if size >= PAGE or time.monotonic() >= end:
                return {"entries": entries, "seen": seen, "after": name}
    return {"entries": entries, "seen": seen, "after": None}


def _walk(
    root: int, after: List[str], most: int, skip: Collection[str]
) -> Iterator[Tuple[Optional[Found], str]]:
    """All entries after a path, each with its own path; None for an entry that is neither a file nor a link."""
    waiting: List[Tuple[str, Iterator[str]]] = [("", iter(_names(root, "", after[:1], most)))]
    while waiting:
        prefix, names = waiting[-1]
        name = next(names, None)
        if name is None:
            waiting.pop()
            continue
        path = f"{prefix}/{name}" if prefix else name
        depth = len(waiting)
        resumed = after[:depth] == path.split("/")
        found, is_directory = _look(root, prefix, name, path)
        if is_directory and name in skip:
            continue
        if not resumed:
            yield found, path
        if is_directory:
            check_depth(path)
            from_here = after[depth : depth + 1] if resumed else []
            waiting.append((path, iter(_names(root, path, from_here, most))))


def _names(root: int, prefix: str, first: List[str], most: int) -> List[str]:
    """Sorted names in a directory, from `first` on (inclusive, because entries below it may be missing)."""
    fd = reopen(root, prefix)
    if fd is None:
        return []
    names = []
    with Closing(fd), os.scandir(fd) as entries:
        for count, entry in enumerate(entries, 1):
            if count > most:
                raise TooMany(f"more than {most} entries")
            if not first or entry.name >= first[0]:
                names.append(entry.name)
    return sorted(names)


def _look(root: int, prefix: str, name: str, path: str) -> Tuple[Optional[Found], bool]:
    fd = reopen(root, prefix)
    if fd is None:
        return None, False
    with Closing(fd):
        found = look(fd, name, path)
        return found, found is None and _is_directory(fd, name)


def _is_directory(fd: int, name: str) -> bool:
    try:
        child = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return False
    os.close(child)
    return True


def _describe(local: LocalTaskDir, folder: str, found: Found) -> Optional[Dict[str, Any]]:
    if found.link is not None:
        return {"path": found.path, "link": found.link}
    try:
        fd = local.open(f"{folder}/{found.path}" if folder else found.path)
    except (FileNotFoundError, UnsafePath):
        return None  # removed or replaced since it was listed
    with Closing(fd):
        digest, size = _hash(fd)
        info = os.fstat(fd)
        entry = {"path": found.path, "size": size, "mode": info.st_mode & 0o7777, "sha256": digest}
        return {**entry, "mtime": info.st_mtime}


def _hash(fd: int) -> Tuple[str, int]:
    digest = hashlib.sha256()
    done = 0
    while True:
        data = os.pread(fd, _BLOCK, done)
        if not data:
            return digest.hexdigest(), done
        digest.update(data)
        done += len(data)
