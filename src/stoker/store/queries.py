"""Queries about runs, attempts, tasks, checkpoints and events. Statements are built once and have names."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, select, union_all

from stoker.errors import Conflict, NotFound
from stoker.spec.states import RunState
from stoker.store import codec
from stoker.store.codec import Row
from stoker.store.rows import (
    AttemptRow,
    CheckpointRow,
    RunFilter,
    RunRow,
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

STATES = tuple(str(state) for state in RunState)
LIVE = ("queued", "starting", "running", "stopping")
UNENDED = ("starting", "running", "stopping")
CHUNK = 500
"""Values in one IN list: below the limit of every database."""

REMOVED = "removed"
"""State of the row that is left of a run once the trash was emptied. Its id and its key stay taken."""
SHOWN = func.coalesce(runs.c.removed_at, -1.0) < 0
"""Not removed. An expression, so that no database walks the index of removed runs for it."""
IN_TRASH = runs.c.removed_at > 0

_RUN = select(*(runs.c[name] for name in codec.RUN_COLUMNS))
_SEQ = codec.RUN_COLUMNS.index("seq")
_ID = codec.RUN_COLUMNS.index("id")
_WHOLE_RUN = _RUN.add_columns(run_records.c.record, runs.c.fingerprint).outerjoin(
    run_records, run_records.c.run == runs.c.id
)
RUN_BY_ID = _WHOLE_RUN.where(runs.c.id == bindparam("id"), runs.c.state != REMOVED)
RUN_BY_KEY = _WHOLE_RUN.where(runs.c.key == bindparam("key"))
RUNS_BY_SEQ = _RUN.where(runs.c.seq.in_(bindparam("seqs", expanding=True)))
RECORDS_OF = select(run_records).where(run_records.c.run.in_(bindparam("ids", expanding=True)))
LIVE_RUNS = _RUN.where(runs.c.state.in_(LIVE)).order_by(runs.c.seq)
KNOWN_IDS = select(runs.c.id).where(runs.c.id.in_(bindparam("ids", expanding=True)))
NEWEST_IDS = select(runs.c.id).where(SHOWN).order_by(runs.c.seq.desc()).limit(bindparam("limit"))
IDS_BETWEEN = (
    select(runs.c.id, runs.c.project)
    .where(runs.c.id >= bindparam("low"), runs.c.id < bindparam("high"), SHOWN)
    .order_by(runs.c.id)
    .limit(bindparam("limit"))
)
TRASH_IDS_BETWEEN = (
    select(runs.c.id, runs.c.project)
    .where(IN_TRASH, runs.c.id >= bindparam("low"), runs.c.id < bindparam("high"))
    .order_by(runs.c.id)
    .limit(bindparam("limit"))
)
COUNTS = select(runs.c.state, func.count()).group_by(runs.c.state)
STATES_IN_TRASH = select(runs.c.state).where(IN_TRASH)
ANY_RUN = select(runs.c.seq).limit(1)
ROOTS = union_all(
    select(runs.c.code).where(runs.c.code.is_not(None)),
    select(runs.c.output_digest).where(runs.c.output_digest.is_not(None)),
    select(runs.c.folder_digest).where(runs.c.folder_digest.is_not(None)),
    select(checkpoints.c.digest).where(checkpoints.c.kept.is_(True)),
    select(checkpoint_parts.c.digest),
)

ATTEMPTS_OF = select(attempts).where(attempts.c.run == bindparam("run")).order_by(attempts.c.number)
ATTEMPT = select(attempts).where(attempts.c.run == bindparam("run"), attempts.c.number == bindparam("number"))
UNFINISHED_ATTEMPTS = union_all(
    select(attempts).where(attempts.c.removed.is_(False)),
    select(attempts).where(attempts.c.removed.is_(True), attempts.c.state.in_(UNENDED)),
)
_newest = attempts.alias("newest")
LATEST_ATTEMPTS = select(attempts).where(
    attempts.c.run.in_(bindparam("runs", expanding=True)),
    attempts.c.number
    == select(func.max(_newest.c.number)).where(_newest.c.run == attempts.c.run).scalar_subquery(),
)
TASKS_OF = (
    select(tasks)
    .where(tasks.c.run == bindparam("run"), tasks.c.attempt == bindparam("attempt"))
    .order_by(tasks.c.task)
)
CHECKPOINTS_OF = select(checkpoints).where(checkpoints.c.run == bindparam("run")).order_by(checkpoints.c.seq)
KEPT_CHECKPOINTS_OF = CHECKPOINTS_OF.where(checkpoints.c.kept.is_(True))
CHECKPOINT = select(checkpoints).where(checkpoints.c.id == bindparam("id"))
PARTS_OF = (
    select(checkpoint_parts)
    .where(checkpoint_parts.c.run == bindparam("run"), checkpoint_parts.c.attempt == bindparam("attempt"))
    .order_by(checkpoint_parts.c.generation, checkpoint_parts.c.task, checkpoint_parts.c.number)
)
TRANSFERS_OF = (
    select(checkpoint_transfers)
    .where(
        checkpoint_transfers.c.run == bindparam("run"),
        checkpoint_transfers.c.attempt == bindparam("attempt"),
    )
    .order_by(checkpoint_transfers.c.task, checkpoint_transfers.c.offset)
)
EVENTS_OF = select(events).where(events.c.run == bindparam("run")).order_by(events.c.seq)
CURSORS_OF = select(cursors.c.task, cursors.c.file, cursors.c.offset).where(
    cursors.c.run == bindparam("run"), cursors.c.attempt == bindparam("attempt")
)


# -- runs --------------------------------------------------------------------------------------------------------


def run(connection: Connection, run_id: str) -> RunRow:
    """Also of a run in the trash."""
    found = find_run(connection, run_id)
    if found is None:
        raise NotFound(f"no run {run_id!r}", hint=_nearest_hint(connection, run_id))
    return found


def find_run(connection: Connection, run_id: str) -> RunRow | None:
    row = connection.execute(RUN_BY_ID, {"id": codec.text(run_id)}).first()
    return None if row is None else codec.run_row(row, row.record)


def resolve(connection: Connection, ref: str, project: str | None, trash: bool = False) -> RunRow:
    exact = find_run(connection, ref)
    if exact is not None and project in (None, exact.project) and (exact.removed_at is not None) == trash:
        return exact
    named = list_runs(connection, RunFilter(name=ref, project=project, limit=1, trash=trash), records=True)
    if named:
        return named[0]
    ids = _ids_starting_with(connection, ref, project, trash)
    if len(ids) == 1:
        return run(connection, ids[0])
    if ids:
        raise Conflict(
            f"{ref!r} is the start of several run ids",
            hint=f"Choose one: {', '.join(ids[:10])}{', ...' if len(ids) > 10 else ''}",
            details={"candidates": ids[:10]},
        )
    if trash:
        raise NotFound(f"no run {ref!r} in the trash", hint="stoker rm --list shows what is in it.")
    if exact is not None and exact.removed_at is not None:
        raise NotFound(
            f"run {exact.id!r} was removed", hint=f"It is in the trash: stoker rm --undo {exact.id}"
        )
    raise NotFound(f"no run {ref!r}", hint=_nearest_hint(connection, ref))


def list_runs(connection: Connection, wanted: RunFilter, *, records: bool) -> list[RunRow]:
    seqs = [] if wanted.limit <= 0 else _page(connection, wanted)
    rows: dict[int, Sequence[Any]] = {}
    for chunk in chunks(seqs):
        rows.update((row[_SEQ], row) for row in connection.execute(RUNS_BY_SEQ, {"seqs": chunk}))
    return _run_rows(connection, [rows[seq] for seq in seqs], records)


def live(connection: Connection, *, records: bool) -> list[RunRow]:
    return _run_rows(connection, connection.execute(LIVE_RUNS).all(), records)


def counts(connection: Connection) -> dict[str, int]:
    found: dict[str, int] = {row[0]: row[1] for row in connection.execute(COUNTS)}
    for state in connection.execute(STATES_IN_TRASH).scalars():
        found[state] -= 1
    return {state: found.get(state, 0) for state in STATES}


def total(connection: Connection) -> int:
    return sum(row[1] for row in connection.execute(COUNTS))


def is_empty(connection: Connection) -> bool:
    return connection.execute(ANY_RUN).first() is None


def known_ids(connection: Connection, ids: Sequence[str]) -> set[str]:
    known: set[str] = set()
    for chunk in chunks(ids):
        known.update(
            connection.execute(KNOWN_IDS, {"ids": [codec.text(run_id) for run_id in chunk]}).scalars()
        )
    return known


def _run_rows(connection: Connection, rows: Sequence[Sequence[Any]], records: bool) -> list[RunRow]:
    found: dict[str, str] = {}
    if records:
        for chunk in chunks([row[_ID] for row in rows]):
            found.update((row[0], row[1]) for row in connection.execute(RECORDS_OF, {"ids": chunk}))
    return [codec.run_row(row, found.get(row[_ID])) for row in rows]


def _page(connection: Connection, wanted: RunFilter) -> list[int]:
    """The seqs of one page, newest first. Queried state by state and merged: each part is a short walk of one index,
    while one query over several states may sort all their rows."""
    given = {
        "name": wanted.name,
        "part": wanted.name_like,
        "project": wanted.project,
    }
    values: dict[str, Any] = {key: codec.text(value) for key, value in given.items() if value is not None}
    if wanted.before is not None:
        values["before"] = codec.integer(wanted.before)
    tags = sorted(set(wanted.tags))
    values.update({f"tag{position}": codec.text(tag) for position, tag in enumerate(tags)})
    values["limit"] = codec.integer(wanted.limit)
    states = tuple(dict.fromkeys(map(codec.text, wanted.states))) or (
        STATES if wanted.name is not None else ()
    )
    key = (frozenset(values), bool(states) and not tags, bool(states) and bool(tags), wanted.trash)
    statement = _page_statement(key)
    if tags and states:
        values["states"] = states
    if tags or not states:
        return list(connection.execute(statement, values).scalars())
    parts = [connection.execute(statement, {**values, "state": state}).scalars().all() for state in states]
    return list(heapq.merge(*parts, reverse=True))[: wanted.limit]


_PageKey = tuple[frozenset[str], bool, bool, bool]
"""The values that are given; whether it is of one state; of several states; of the trash."""
_page_statements: dict[_PageKey, Select[Any]] = {}


def _page_statement(key: _PageKey) -> Select[Any]:
    if key not in _page_statements:
        _page_statements[key] = _build_page_statement(*key)
    return _page_statements[key]


def _build_page_statement(
    given: frozenset[str], one_state: bool, among_states: bool, trash: bool
) -> Select[Any]:
    tags = sorted(name for name in given if name.startswith("tag"))
    statement: Select[Any] = select(runs.c.seq).where(IN_TRASH if trash else SHOWN)
    seq = runs.c.seq
    for position, tag in enumerate(tags):
        tagged = run_tags.alias(f"tagged{position}")
        statement = statement.join(tagged, tagged.c.run_seq == runs.c.seq).where(
            tagged.c.tag == bindparam(tag)
        )
        seq = tagged.c.run_seq if position == 0 else seq
    if one_state:
        statement = statement.where(runs.c.state == bindparam("state"))
    if among_states:
        statement = statement.where(runs.c.state.in_(bindparam("states", expanding=True)))
    if "name" in given:
        statement = statement.where(runs.c.name == bindparam("name"))
    if "part" in given:
        # Not LIKE: its letter case and its wildcards differ between databases.
        statement = statement.where(func.replace(runs.c.name, bindparam("part"), "") != runs.c.name)
    if "project" in given:
        statement = statement.where(runs.c.project == bindparam("project"))
    if "before" in given:
        statement = statement.where(seq < bindparam("before"))
    return statement.order_by(seq.desc()).limit(bindparam("limit"))


def _ids_starting_with(
    connection: Connection, start: str, project: str | None, trash: bool = False
) -> list[str]:
    if not start or not start.isascii() or not start.isprintable():
        return []
    values = {"low": start, "high": start + "\x7f", "limit": 200}
    found = connection.execute(TRASH_IDS_BETWEEN if trash else IDS_BETWEEN, values)
    return [row.id for row in found if project in (None, row.project)]


def _nearest_hint(connection: Connection, run_id: str) -> str:
    """The nearest of the newest ids and of those that start alike. Comparing with every run takes seconds."""
    candidates = dict.fromkeys(_ids_starting_with(connection, codec.text(run_id)[:3], None))
    candidates.update(dict.fromkeys(connection.execute(NEWEST_IDS, {"limit": 300}).scalars()))
    near = difflib.get_close_matches(run_id, list(candidates), n=3, cutoff=0.5)
    return f"Nearest: {', '.join(near)}" if near else "stoker ps lists the runs."


# -- rows of one run ---------------------------------------------------------------------------------------------


def rows_of(connection: Connection, kind: type[Row], statement: Select[Any], **values: Any) -> list[Row]:
    """The rows that a statement finds, decoded. `run`: text of any form."""
    values["run"] = codec.text(values["run"])
    return [codec.decode(kind, row) for row in connection.execute(statement, values).mappings()]


def attempt(connection: Connection, run_id: str, number: int) -> AttemptRow:
    row = connection.execute(ATTEMPT, {"run": codec.text(run_id), "number": number}).mappings().first()
    if row is None:
        have = [str(found.number) for found in rows_of(connection, AttemptRow, ATTEMPTS_OF, run=run_id)]
        raise NotFound(
            f"run {run_id!r} has no attempt {number}",
            hint=f"It has: {', '.join(have)}" if have else "It has not been started yet.",
        )
    return codec.decode(AttemptRow, row)


def unfinished_attempts(connection: Connection) -> list[AttemptRow]:
    rows = [codec.decode(AttemptRow, row) for row in connection.execute(UNFINISHED_ATTEMPTS).mappings()]
    return sorted(rows, key=lambda row: (row.run, row.number))


def latest_attempts(connection: Connection, run_ids: Iterable[str]) -> dict[str, AttemptRow]:
    found: dict[str, AttemptRow] = {}
    for chunk in chunks(list(dict.fromkeys(map(codec.text, run_ids)))):
        for row in connection.execute(LATEST_ATTEMPTS, {"runs": chunk}).mappings():
            found[row["run"]] = codec.decode(AttemptRow, row)
    return found


def checkpoint(connection: Connection, checkpoint_id: str) -> CheckpointRow:
    row = connection.execute(CHECKPOINT, {"id": codec.text(checkpoint_id)}).mappings().first()
    if row is None:
        raise NotFound(
            f"no checkpoint {checkpoint_id!r}", hint="stoker show RUN lists the checkpoints of a run."
        )
    return codec.decode(CheckpointRow, row)


def cursors_of(connection: Connection, run_id: str, number: int) -> dict[tuple[str, str], int]:
    rows = connection.execute(CURSORS_OF, {"run": codec.text(run_id), "attempt": number})
    return {(row.task, codec.from_exact(row.file)): row.offset for row in rows}


def chunks(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))
