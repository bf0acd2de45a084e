"""What a home holds besides its database: enough to tell a new home from one that has lost its database.

    ledger.jsonl   {"id", "name", "t"} for each acknowledged run; {"id", "forgotten"} once it was forgotten
    tasks/RUN      of runs that are not cleaned up yet; their training may be running
    blobs/         code, checkpoints, outputs
    backups/       copies of the database

A new database beside these would know nothing: tasks would be orphans, blobs garbage, and its copies would replace the
good ones. So no database is created there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stoker.errors import StoreLost
from stoker.settings import Home
from stoker.store.dialects.sqlite_copies import Contents, beneath, best_first

_NAMED = 3
"""Number of task directories that a message names."""
_BEFORE_MIGRATION = "before-migration-"
"""Name of the file that was the database before it moved to a server."""


@dataclass(frozen=True)
class HomeContents:
    runs: int
    """Runs that were acknowledged and not forgotten."""
    tasks: tuple[str, ...]
    """Runs that have task directories."""
    blobs: bool
    copies: tuple[tuple[Path, Contents], ...]
    """Copies with runs in them, best first."""

    @property
    def of_runs(self) -> bool:
        """Whether anything proves that a database without runs is wrong. Blobs alone do not: code arrives before the
        run that needs it."""
        return bool(self.runs or self.tasks or self.copies)

    @property
    def anything(self) -> bool:
        return self.of_runs or self.blobs


def of_home(home: Home) -> HomeContents:
    with_runs = [one for one in best_first(beneath(home.backups)) if one[1].runs]
    tasks = tuple(_task_directories(home))
    return HomeContents(len(acknowledged(ledger(home))), tasks, _any_blob(home.blobs), tuple(with_runs))


def ledger(home: Home) -> list[bytes]:
    try:
        return home.ledger.read_bytes().splitlines()
    except FileNotFoundError:
        return []


def acknowledged(lines: Iterable[str | bytes | Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The runs that were acknowledged and not forgotten, by id. Skips torn lines."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        try:
            entry = dict(line) if isinstance(line, Mapping) else json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            continue
        if "forgotten" in entry:
            found.pop(entry["id"], None)
        else:
            found[entry["id"]] = entry
    return found


def claims(home: Home) -> list[dict[str, Any]]:
    """`{"id", "name"?, "t"?}` of each run that this home is known to have had, except forgotten ones."""
    tasks = [{"id": name} for name in _task_directories(home)]
    return list(acknowledged([*tasks, *ledger(home)]).values())


def forget(home: Home, runs: Iterable[str], now: float) -> None:
    """Records for good that these runs, which the database does not know, are forgotten."""
    lines = "".join(json.dumps({"id": run, "forgotten": now}) + "\n" for run in runs)
    fd = os.open(home.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def lost(home: Home, where: str, found: HomeContents, *, shared: bool, empty: bool) -> StoreLost:
    """`empty`: the database exists but has no run. `shared`: it is on a server."""
    what = "has no runs in it" if empty else "is gone"
    return StoreLost(
        f"the database {where} {what}, but this home has had runs: {', '.join(_evidence(found))}; "
        "nothing was ended or deleted",
        hint=" ".join(_remedies(home, found, shared)),
        details={
            "ledger": found.runs,
            "tasks": list(found.tasks),
            "copies": [{"path": str(path), "runs": inside.runs} for path, inside in found.copies],
        },
    )


def _evidence(found: HomeContents) -> Iterator[str]:
    if found.runs:
        yield f"{found.runs} in its ledger"
    if found.tasks:
        more = ", ..." if len(found.tasks) > _NAMED else ""
        yield f"task directories of {len(found.tasks)} ({', '.join(found.tasks[:_NAMED])}{more})"
    if found.blobs:
        yield "blobs"
    if found.copies:
        yield f"{len(found.copies)} {'copy' if len(found.copies) == 1 else 'copies'} of the database"


def _remedies(home: Home, found: HomeContents, shared: bool) -> Iterator[str]:
    if shared and home.database.is_file():
        yield f"To move the runs of {home.database} there: stoker server migrate."
    elif shared:
        yield f"If this is not the database of this home, name the right one: [server] database in {home.config}."
    elif not shared and any(name.startswith(_BEFORE_MIGRATION) for name in _names(home.backups)):
        yield f"If the database is on a server, name it again: [server] database in {home.config}."
    if found.copies:
        path, inside = found.copies[0]
        made = datetime.fromtimestamp(inside.made_at).isoformat(sep=" ", timespec="minutes")
        runs = "1 run" if inside.runs == 1 else f"{inside.runs} runs"
        yield f"The best copy ({path}) has {runs} and was made on {made}: stoker backup restore."
    else:
        yield "There is no copy in this home; with one from elsewhere: stoker backup restore PATH."
    yield "To move all this aside and start with an empty database: stoker server start --anew."


def _task_directories(home: Home) -> list[str]:
    return sorted(name for name in _names(home.tasks) if not name.startswith("."))


def _any_blob(blobs: Path) -> bool:
    kinds = (blobs / "objects", blobs / "trees")
    return any(_names(kind / shard) for kind in kinds for shard in _names(kind))


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
