"""What users ask for: submit, stop, resume. Each is safe to repeat."""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from stoker.errors import Conflict
from stoker.spec.run_transitions import TABLE, RunEvent
from stoker.spec.states import TERMINAL, RunState
from stoker.store import codec, queries
from stoker.store.rows import Json, NewRun, RunRow
from stoker.store.schema import events, resume_keys, run_records, run_tags, runs

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Without i, l, o and u, which are misread or misheard."""
SUFFIX = 4
SLUG = 40

TERMINAL_STATES = tuple(sorted(str(state) for state in TERMINAL))
RESUMABLE = tuple(str(state) for state in TABLE.befores(RunEvent.RESUMED))
RESUMED = str(TABLE.after(RunState.SUSPENDED, RunEvent.RESUMED))
REPLACES = {
    "run": ("suspend",),
    "suspend": ("run",),
    "stop": ("run", "suspend"),
    "kill": ("run", "suspend", "stop"),
}
"""wish -> the earlier wishes that it replaces. A run that is to end stays so until it is resumed."""

TAKEN = select(runs.c.id, runs.c.key).where((runs.c.key == bindparam("key")) | (runs.c.id == bindparam("id")))
ADD_RUN = insert(runs).returning(runs.c.seq)
ADD_RECORD = insert(run_records)
ADD_TAG = insert(run_tags)
ADD_EVENT = insert(events)
WISH = (
    update(runs)
    .where(
        runs.c.id == bindparam("run_id"),
        runs.c.state.not_in(TERMINAL_STATES),
        runs.c.desired.in_(bindparam("replaced", expanding=True)),
    )
    .values(desired=bindparam("wish"))
)
REQUEUE = update(runs).where(runs.c.id == bindparam("run_id"), runs.c.state.in_(RESUMABLE), queries.SHOWN)
RESUME_OF_KEY = select(resume_keys.c.run).where(resume_keys.c.key == bindparam("key"))
ADD_RESUME_KEY = insert(resume_keys)


def submit(connection: Connection, new: NewRun, now: float) -> tuple[RunRow, bool]:
    run_id = new_id(new.name)
    key = codec.exact(new.key)
    length = SUFFIX
    while taken := connection.execute(TAKEN, {"key": key, "id": run_id}).all():
        if any(row.key == key for row in taken):
            return _submitted_before(connection, new, key), False
        length += 1
        run_id = new_id(new.name, length)
    values = codec.new_run(new, run_id, now)
    seq = connection.execute(ADD_RUN, values).scalar_one()
    record = codec.to_json(dict(new.record)) if new.record else None
    if record is not None:
        connection.execute(ADD_RECORD, {"run": run_id, "record": record})
    set_tags(connection, seq, new.tags)
    add_event(connection, run_id, now, "queued", "queued", {"user": new.user} if new.user else {})
    values["seq"] = seq
    return codec.run_row([values[name] for name in codec.RUN_COLUMNS], record), True


def _submitted_before(connection: Connection, new: NewRun, key: str) -> RunRow:
    row = connection.execute(queries.RUN_BY_KEY, {"key": key}).one()
    if row.removed_at is not None:
        raise Conflict(
            f"the key {new.key!r} was used for run {row.id}, which was removed",
            hint=f"Use a new key, or bring the run back: stoker rm --undo {row.id}"
            if row.removed_at
            else "Use a new key.",
            details={"run": row.id},
        )
    if row.fingerprint != codec.text(new.fingerprint):
        raise Conflict(
            f"the key {new.key!r} was used for another submission, run {row.id}",
            hint="Use a new key for a new submission.",
            details={"run": row.id},
        )
    return codec.run_row(row, row.record)


def set_desired(connection: Connection, run_id: str, desired: str, now: float, by: str) -> RunRow:
    if desired not in REPLACES:
        raise ValueError(f"desired is {desired!r}; choices: {', '.join(REPLACES)}")
    values = {"run_id": codec.text(run_id), "replaced": REPLACES[desired], "wish": str(desired)}
    if connection.execute(WISH, values).rowcount:
        asked = f"{desired} requested by {by}" if by else f"{desired} requested"
        add_event(connection, run_id, now, str(desired), asked, {"by": by})
    return queries.run(connection, run_id)


def resume(
    connection: Connection, run_id: str, key: str, now: float, job: Json | None
) -> tuple[RunRow, bool]:
    stored_key = codec.exact(key)
    earlier = connection.execute(RESUME_OF_KEY, {"key": stored_key}).scalar()
    if earlier is not None and earlier != run_id:
        raise Conflict(f"the key {key!r} was used to resume run {earlier}", hint="Use a new key.")
    current = queries.run(connection, run_id)
    if earlier is not None:
        return current, False
    values: dict[str, Any] = {
        "state": RESUMED,
        "desired": "run",
        "ended_at": None,
        "exit_code": None,
        "cause": None,
        "reason": "",
        "failures": 0,
        "faults": 0,
        "not_before": 0.0,
    }
    if job is not None:
        values["job"] = codec.to_json(job)
    if not connection.execute(REQUEUE, {"run_id": run_id, **values}).rowcount:
        if current.removed_at is not None:
            raise Conflict(
                f"run {run_id} is in the trash", hint=f"Bring it back first: stoker rm --undo {run_id}"
            )
        raise Conflict(
            f"run {run_id} is {current.state}",
            hint=f"Only a run that is {', '.join(RESUMABLE[:-1])} or {RESUMABLE[-1]} can be resumed.",
            details={"state": current.state},
        )
    connection.execute(ADD_RESUME_KEY, {"key": stored_key, "run": run_id, "created_at": now})
    add_event(connection, run_id, now, "resumed", f"resumed; it was {current.state}", {"from": current.state})
    return queries.run(connection, run_id), True


def set_tags(connection: Connection, seq: int, tags: Sequence[str]) -> None:
    """Adds the rows that find a run by its tags. The run must have none yet."""
    if tags:
        rows = [{"tag": tag, "run_seq": seq} for tag in dict.fromkeys(map(codec.text, tags))]
        connection.execute(ADD_TAG, rows)


def new_id(name: str, length: int = SUFFIX) -> str:
    return f"{slug(name)}-{''.join(secrets.choice(ALPHABET) for _ in range(length))}"


def slug(name: str) -> str:
    """Lower-case letters, digits and single dashes: valid in file names, host names and shells."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:SLUG].strip("-") or "run"


def add_event(connection: Connection, run_id: str, now: float, kind: str, text: str, data: Json) -> None:
    values = {"run": run_id, "t": now, "kind": kind, "text": codec.text(text), "data": codec.to_json(data)}
    connection.execute(ADD_EVENT, values)
