"""Removed runs, and what is stored of runs.

A removed run keeps all its rows until the trash is emptied of it, and its files until then. One row of it stays for good:
no other run gets its id, its key starts nothing a second time, and the home's ledger and the copies of the database name
no run that the database does not know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, bindparam, delete, exists, func, select, update

from stoker.errors import Conflict, NotFound
from stoker.store import codec, queries, submissions
from stoker.store.rows import Roots, RunRow, RunSize
from stoker.store.schema import (
    attempts,
    checkpoint_parts,
    checkpoint_transfers,
    checkpoints,
    cursors,
    events,
    metric_keys,
    metrics,
    resume_keys,
    run_records,
    run_tags,
    runs,
    tasks,
)

REMOVE = (
    update(runs)
    .where(runs.c.id == bindparam("run_id"), runs.c.state.in_(submissions.TERMINAL_STATES), queries.SHOWN)
    .values(removed_at=bindparam("now"))
)
RESTORE = update(runs).where(runs.c.id == bindparam("run_id"), queries.IN_TRASH).values(removed_at=None)
EXPIRED = (
    select(runs.c.id)
    .where(queries.IN_TRASH, runs.c.removed_at <= bindparam("before"))
    .order_by(runs.c.removed_at, runs.c.seq)
)
_HELD = exists().where(attempts.c.run == runs.c.id, attempts.c.removed.is_(False))
HELD = EXPIRED.where(_HELD)
PURGE = (
    update(runs)
    .where(
        runs.c.id == bindparam("run_id"),
        queries.IN_TRASH,
        runs.c.removed_at <= bindparam("before"),
        ~_HELD,
    )
    .values(
        state=queries.REMOVED,
        removed_at=0.0,
        tags="[]",
        job="{}",
        command="[]",
        code=None,
        outputs=None,
        output_digest=None,
        folder=None,
        folder_digest=None,
        warnings="[]",
        reason="",
    )
)
PURGED = select(runs.c.id).where(
    runs.c.state == queries.REMOVED, runs.c.id.in_(bindparam("ids", expanding=True))
)
DIGESTS = select(runs.c.seq, runs.c.output_digest, runs.c.folder_digest).where(runs.c.id == bindparam("run"))
CHECKPOINT_DIGESTS = select(checkpoints.c.digest).where(
    checkpoints.c.run == bindparam("run"), checkpoints.c.kept.is_(True)
)
PART_DIGESTS = select(checkpoint_parts.c.digest).where(checkpoint_parts.c.run == bindparam("run"))
_KEYS_OF = select(metric_keys.c.id).where(metric_keys.c.run == bindparam("run"))
# Children before their parents.
DELETES = (
    delete(metrics).where(metrics.c.key_id.in_(_KEYS_OF)),
    *(
        delete(table).where(table.c.run == bindparam("run"))
        for table in (
            metric_keys,
            tasks,
            attempts,
            checkpoint_parts,
            checkpoint_transfers,
            checkpoints,
            events,
            cursors,
            resume_keys,
            run_records,
        )
    ),
)
DELETE_TAGS = delete(run_tags).where(run_tags.c.run_seq == bindparam("seq"))

_ASIDE = select(runs.c.id, runs.c.outputs, runs.c.folder)
SIZES_OF = _ASIDE.where(runs.c.id.in_(bindparam("ids", expanding=True)))
EVERY_SIZE = _ASIDE.where(queries.SHOWN)
_CHECKPOINT_BYTES = (
    select(checkpoints.c.run, func.sum(checkpoints.c.size))
    .where(checkpoints.c.kept.is_(True))
    .group_by(checkpoints.c.run)
)
CHECKPOINT_BYTES_OF = _CHECKPOINT_BYTES.where(checkpoints.c.run.in_(bindparam("ids", expanding=True)))


def remove(connection: Connection, run_id: str, now: float, by: str) -> RunRow:
    run_id = codec.text(run_id)
    if connection.execute(REMOVE, {"run_id": run_id, "now": codec.number(now)}).rowcount:
        submissions.add_event(connection, run_id, now, "removed", _by("removed", by), {"by": by})
    run = queries.run(connection, run_id)
    if run.removed_at is None:
        raise Conflict(
            f"run {run_id} is {run.state}: only ended runs can be removed",
            hint=f"End it first: stoker stop {run_id}",
            details={"state": run.state},
        )
    return run


def restore(connection: Connection, run_id: str, now: float, by: str) -> RunRow:
    run_id = codec.text(run_id)
    if connection.execute(RESTORE, {"run_id": run_id}).rowcount:
        submissions.add_event(
            connection, run_id, now, "restored", _by("taken out of the trash", by), {"by": by}
        )
    return queries.run(connection, run_id)


def expired(connection: Connection, before: float) -> tuple[list[str], list[str]]:
    values = {"before": codec.number(before)}
    held = list(connection.execute(HELD, values).scalars())
    return [run for run in connection.execute(EXPIRED, values).scalars() if run not in set(held)], held


def purge(connection: Connection, run_id: str, before: float) -> set[str] | None:
    run_id = codec.text(run_id)
    of = {"run": run_id}
    row = connection.execute(DIGESTS, of).first()
    if row is None:
        raise NotFound(f"no run {run_id!r}")
    if not connection.execute(PURGE, {"run_id": run_id, "before": codec.number(before)}).rowcount:
        return None
    digests = {row.output_digest, row.folder_digest} - {None}
    for statement in (CHECKPOINT_DIGESTS, PART_DIGESTS):
        digests.update(connection.execute(statement, of).scalars())
    connection.execute(DELETE_TAGS, {"seq": row.seq})
    for deletion in DELETES:
        connection.execute(deletion, of)
    return digests


def purged(connection: Connection, run_ids: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for chunk in queries.chunks([codec.text(run_id) for run_id in run_ids]):
        found.update(connection.execute(PURGED, {"ids": chunk}).scalars())
    return found


def sizes(connection: Connection, run_ids: Sequence[str] | None) -> list[RunSize]:
    if run_ids is None:
        rows = list(connection.execute(EVERY_SIZE))
        written = {row[0]: int(row[1]) for row in connection.execute(_CHECKPOINT_BYTES)}
    else:
        rows, written = [], {}
        for chunk in queries.chunks(list(dict.fromkeys(map(codec.text, run_ids)))):
            rows += connection.execute(SIZES_OF, {"ids": chunk})
            found = connection.execute(CHECKPOINT_BYTES_OF, {"ids": chunk})
            written.update({row[0]: int(row[1]) for row in found})
    return [
        RunSize(row.id, written.get(row.id, 0), _bytes_of(row.outputs), _bytes_of(row.folder)) for row in rows
    ]


def roots(connection: Connection) -> Roots:
    """Of each kind those of runs that are not removed, and together those of the trash."""
    trash: set[str] = set()

    def of(digest: ColumnElement[Any], *more: ColumnElement[bool]) -> set[str]:
        def found(where: ColumnElement[bool]) -> set[str]:
            statement: Select[Any] = select(digest).where(digest.is_not(None), where, *more)
            return set(connection.execute(statement).scalars())

        trash.update(found(queries.IN_TRASH))
        return found(queries.SHOWN)

    code, outputs, folder = of(runs.c.code), of(runs.c.output_digest), of(runs.c.folder_digest)
    kept = of(checkpoints.c.digest, checkpoints.c.run == runs.c.id, checkpoints.c.kept.is_(True))
    parts = of(checkpoint_parts.c.digest, checkpoint_parts.c.run == runs.c.id)
    return Roots(code, kept | parts, outputs, folder, trash)


def _by(what: str, by: str) -> str:
    return f"{what} by {by}" if by else what


def _bytes_of(kept: str | None) -> int:
    """Of `outputs` and `folder`."""
    if kept is None:
        return 0
    try:
        count = json.loads(kept).get("bytes")
    except (ValueError, AttributeError) as exc:
        raise codec.damaged("a run", exc) from exc
    return count if isinstance(count, int) else 0
