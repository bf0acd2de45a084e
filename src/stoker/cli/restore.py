"""Restores a home from a copy. The server must be stopped; nothing in the home is deleted.

A copy is a directory (from `stoker backup create`) or a database file alone (an automatic copy). The database is
replaced as a whole and the old one moved aside. Files named by content or by run (blobs, logs, outputs) are only
added, because those in the home are the same or newer. The home's identity on clusters comes with the database,
because the pods of its runs bear the copy's identity.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import Conflict, NotFound, StokerError
from stoker.linux.descriptors import Closing
from stoker.settings import Home, Settings

if TYPE_CHECKING:
    from stoker.store.dialects.sqlite_copies import Contents

ADDED = ("blobs", "runs")


def restore(home: Home, copy: Path) -> dict[str, Any]:
    """`{"from", "runs", "made_at", "aside", "added", "missing"}`: how many runs it has, what was moved aside, how many
    files were added, and the runs that this home acknowledged and the copy does not have."""
    from stoker.store import Store, put_in_place  # lazy: SQLAlchemy takes its time
    from stoker.store.dialects import sqlite_copies as copies

    database = database_in(home, copy)
    inside = copies.contents(database)
    home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with server_locked_out(home):
        settings = Settings.load(home)
        aside = put_in_place(database, settings.database, aside=home.backups, lease=settings.server.lease)
        added = _add_files(home, copy) if copy.is_dir() else 0
        _copy_identity(home, copy)
        with Store.open(settings.database, create=False) as store:
            missing = store.missing_runs(_ledger(home, copy))
    return {
        "from": str(copy),
        "runs": None if inside is None else inside.runs,
        "made_at": database.stat().st_mtime,
        "aside": None if aside is None else str(aside),
        "added": added,
        "missing": missing,
    }


def database_in(home: Home, copy: Path) -> Path:
    candidate = copy / home.database.name if copy.is_dir() else copy
    if not candidate.is_file():
        raise NotFound(
            f"{str(copy)!r} is not a backup",
            hint="stoker backup list shows those of this home.",
            details={"what": "backup"},
        )
    return candidate


def best_first(home: Home) -> list[dict[str, Any]]:
    """The home's own copies in the order to restore them: the most runs first, then the newest. Leaves out copies that
    cannot be read, and databases that an earlier restore moved aside."""
    usable = [entry for entry in listed(home) if entry["runs"] is not None and entry["kind"] != "replaced"]
    return sorted(usable, key=lambda entry: (-entry["runs"], -entry["made_at"]))


def listed(home: Home) -> list[dict[str, Any]]:
    """Every copy in the home's own folder, newest first: `{"path", "kind", "made_at", "size", "runs"}`. `runs`: their
    number; None: the copy cannot be read."""
    from stoker.store.dialects import sqlite_copies as copies  # lazy: SQLAlchemy takes its time

    found = []
    for database in copies.beneath(home.backups):
        with contextlib.suppress(FileNotFoundError):  # the server has deleted it since it was listed
            found.append(_described(home, database, copies.contents(database)))
    return sorted(found, key=lambda entry: -float(str(entry["made_at"])))


def _described(home: Home, database: Path, inside: Contents | None) -> dict[str, Any]:
    whole = database.name == home.database.name and database.parent.parent == home.backups
    path = database.parent if whole else database
    return {
        "path": str(path),
        "kind": "whole" if whole else _kind(home, database),
        "made_at": path.stat().st_mtime,
        "size": _size(path) if whole else database.stat().st_size,
        "runs": None if inside is None else inside.runs,
    }


def _kind(home: Home, database: Path) -> str:
    if database.parent != home.backups:
        return "kept" if database.name.startswith("kept-") else "automatic"
    return "replaced" if database.name.startswith("replaced-") else "database"


@contextlib.contextmanager
def server_locked_out(home: Home) -> Iterator[None]:
    """Holds the lock that a server needs to start, so that no other command starts one meanwhile."""
    with Closing(os.open(home.server_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise Conflict("a server runs in this home", hint="Stop it first: stoker server stop") from exc
        yield


def _add_files(home: Home, copy: Path) -> int:
    added = 0
    for name in ADDED:
        source = copy / name
        for directory, _, files in os.walk(source):
            inside = Path(directory).relative_to(copy)
            for file in files:
                target = home.root / inside / file
                if target.exists() or (Path(directory) / file).is_symlink():
                    continue
                _put(Path(directory) / file, target)
                added += 1
    return added


def _copy_identity(home: Home, copy: Path) -> None:
    source = copy / home.identity.name
    if source.is_file() and not source.is_symlink():
        _put(source, home.identity)


def _put(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.restoring")
        shutil.copy2(source, temporary)
        temporary.replace(target)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise StokerError(
            f"cannot write {str(target)!r}: {reason}", hint="Make room and restore again."
        ) from exc


def _ledger(home: Home, copy: Path) -> list[bytes]:
    """What this home acknowledged; without its own ledger, what the copy acknowledged."""
    for path in (home.ledger, copy / home.ledger.name if copy.is_dir() else home.ledger):
        if path.is_file():
            return path.read_bytes().splitlines()
    return []


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
