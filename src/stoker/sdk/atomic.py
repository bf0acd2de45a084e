"""Atomic writes: a file or a directory appears under its name complete or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from typing import Any, Callable, Mapping, Optional, Union

from stoker.task import formats

Data = Union[
    bytes,
    bytearray,
    memoryview,
    str,
    Mapping[str, Union[bytes, str]],
    "os.PathLike[str]",
    Callable[[str], Any],
]
"""Bytes, text, the files of a directory, a path to copy, or a function that writes to a given path."""

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def place(directory: str, name: str, data: Data, announce: Callable[[], None]) -> str:
    """Write `data` to `directory/name`: into a temporary directory first, then synced, then renamed.

    `announce` is called just after the rename. In the temporary directory the file has its final name, for functions that
    choose the format by the extension.
    """
    os.makedirs(directory, exist_ok=True)
    target = os.path.join(directory, name)
    temporary = os.path.join(directory, f".{name[:100]}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    os.mkdir(temporary)
    try:
        fresh = os.path.join(temporary, name)
        _write(fresh, data)
        if not os.path.exists(fresh):
            raise ValueError(
                f"the function given to save {name!r} wrote nothing to the path it was called with"
            )
        sync(fresh)
        swap(fresh, target)
        announce()
        formats.sync_directory(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(path: str, data: Data) -> None:
    if isinstance(data, (bytes, bytearray, memoryview)):
        with open(path, "wb") as file:
            file.write(data)
    elif isinstance(data, str):
        with open(path, "w", encoding="utf-8") as text:
            text.write(data)
    elif isinstance(data, Mapping):
        os.mkdir(path)
        for name, part in data.items():
            inner = os.path.join(path, _inner(name))
            os.makedirs(os.path.dirname(inner), exist_ok=True)
            _write(inner, part)
    elif isinstance(data, os.PathLike):
        if os.path.isdir(data):
            shutil.copytree(data, path)
        else:
            shutil.copyfile(data, path)
    elif callable(data):
        data(path)
    else:
        raise TypeError(
            f"cannot save {type(data).__name__}: give bytes, text, a dict of files, a Path, or a function that writes "
            "to the path it is called with"
        )


def _inner(name: str) -> str:
    if not name or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"not a path inside the checkpoint: {name!r}")
    return name


def sync(path: str) -> None:
    """Sync a file, or everything in a directory, to the disk."""
    if not os.path.isdir(path):
        _sync_file(path)
        return
    for directory, _, names in os.walk(path):
        for name in names:
            _sync_file(os.path.join(directory, name))
        formats.sync_directory(directory)


def _sync_file(path: str) -> None:
    if os.path.islink(path) or not os.path.isfile(path):
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def swap(fresh: str, target: str) -> None:
    """Put `fresh` in the place of `target`. What was there is left in the temporary directory, or removed."""
    try:
        os.replace(fresh, target)
        return
    except OSError:
        # A rename replaces neither a directory that is not empty, nor a file by a directory.
        if not os.path.lexists(target):
            raise
    if not _exchange(fresh, target):
        os.rename(target, fresh + ".old")
        os.rename(fresh, target)


def _exchange(one: str, two: str) -> bool:
    renameat2: Optional[Any] = None
    if sys.platform == "linux":
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two), _RENAME_EXCHANGE) == 0)
