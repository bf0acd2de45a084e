"""Builds a directory from contents that have arrived.

The tree consists of hard links to the verified files, so it needs no extra space. It gets its final name by one
rename.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from typing import Any, Dict, Iterator, Tuple

from stoker.courier.manifest import Entry, entries, plain
from stoker.courier.staging import HOME, TREE, Staging, slot_name, stage_of, subdirectory
from stoker.linux.descriptors import Closing
from stoker.task import formats
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import OPEN_DIRECTORY, occupied

_PLACED = f"{HOME}/placed"
_BLOCK = 1 << 20
_NO_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


class Incomplete(Exception):
    """Content of the manifest has not arrived."""


class TreePlacement:
    """May be used from any thread."""

    def __init__(self, directory: str, staging: Staging) -> None:
        self._local = LocalTaskDir(directory)
        self._staging = staging
        self._lock = threading.Lock()

    def settled(self, path: str, manifest: str, *, replace: bool) -> bool:
        """Whether there is nothing to do: this tree was placed and there was no order since, or the directory is not
        empty and must be kept."""
        folder, name = split(path)
        with self._staging.open(folder) as parent:
            return self._settled(parent, name, path, manifest, replace)

    def place(self, path: str, manifest: str, *, replace: bool) -> None:
        """Make the directory `path` hold exactly this tree, completely or not at all. Raises Incomplete, Malformed."""
        folder, name = split(path)
        trash = self._staging.trash(path)
        with self._lock, self._staging.open(folder) as parent:
            if self._settled(parent, name, path, manifest, replace):
                return
            with self._staging.slot(path, manifest) as here:
                trash.throw(here, TREE)
                os.mkdir(TREE, 0o755, dir_fd=here)
                with subdirectory(here, TREE) as root, _content(here, manifest) as source:
                    _build(entries(source), root, here)
                if replace:
                    trash.throw(parent, name)
                os.rename(TREE, name, src_dir_fd=here, dst_dir_fd=parent)
            self._record(parent, name, path, manifest)
            with self._staging.open(stage_of(self._staging.home(path))) as stage:
                trash.throw(stage, slot_name(path, manifest))
            trash.empty()

    def _settled(self, parent: int, name: str, path: str, manifest: str, replace: bool) -> bool:
        if not replace:
            return occupied(parent, name)
        return bool(self._recorded(path) == self._state(parent, name, manifest))

    def _record(self, parent: int, name: str, path: str, manifest: str) -> None:
        with (
            self._staging.open(_PLACED) as placed,
            Closing(formats.create(slot_name(path, ""), 0o600, dir_fd=placed)) as fd,
        ):
            formats.write_all(fd, json.dumps(self._state(parent, name, manifest)).encode())

    def _recorded(self, path: str) -> Any:
        try:
            return json.loads(self._local.read(f"{_PLACED}/{slot_name(path, '')}"))
        except (OSError, ValueError, RecursionError):
            return None

    def _state(self, parent: int, name: str, manifest: str) -> Dict[str, Any]:
        """The facts that stay equal while a placed tree is unchanged: its directory, and no order since."""
        try:
            inode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino
        except FileNotFoundError:
            inode = -1
        order = self._local.order()
        return {"manifest": manifest, "inode": inode, "order": order.seq if order is not None else 0}


def split(path: str) -> Tuple[str, str]:
    """Directory and name of a path that may be placed or discarded."""
    folder, _, name = path.rpartition("/")
    if not plain(path) or HOME in path.split("/")[:2]:
        raise UnsafePath(errno.EPERM, "not a path below the task directory", path)
    return folder, name


@contextlib.contextmanager
def _content(here: int, digest: str) -> Iterator[int]:
    try:
        fd = os.open(digest, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    except OSError as exc:
        raise Incomplete(f"the content {digest} has not arrived") from exc
    with Closing(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Incomplete(f"the content {digest} is not a regular file")
        yield fd


def _build(entries: Iterator[Entry], root: int, contents: int) -> None:
    """Entries are sorted, so those of one directory mostly follow each other: one directory is open at a time."""
    current, here = "", os.dup(root)
    try:
        for entry in entries:
            folder, _, name = entry.path.rpartition("/")
            if folder != current:
                os.close(here)
                here = -1
                here = _descend(root, folder)
                current = folder
            if entry.link is not None:
                os.symlink(entry.link, name, dir_fd=here)
            else:
                _put(entry, name, here, contents)
    finally:
        if here >= 0:
            os.close(here)


def _descend(root: int, folder: str) -> int:
    fd = os.dup(root)
    for part in folder.split("/") if folder else ():
        with Closing(fd):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=fd)
            child = os.open(part, OPEN_DIRECTORY, dir_fd=fd)
        fd = child
    return fd


def _put(entry: Entry, name: str, here: int, contents: int) -> None:
    """The first use of a content is a hard link to the verified file. Further uses are copies, so that a training that
    changes one of its files does not change another."""
    with _content(contents, entry.sha256) as source:
        info = os.fstat(source)
        if info.st_size != entry.size:
            raise Incomplete(
                f"the content of {entry.path!r} has {info.st_size} bytes instead of {entry.size}"
            )
        if info.st_nlink == 1 and _link(entry.sha256, name, contents, here):
            os.fchmod(source, entry.mode)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with Closing(os.open(name, flags, 0o600, dir_fd=here)) as target:
            _copy(source, target)
            os.fchmod(target, entry.mode)


def _link(digest: str, name: str, contents: int, here: int) -> bool:
    try:
        os.link(digest, name, src_dir_fd=contents, dst_dir_fd=here, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        return False
    return True


def _copy(source: int, target: int) -> None:
    done = 0
    while True:
        data = os.pread(source, _BLOCK, done)
        if not data:
            return
        formats.write_all(target, data)
        done += len(data)
