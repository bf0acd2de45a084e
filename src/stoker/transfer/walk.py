"""Walks a directory that user code owns.

It may hold a million entries, or directories nested without end. So one directory is open at a time, there is no
recursion, and every entry is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from stoker.errors import TooLarge
from stoker.task.safe_open import Found, TooMany, check_depth, look, reopen


def walk(
    root: int, *, max_entries: int, enters: Callable[[str], bool] = lambda path: True
) -> Iterator[Found]:
    """Every regular file and link beneath the directory `root` (a descriptor). TooLarge: more than `max_entries` entries
    of any kind, or deeper than MAX_DEPTH. `enters`: whether to look into a directory."""
    waiting = [""]
    seen = 0
    while waiting:
        prefix = waiting.pop()
        fd = reopen(root, prefix)
        if fd is None:
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    seen += 1
                    if seen > max_entries:
                        raise too_many(max_entries)
                    path = f"{prefix}/{entry.name}" if prefix else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if enters(path):
                            _check(path)
                            waiting.append(path)
                    elif (found := look(fd, entry.name, path)) is not None:
                        yield found
        finally:
            os.close(fd)


def too_many(max_entries: int) -> TooLarge:
    return TooLarge(f"more than {max_entries} entries", hint="Pack small files into one, or write fewer.")


def _check(path: str) -> None:
    try:
        check_depth(path)
    except TooMany as exc:
        raise TooLarge(str(exc)) from exc
