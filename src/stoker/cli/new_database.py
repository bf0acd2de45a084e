"""Starts an empty database in a home that has lost its own. Nothing is deleted: all that the lost database knew of
moves into a folder of the home and stays there until a user removes it."""

from __future__ import annotations

import time
from pathlib import Path

from stoker.cli.restore import server_locked_out
from stoker.errors import Conflict, NotFound, StokerError, StoreDamaged
from stoker.settings import Home, Settings

_NAMED = 3


def move_aside_all(home: Home) -> Path | None:
    """Returns the folder that now holds everything; None when there was nothing."""
    from stoker.engine.local import end_holding  # lazy: the engine is large

    with server_locked_out(home):
        _refuse_intact_database(home)
        _refuse_while_tasks_run(home)
        state = _run_data(home)
        if not state:
            return None
        end_holding(home)  # a holding launcher does not notice that its directory moves
        aside = home.root / time.strftime("lost-%Y%m%d-%H%M%S", time.gmtime())
        try:
            aside.mkdir(mode=0o700)
            for path in state:
                path.rename(aside / path.name)
        except OSError as exc:
            raise StokerError(
                f"cannot move {exc.filename} into {aside}: {(exc.strerror or str(exc)).lower()}",
                hint="Repeat the command: what has moved stays there.",
            ) from exc
    return aside


def _refuse_intact_database(home: Home) -> None:
    from stoker.store import Store  # lazy: SQLAlchemy takes its time

    try:
        with Store.open(Settings.load(home).database, create=False) as store:
            runs = store.total()
    except (StoreDamaged, NotFound):
        return
    if runs:
        raise Conflict(
            f"the database {store.where} is intact and has {runs} run(s)",
            hint="For an empty one beside it use another home: STOKER_HOME.",
        )


def _refuse_while_tasks_run(home: Home) -> None:
    from stoker.engine.local import launchers  # lazy: the engine is large

    running = [f"{living.run} (pid {living.identity.pid})" for living in launchers(home) if not living.holds]
    if running:
        more = ", ..." if len(running) > _NAMED else ""
        raise Conflict(
            f"{len(running)} task(s) of this home run: {', '.join(running[:_NAMED])}{more}",
            hint="Restore a copy, which adopts them; or end them first with kill PID, which leaves them time for a last "
            "checkpoint.",
            details={"tasks": running},
        )


def _run_data(home: Home) -> list[Path]:
    """All that belongs to runs: not settings, token, locks, logs, environments and caches."""
    name = home.database.name
    own = (home.ledger, home.tasks, home.runs, home.blobs, home.backups, home.engine, home.secrets)
    return [path for path in (*home.root.glob(f"{name}*"), *own) if path.exists() or path.is_symlink()]
