"""Applies the changes that one pass of the control loop decided.

Changes are sorted by table and keep their order within it. The result is the same as in the original order: a row of
one table depends on another table only by the existence of an earlier row. Equal statements then go to the database
together, which makes hundreds of changes cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Delete, Table, bindparam, delete, insert, select, update

from stoker.errors import NotFound
from stoker.store import codec, submissions
from stoker.store.dialects.base import Dialect
from stoker.store.metrics import KeyIds, MetricWriter
from stoker.store.rows import (
    AddAttempt,
    AddCheckpoint,
    AddEvent,
    AddMetrics,
    Change,
    DropPart,
    DropParts,
    DropTransfer,
    MoveCursor,
    PartRow,
    PutPart,
    PutTask,
    PutTransfer,
    TransferRow,
    UpdateAttempt,
    UpdateCheckpoint,
    UpdateRun,
)
from stoker.store.schema import (
    attempts,
    checkpoint_parts,
    checkpoint_transfers,
    checkpoints,
    cursors,
    events,
    run_records,
    run_tags,
    runs,
    tasks,
)

Rows = list[dict[str, Any]]

UPDATE_RUN = update(runs).where(runs.c.id == bindparam("of_id"))
SEQ_OF_RUN = select(runs.c.seq).where(runs.c.id == bindparam("id"))
REMOVE_RECORD = delete(run_records).where(run_records.c.run == bindparam("run"))
ADD_RECORD = insert(run_records)
REMOVE_TAGS = delete(run_tags).where(run_tags.c.run_seq == bindparam("seq"))
ADD_ATTEMPT = insert(attempts)
UPDATE_ATTEMPT = update(attempts).where(
    attempts.c.run == bindparam("of_run"), attempts.c.number == bindparam("of_number")
)
UPDATE_CHECKPOINT = update(checkpoints).where(checkpoints.c.id == bindparam("of_id"))
PART_KEY = ["run", "attempt", "generation", "task", "number"]


def _drop(table: Table, key: list[str]) -> Delete:
    return delete(table).where(*(table.c[name] == bindparam(f"of_{name}") for name in key))


DROP_PART = _drop(checkpoint_parts, PART_KEY)
DROP_PARTS = _drop(checkpoint_parts, ["run", "attempt"])
DROP_TRANSFER = _drop(checkpoint_transfers, PART_KEY)
DROP_TRANSFERS = _drop(checkpoint_transfers, ["run", "attempt"])
ADD_EVENT = insert(events)


class Changes:
    """Holds the statements for one database and the known metric keys. Used by one thread at a time, inside a write
    transaction."""

    def __init__(self, dialect: Dialect) -> None:
        self.metrics = MetricWriter(dialect)
        self._put_task = _upsert(dialect, tasks, ["run", "attempt", "task"])
        self._move_cursor = _upsert(dialect, cursors, ["run", "attempt", "task", "file"])
        self._add_checkpoint = dialect.insert(checkpoints).on_conflict_do_nothing(index_elements=["id"])
        self._put_part = _upsert(dialect, checkpoint_parts, PART_KEY)
        self._put_transfer = _upsert(dialect, checkpoint_transfers, PART_KEY)
        # Parents come before their children.
        self._tables: tuple[
            tuple[tuple[type, ...], Callable[[Connection, list[Any]], KeyIds | None]], ...
        ] = (
            ((UpdateRun,), self._runs),
            ((AddAttempt, UpdateAttempt), self._attempts),
            ((PutTask,), self._tasks),
            ((AddCheckpoint, UpdateCheckpoint), self._checkpoints),
            ((PutPart, DropPart, DropParts), self._parts),
            ((PutTransfer, DropTransfer), self._transfers),
            ((AddEvent,), self._events),
            ((AddMetrics,), self.metrics.add),
            ((MoveCursor,), self._cursors),
        )
        self._place = {kind: place for place, (kinds, _) in enumerate(self._tables) for kind in kinds}

    def apply(self, connection: Connection, changes: Sequence[Change]) -> KeyIds:
        """Applies the changes. Returns new metric key ids, to be remembered after the commit."""
        learnt: KeyIds = {}
        sorted_by_table: list[list[Any]] = [[] for _ in self._tables]
        for change in changes:
            place = self._place.get(type(change))
            if place is None:
                raise ValueError(f"not a change: {change!r}")
            sorted_by_table[place].append(change)
        for (_, write), found in zip(self._tables, sorted_by_table, strict=True):
            if found:
                learnt.update(write(connection, found) or {})
        for change in changes:
            # Parts that waited for others will not be completed, a complete checkpoint has its own row, and what was
            # not taken out of the task directories goes with them.
            if isinstance(change, UpdateAttempt) and change.values.get("state") == "ended":
                self._parts(connection, [DropParts(change.run, change.number)])
                of = {"of_run": codec.text(change.run), "of_attempt": change.number}
                connection.execute(DROP_TRANSFERS, of)
        return learnt

    def _runs(self, connection: Connection, changes: list[UpdateRun]) -> None:
        rows: Rows = []
        for change in changes:
            values = dict(change.values)
            if "record" in values:
                _replace_record(connection, change.id, values.pop("record"))
            if "tags" in values:
                _replace_tags(connection, change.id, values["tags"])
            rows.append({"of_id": codec.text(change.id), **codec.changed(values, codec.RUN, "a run")})
        _update(connection, UPDATE_RUN, rows, "run", lambda row: str(row["of_id"]))

    def _attempts(self, connection: Connection, changes: list[AddAttempt | UpdateAttempt]) -> None:
        for kind, group in groupby(changes, type):
            if kind is AddAttempt:
                rows = [_attempt_columns(change) for change in group if isinstance(change, AddAttempt)]
                connection.execute(ADD_ATTEMPT, rows)
                continue
            rows = [
                {
                    "of_run": codec.text(change.run),
                    "of_number": change.number,
                    **codec.changed(change.values, codec.ATTEMPT, "an attempt"),
                }
                for change in group
                if isinstance(change, UpdateAttempt)
            ]
            _update(
                connection,
                UPDATE_ATTEMPT,
                rows,
                "attempt",
                lambda row: f"{row['of_number']} of {row['of_run']}",
            )

    def _tasks(self, connection: Connection, changes: list[PutTask]) -> None:
        rows = [
            {
                "run": codec.text(change.row.run),
                "attempt": change.row.attempt,
                "task": codec.text(change.row.task),
                **codec.columns(change.row, codec.TASK),
            }
            for change in changes
        ]
        connection.execute(self._put_task, rows)

    def _checkpoints(self, connection: Connection, changes: list[AddCheckpoint | UpdateCheckpoint]) -> None:
        for kind, group in groupby(changes, type):
            if kind is AddCheckpoint:
                added = [change.row for change in group if isinstance(change, AddCheckpoint)]
                rows = [
                    {
                        "id": codec.text(row.id),
                        "run": codec.text(row.run),
                        **codec.columns(row, codec.CHECKPOINT),
                    }
                    for row in added
                ]
                connection.execute(self._add_checkpoint, rows)
                continue
            rows = [
                {
                    "of_id": codec.text(change.id),
                    **codec.changed(change.values, codec.CHECKPOINT, "a checkpoint"),
                }
                for change in group
                if isinstance(change, UpdateCheckpoint)
            ]
            _update(connection, UPDATE_CHECKPOINT, rows, "checkpoint", lambda row: str(row["of_id"]))

    def _parts(self, connection: Connection, changes: list[PutPart | DropPart | DropParts]) -> None:
        for change in changes:
            if isinstance(change, PutPart):
                values = {**_part_key(change.row), **codec.columns(change.row, codec.PART)}
                connection.execute(self._put_part, values)
            elif isinstance(change, DropPart):
                key = {f"of_{name}": value for name, value in _part_key(change.row).items()}
                connection.execute(DROP_PART, key)
            else:
                values = {"of_run": codec.text(change.run), "of_attempt": change.attempt}
                connection.execute(DROP_PARTS, values)

    def _transfers(self, connection: Connection, changes: list[PutTransfer | DropTransfer]) -> None:
        for kind, group in groupby(changes, type):
            found = list(group)
            keys = [_part_key(change.row) for change in found]
            if kind is PutTransfer:
                rows = [
                    {**key, **codec.columns(change.row, codec.TRANSFER)}
                    for key, change in zip(keys, found, strict=True)
                ]
                connection.execute(self._put_transfer, rows)
            else:
                of = [{f"of_{name}": value for name, value in key.items()} for key in keys]
                connection.execute(DROP_TRANSFER, of)

    def _events(self, connection: Connection, changes: list[AddEvent]) -> None:
        rows = [
            {"run": codec.text(change.row.run), **codec.columns(change.row, codec.EVENT)}
            for change in changes
        ]
        connection.execute(ADD_EVENT, rows)

    def _cursors(self, connection: Connection, changes: list[MoveCursor]) -> None:
        rows = [
            {
                "run": codec.text(change.run),
                "attempt": change.attempt,
                "task": codec.text(change.task),
                "file": codec.exact(change.file),
                "offset": codec.integer(change.offset),
            }
            for change in changes
        ]
        connection.execute(self._move_cursor, rows)


def _upsert(dialect: Dialect, table: Any, key: list[str]) -> Any:
    statement = dialect.insert(table)
    rest = {column.name: statement.excluded[column.name] for column in table.c if column.name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=rest)


def _update(
    connection: Connection, statement: Any, rows: Rows, what: str, name: Callable[[Any], str]
) -> None:
    """Sends consecutive rows with the same columns together. Every row must be found."""
    for _, group in groupby(rows, lambda row: tuple(sorted(row))):
        alike = list(group)
        if all(column.startswith("of_") for column in alike[0]):
            continue  # no change, or one that another table holds
        if connection.execute(statement, alike).rowcount == len(alike):
            continue
        for row in alike:
            if connection.execute(statement, row).rowcount == 0:
                raise NotFound(f"no {what} {name(row)}")


def _attempt_columns(change: AddAttempt) -> dict[str, Any]:
    run = codec.text(change.row.run)
    return {"run": run, "number": change.row.number, **codec.columns(change.row, codec.ATTEMPT)}


def _part_key(row: PartRow | TransferRow) -> dict[str, Any]:
    return {
        "run": codec.text(row.run),
        "attempt": codec.integer(row.attempt),
        "generation": codec.integer(row.generation),
        "task": codec.text(row.task),
        "number": codec.integer(row.number),
    }


def _seq(connection: Connection, run_id: str) -> int:
    seq = connection.execute(SEQ_OF_RUN, {"id": codec.text(run_id)}).scalar()
    if seq is None:
        raise NotFound(f"no run {run_id}")
    return int(seq)


def _replace_record(connection: Connection, run_id: str, record: Any) -> None:
    _seq(connection, run_id)
    connection.execute(REMOVE_RECORD, {"run": run_id})
    connection.execute(ADD_RECORD, {"run": run_id, "record": codec.to_json(dict(record))})


def _replace_tags(connection: Connection, run_id: str, tags: Sequence[str]) -> None:
    seq = _seq(connection, run_id)
    connection.execute(REMOVE_TAGS, {"seq": seq})
    submissions.set_tags(connection, seq, tags)
