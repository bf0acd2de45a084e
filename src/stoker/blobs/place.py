"""Makes a directory from a tree.

The directory appears by one rename when it is complete, so a crash never leaves half a tree under its final name.
Nothing is a hard link: changes by training code never reach the store. Everything is opened relative to a directory
descriptor and without following links, so that a destination prepared by training code cannot lead elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable

from stoker.blobs.files import SMALL, Copier, hash_fd
from stoker.errors import BlobDamaged, NotFound, Refused
from stoker.linux.descriptors import Closing
from stoker.spec.tree import Tree, TreeFile
from stoker.task.formats import write_all

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

OpenBlob = Callable[[str], int]
"""digest -> a read descriptor; raises NotFound."""


def place_at(
    tree: Tree, parent: int, name: str, open_blob: OpenBlob, copier: Copier, *, verify: bool, replace: bool
) -> None:
    """Makes `name` in the directory `parent` (a descriptor) hold exactly `tree`, which has been validated.

    An empty directory of that name is replaced; one with content is refused unless `replace`.
    """
    if not replace and _occupied(parent, name):
        raise Refused(f"the destination {name!r} is not empty")
    partial = f".{name[:200]}.{secrets.token_hex(6)}.partial"
    os.mkdir(partial, 0o755, dir_fd=parent)
    try:
        with Closing(os.open(partial, _OPEN_DIRECTORY, dir_fd=parent)) as root:
            _fill(tree, root, open_blob, copier, verify)
        if replace:
            remove_at(parent, name)
        os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
    except (
        BaseException
    ):  # Whatever went wrong (a full disk, a damaged blob, an interrupt), nothing half-made stays behind.
        remove_at(parent, partial)
        raise


def remove_at(parent: int, name: str) -> None:
    """Deletes `name` in the directory `parent`, whatever it is, without following links. Absent is success."""
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        return
    shutil.rmtree(name, dir_fd=parent, ignore_errors=True)
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    # rmtree fails at directories without write permission; the owner can restore it.
    _make_writable(parent, name)
    shutil.rmtree(name, dir_fd=parent)


def _make_writable(parent: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.chmod(name, 0o700, dir_fd=parent)
    try:
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
    except OSError:
        return
    with Closing(fd):
        for _, names, _, here in os.fwalk(dir_fd=fd):
            for child in names:
                # Skips links among the directory names: fwalk does not descend into them.
                if not stat.S_ISLNK(os.stat(child, dir_fd=here, follow_symlinks=False).st_mode):
                    os.chmod(child, 0o700, dir_fd=here)


def _occupied(parent: int, name: str) -> bool:
    try:
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return False
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            return True
        raise
    with Closing(fd), os.scandir(fd) as entries:
        return next(entries, None) is not None


def _fill(tree: Tree, root: int, open_blob: OpenBlob, copier: Copier, verify: bool) -> None:
    """Files come sorted, so those of one directory mostly follow each other: one directory is open at a time."""
    made: set[str] = {""}
    current, here = "", os.dup(root)
    try:
        for file in tree.files:
            directory, _, name = file.path.rpartition("/")
            if directory != current:
                os.close(here)
                here = -1
                here = _descend(root, directory, made)
                current = directory
            if file.link is not None:
                os.symlink(file.link, name, dir_fd=here)
            else:
                _write(file, name, here, open_blob, copier, verify)
    finally:
        if here >= 0:
            os.close(here)


def _descend(root: int, directory: str, made: set[str]) -> int:
    """A descriptor of `directory` below root, created where needed."""
    fd = os.dup(root)
    path = ""
    for part in directory.split("/") if directory else ():
        path = f"{path}/{part}" if path else part
        with Closing(fd):
            if path not in made:
                os.mkdir(part, 0o755, dir_fd=fd)
                made.add(path)
            child = os.open(part, _OPEN_DIRECTORY, dir_fd=fd)
        fd = child
    return fd


def _write(file: TreeFile, name: str, here: int, open_blob: OpenBlob, copier: Copier, verify: bool) -> None:
    with Closing(open_blob(file.sha256)) as source:
        size = os.fstat(source).st_size
        if size != file.size:
            raise BlobDamaged(f"the stored content of {file.path!r} has {size} bytes instead of {file.size}")
        with Closing(os.open(name, _CREATE, file.mode, dir_fd=here)) as target:
            if size <= SMALL:
                data = os.pread(source, size, 0)
                damaged = verify and hashlib.sha256(data).hexdigest() != file.sha256
                write_all(target, data)
            else:
                copier.copy(source, target, size)
                damaged = verify and hash_fd(target)[0] != file.sha256
    if damaged:
        raise BlobDamaged(f"the stored content of {file.path!r} does not have its hash {file.sha256}")


def missing_blob(digest: str) -> NotFound:
    return NotFound(f"no blob {digest} is stored here")
