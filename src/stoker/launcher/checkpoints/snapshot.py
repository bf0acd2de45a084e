"""The entries of a checkpoint directory and the state of their files. What the names mean: `stoker.task.checkpoint_names`.

A checkpoint is one file, one directory, or a group of siblings with one stem, directly inside the checkpoint directory. Training
code owns that directory, so everything is opened beneath it, links are never followed and only regular files count.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from stoker.linux.descriptors import Closing
from stoker.task import checkpoint_names

MAX_FILES = 200_000
"""A checkpoint with more files is refused: no real writer makes one."""

_BEGINNING = 4096
"""Bytes by which text is told from what is none."""


class FileState(NamedTuple):
    """One file of a checkpoint, with the attributes that a write changes."""

    path: str
    """Relative to the checkpoint directory."""
    ino: int
    size: int
    mtime_ns: int
    mode: int


Signature = Tuple[FileState, ...]
State = Tuple[int, int, int]
"""Inode, size and modification time of a file."""


class TooMany(OSError):
    """More files than a checkpoint may have."""


def pointer(directory: str, unit: str, members: List[str]) -> Optional[Tuple[str, bytes]]:
    """The small file by which the framework finds a checkpoint, with content for this one: (name, content).

    The script's own file may name a newer checkpoint, or may not have been written before the script died.
    """
    if f"{unit}.index" in members and not re.search(r"[\"\\\n]", unit):
        text = f'model_checkpoint_path: "{unit}"\nall_model_checkpoint_paths: "{unit}"\n'
        return "checkpoint", text.encode("utf-8", "surrogateescape")
    if members != [unit] or not os.path.isdir(os.path.join(directory, unit)):
        return None
    if os.path.isfile(os.path.join(directory, "latest")):
        return "latest", unit.encode("utf-8", "surrogateescape")
    iteration = re.match(r"^iter_(\d+)$", unit)
    if iteration and os.path.isfile(os.path.join(directory, "latest_checkpointed_iteration.txt")):
        return "latest_checkpointed_iteration.txt", (iteration.group(1).lstrip("0") or "0").encode()
    return None


def snapshot(directory: str, members: Iterable[str]) -> Signature:
    """The present state of the regular files of these entries, without files that were removed meanwhile."""
    found: List[FileState] = []
    try:
        fd = open_directory(directory)
    except OSError as exc:
        # Scripts delete the directory and make it again. A link in its place is not followed.
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return ()
        raise
    with Closing(fd):
        for name in members:
            _collect(fd, name, name, found)
    found.sort()
    return tuple(found)


def counts(signature: Signature) -> bool:
    """Whether any file has content: empty files and directories are no checkpoint."""
    return any(member.size for member in signature)


def entries(directory: str) -> List[str]:
    """Names in a directory; none if it does not exist."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_pointer(directory: str, name: str) -> bool:
    """A text under one of the names of `POINTERS`, or a link. A directory of that name, or a file of other bytes than text, is
    a checkpoint like any other."""
    if name not in checkpoint_names.POINTERS:
        return False
    try:
        fd = os.open(
            os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return True
    with Closing(fd):
        kind = os.fstat(fd).st_mode
        if not stat.S_ISREG(kind):
            return not stat.S_ISDIR(kind)
        return b"\0" not in os.read(fd, _BEGINNING)


def units(directory: str, names: Iterable[str]) -> Dict[str, List[str]]:
    """Top-level entries by checkpoint, without those that only name one."""
    return checkpoint_names.group(name for name in names if not is_pointer(directory, name))


def states(directory: str, names: Iterable[str]) -> Dict[str, State]:
    """The state of each entry that is a regular file. A rename does not change it."""
    found: Dict[str, State] = {}
    for name in names:
        try:
            info = os.stat(os.path.join(directory, name), follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode):
            found[name] = (info.st_ino, info.st_size, info.st_mtime_ns)
    return found


def open_directory(path: str, dir_fd: Optional[int] = None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def open_file(root_fd: int, path: str) -> int:
    """A regular file beneath the directory, no component of whose path is a link."""
    fd, parts = os.dup(root_fd), path.split("/")
    try:
        for part in parts[:-1]:
            child = open_directory(part, dir_fd=fd)
            os.close(fd)
            fd = child
        opened = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EPERM, "not a regular file", path)
    return opened


def _collect(fd: int, name: str, path: str, found: List[FileState]) -> None:
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            if len(found) >= MAX_FILES:
                raise TooMany(errno.EFBIG, f"more than {MAX_FILES} files", path)
            found.append(
                FileState(path, info.st_ino, info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode))
            )
            return
        if not stat.S_ISDIR(info.st_mode):
            return
        child = open_directory(name, dir_fd=fd)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as exc:
        # The directory was replaced by a link between the two calls.
        if exc.errno == errno.ELOOP:
            return
        raise
    with Closing(child):
        for entry in os.listdir(child):
            if not checkpoint_names.is_unfinished(entry):
                _collect(child, entry, f"{path}/{entry}", found)
