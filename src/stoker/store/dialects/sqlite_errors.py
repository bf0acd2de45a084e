"""What errors of SQLite and of its file mean.

A database counts as damaged only where stored data cannot be read back. A file system that refuses writes (full,
read-only, a disk that reports errors) is reported as such: that transaction has not taken place, everything before it
has, and restoring an older copy would lose data.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from stoker import disks
from stoker.errors import Conflict, StokerError, StoreBusy, StoreDamaged, StoreError
from stoker.store.codec import RESTORE_HINT

FEW_BYTES = 1 << 20
"""With less than this free, an I/O error counts as a full disk."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_NO_ACCESS = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
_READING = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_IOERR_READ,
    sqlite3.SQLITE_IOERR_SHORT_READ,
    sqlite3.SQLITE_IOERR_CORRUPTFS,
    sqlite3.SQLITE_IOERR_DATA,
)
"""I/O errors that lose stored data. All others come from a write, a sync or a lock."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)


def is_busy(error: BaseException | None) -> bool:
    return _primary(_code(error)) in _BUSY


def translate(error: BaseException, path: Path) -> StokerError:
    """The meaning of a driver's error. `path`: the database."""
    code = _code(error)
    primary = _primary(code)
    if primary in _BUSY:
        return StoreBusy(
            f"{path} is locked by another process", hint="Try again; only one server may use a home."
        )
    if primary == sqlite3.SQLITE_CONSTRAINT:
        return Conflict(f"the database refused a change: {error}")
    if primary == sqlite3.SQLITE_FULL:
        return disks.full(path)
    if primary in _NO_ACCESS and (refused := _refused(error, code, path)):
        return refused
    if primary in _DAMAGED:
        return damage(path, str(error))
    # Errors without a code: text that is not UTF-8. The schema version was right, so no table can be missing.
    if "decode" in str(error) or "no such" in str(error):
        return damage(path, str(error))
    return StoreError(f"{path}: {error}")


def of_system(error: OSError, path: Path) -> StoreError:
    """The meaning of an operating system's error. `path`: the file."""
    if refused := disks.refusal(error, path):
        return refused
    if error.errno == errno.EIO:
        return _of_disk(str(error), path)
    named = error.filename or path
    return StoreError(f"cannot use {named}: {error.strerror}", hint=f"Check that {path.parent} is writable.")


def damage(path: Path, what: str) -> StoreDamaged:
    return StoreDamaged(f"the database {path} is damaged: {what}", hint=RESTORE_HINT)


def _refused(error: BaseException, code: int | None, path: Path) -> StoreError | None:
    """SQLite could not access its file. None: a read failed, so stored data may be lost."""
    primary = _primary(code)
    if disks.is_read_only(path):
        return disks.read_only(path)
    if code == sqlite3.SQLITE_READONLY_DBMOVED or (primary == sqlite3.SQLITE_CANTOPEN and _is_gone(path)):
        return damage(path, "the file is gone")
    if primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and disks.free(path) < FEW_BYTES:
        return disks.full(path)
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreError(f"cannot write to {path}: it is read-only", hint=f"Make {path.parent} writable.")
    if primary == sqlite3.SQLITE_CANTOPEN:
        return StoreError(f"cannot open {path}", hint=f"Check that {path.parent} exists and is writable.")
    return None if code in _READING else _of_disk(f"{error} ({_name(error)})", path)


def _of_disk(what: str, path: Path) -> StoreError:
    mount = disks.mount_of(path)
    return StoreError(
        f"the disk that holds {path} reports an error: {what}",
        hint=f"Acknowledged changes are still there. Repair the disk first (dmesg): {mount}.",
        details={"file_system": str(mount), "path": str(path)},
    )


def _name(error: BaseException) -> str:
    return str(getattr(error, "sqlite_errorname", "unknown"))


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _code(error: BaseException | None) -> int | None:
    return getattr(error, "sqlite_errorcode", None)


def _primary(code: int | None) -> int | None:
    return None if code is None else code & 0xFF
