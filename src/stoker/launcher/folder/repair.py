"""Changes the working folder after a violent death: puts a version back, or sets a torn file aside. Both may be repeated."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

from stoker.launcher.checkpoints import stager
from stoker.launcher.folder import listing, units
from stoker.launcher.folder.versions import Version

_TEMPORARY = ".stoker-returns.tmp"


def put_back(root: str, version: Version, source: str) -> bool:
    """Replace each file of a unit by that of the version, in one step each. `source`: the version's directory. Returns whether
    every file is a link to the version's. Raises OSError, with the remaining files unchanged."""
    linked = True
    for path, ino, *_ in version.files:
        above, name = units.parent_of(path), path.rpartition("/")[2]
        with listing.beneath(root, above, create=True) as parent:
            there = listing.state_of(parent, name)
            if there is not None and there.ino == ino:
                continue
            linked = _replace(os.path.join(source, path), parent, name) and linked
    return linked


def set_aside(root: str, path: str) -> bool:
    """Rename a file or directory to `NAME.torn`; an earlier one of that name is removed. Whether the torn one is away."""
    try:
        with listing.beneath(root, units.parent_of(path)) as parent:
            name = os.path.join(parent, path.rpartition("/")[2])
            if os.path.lexists(name):
                _remove(name + units.TORN)
                os.rename(name, name + units.TORN)
            return os.path.lexists(name + units.TORN)
    except OSError:
        return False


def _replace(source: str, parent: str, name: str) -> bool:
    """Whether the file is now a link; where that is not possible it is a copy."""
    temporary = os.path.join(parent, _TEMPORARY)
    _remove(temporary)
    try:
        os.link(source, temporary, follow_symlinks=False)
        linked = True
    except OSError:
        _copy(source, temporary)
        linked = False
    target = os.path.join(parent, name)
    try:
        os.replace(temporary, target)
    except IsADirectoryError:
        _remove(target)
        os.replace(temporary, target)
    return linked


def _copy(source: str, target: str) -> None:
    try:
        with open(source, "rb") as file, open(target, "xb") as copy:
            if not stager.reflink(file.fileno(), copy.fileno()):
                shutil.copyfileobj(file, copy, 1 << 20)
            info = os.fstat(file.fileno())
            os.fchmod(copy.fileno(), stat.S_IMODE(info.st_mode))
        os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(target)
        raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:
        shutil.rmtree(path)
