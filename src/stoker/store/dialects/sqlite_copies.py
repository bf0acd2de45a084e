"""Copies of the database as files: what is in them, which one to restore, which ones to delete.

The row of a run is never deleted from a database, not even when the trash is emptied, so the copy with the most runs has
the longest history. A newer copy with fewer runs is of a home that has lost something: it must not replace the better one.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from stoker.store.dialects import sqlite_files as files

AUTOMATIC = "stoker-*.db"
KEPT = "kept-*.db"
"""A copy that holds runs which the newest copy does not."""
_KEEP = 2


@dataclass(frozen=True)
class Contents:
    runs: int
    newest: float | None
    """When the last of its runs was submitted."""
    made_at: float = field(default=0.0, compare=False)


def contents(path: Path) -> Contents | None:
    """None: the file cannot be read as a copy of a database."""
    try:
        with contextlib.closing(_open(path)) as connection:
            runs, newest = connection.execute("SELECT count(*), max(created_at) FROM runs").fetchone()
            made_at = path.stat().st_mtime
            return Contents(int(runs), None if newest is None else float(newest), made_at)
    except (sqlite3.Error, OSError, UnicodeDecodeError, ValueError, TypeError):
        # A file that cannot be read, for whatever reason, is no copy.
        return None


def beneath(backups: Path) -> list[Path]:
    """Every copy below it: files, automatic copies, and those within copies of a whole home."""
    return [
        path
        for pattern in ("*.db", "auto/*.db", "*/stoker.db")
        for path in backups.glob(pattern)
        if path.is_file()
    ]


def name_of_new(now: float) -> str:
    return time.strftime("stoker-%Y%m%d-%H%M%S.db", time.gmtime(now))


def rotate(directory: Path) -> Path | None:
    """Keeps the newest automatic copies. Keeps also the one with the most runs among those that hold runs which the
    newest does not, and returns its path. A copy that cannot be read counts as empty. While the newest cannot be read,
    none is removed: a server without file descriptors can read no copy at all."""
    made = sorted(directory.glob(AUTOMATIC))
    if not made or contents(made[-1]) is None:
        return None
    newest, older = made[-1], made[:-_KEEP]
    fuller = [path for path in (*directory.glob(KEPT), *older) if holds_others(path, newest)]
    best = max(fuller, key=_order, default=None)
    if best is not None and best in older:
        kept = directory / best.name.replace("stoker-", "kept-", 1)
        best.replace(kept)
        files.sync_name(kept)
        best = kept
    for path in (*directory.glob(KEPT), *older):
        if path != best:
            path.unlink(missing_ok=True)
    return best


def holds_others(copy: Path, than: Path) -> bool:
    """Whether it holds runs that the other copy does not."""
    there, here = _ids(copy), _ids(than)
    return bool(there) and not there <= here


def best_first(paths: Sequence[Path]) -> list[tuple[Path, Contents]]:
    """The readable copies: the most runs first, then the newest."""
    found = [(path, inside) for path in paths if (inside := contents(path)) is not None]
    return sorted(found, key=lambda one: (one[1].runs, one[1].made_at), reverse=True)


def _order(path: Path) -> tuple[int, str]:
    inside = contents(path)
    return (inside.runs if inside is not None else 0, path.name.partition("-")[2])


def _ids(path: Path) -> set[str]:
    try:
        with contextlib.closing(_open(path)) as connection:
            return {run for (run,) in connection.execute("SELECT id FROM runs")}
    except (sqlite3.Error, OSError, UnicodeDecodeError):
        return set()


def _open(path: Path) -> sqlite3.Connection:
    # A copy is complete by itself. With `immutable` SQLite makes no files beside it and changes nothing in it.
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
