"""Moves a home from its SQLite file to PostgreSQL and back, while its server is stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.restore import server_locked_out
from stoker.errors import Conflict, NotFound, Refused
from stoker.settings import Home, Settings

if TYPE_CHECKING:
    from stoker.store.row_copy import Progress

ENVIRONMENT = "STOKER_DATABASE"
FILE = "sqlite"


def migrate(home: Home, to: str | None, progress: Progress) -> dict[str, Any]:
    """`{"from", "to", "rows", "already", "kept", "setting"}`: what was moved, where the old database is kept and
    where the new one is set. Safe to repeat: it continues after an interruption."""
    from stoker.store import is_shared  # lazy: SQLAlchemy takes its time

    target = to or os.environ.get(ENVIRONMENT)
    if not target:
        raise Refused(
            "no database to move to is named",
            hint=f"--to postgresql://user:password@host/name, or the same in {ENVIRONMENT}.",
        )
    settings = Settings.load(home, environ={})
    with server_locked_out(home):
        if target == FILE:
            return _to_file(settings)
        if not is_shared(target):
            raise Refused(
                "a home moves to PostgreSQL, or back to the file it had",
                hint="--to postgresql://... or --to sqlite",
            )
        return _to_server(settings, target, progress, named=to is not None)


def _to_server(settings: Settings, target: str, progress: Progress, *, named: bool) -> dict[str, Any]:
    from stoker.server.config_file import set_database
    from stoker.store.relocation import Moved, move

    home = settings.home
    source = settings.database
    if str(source) == target:
        moved = Moved({}, already=True)
    elif isinstance(source, Path) and not source.exists():
        raise NotFound(
            f"there is no database at {source}",
            hint="A new home needs no moving: set [server] database in config.toml and start the server.",
        )
    else:
        moved = move(source, target, lease=settings.server.lease, progress=progress)
    if named:
        set_database(home.config, target)
    return {
        "from": _shown(source),
        "to": _shown(target),
        "rows": moved.rows,
        "already": moved.already,
        "kept": _keep_old_file(home),
        "setting": str(home.config) if named else ENVIRONMENT,
    }


def _to_file(settings: Settings) -> dict[str, Any]:
    from stoker.server.config_file import set_database
    from stoker.store import is_shared
    from stoker.store.relocation import file_from

    home = settings.home
    source = settings.database
    if not is_shared(source):
        source = os.environ.get(ENVIRONMENT, "")
    if not is_shared(source):
        raise Conflict(f"this home uses {home.database} already")
    moved = file_from(str(source), home.database, lease=settings.server.lease)
    set_database(home.config, None)
    return {
        "from": _shown(source),
        "to": str(home.database),
        "rows": moved.rows,
        "already": moved.already,
        "kept": _shown(source),
        "setting": str(home.config),
    }


def _keep_old_file(home: Home) -> str | None:
    """Moves the file to the backups. In its old place a server that lost its setting would use it again."""
    if not home.database.exists():
        return None
    from stoker.store import Store

    Store.open(home.database, create=False).close()  # moves the write-ahead log into the file
    home.backups.mkdir(exist_ok=True, mode=0o700)
    kept = home.backups / time.strftime("before-migration-%Y%m%d-%H%M%S.db", time.gmtime())
    home.database.rename(kept)
    return str(kept)


def _shown(database: str | Path) -> str:
    from stoker.store.dialects.base import dialect_for

    return dialect_for(database).where
