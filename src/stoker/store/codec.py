"""Rows to columns and back.

Values may come from user code (metric names, file names, last lines), so none of them may make a transaction fail:
text is made storable and numbers are brought into range. Rows of an intact database always decode; a row that does
not decode is reported as damage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from stoker.errors import StoreDamaged
from stoker.spec.states import TERMINAL
from stoker.store import placement
from stoker.store.rows import (
    AttemptRow,
    CheckpointRow,
    ClusterRow,
    EventRow,
    NewRun,
    PartRow,
    RunRow,
    TaskRow,
    TransferRow,
)

Columns = dict[str, Any]
Found = Mapping[Any, Any]
"""A row as SQLAlchemy returns it: by column name."""
Encoder = Callable[[Any], Any]
Row = TypeVar("Row")

INT_MAX = 2**63 - 1


def text(value: str) -> str:
    """Text for display, storable everywhere: lone surrogates and NUL become the replacement character."""
    value = str(value)
    if "\0" in value:
        value = value.replace("\0", "\ufffd")
    if value.isascii():
        return value
    return value.encode("utf-8", "replace").decode("utf-8")


def exact(value: str) -> str:
    """A name that must be restored exactly (file names are bytes, metric names are any JSON string)."""
    if value.isascii() and value.isprintable() and "\\" not in value and '"' not in value:
        return str(value)
    return json.dumps(value, ensure_ascii=False)[1:-1].encode("utf-8", "backslashreplace").decode("utf-8")


def from_exact(value: str) -> str:
    try:
        return value if "\\" not in value else str(json.loads(f'"{value}"'))
    except (ValueError, TypeError) as exc:
        raise damaged("a name", exc) from exc


def integer(value: int) -> int:
    return max(-INT_MAX, min(INT_MAX, int(value)))


def number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return math.inf if value > 0 else -math.inf


def metric(value: float) -> float | None:
    value = number(value)
    return None if math.isnan(value) else value


def unmetric(value: float | None) -> float:
    return math.nan if value is None else float(value)


def to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _maybe(encoder: Encoder) -> Encoder:
    return lambda value: None if value is None else encoder(value)


def _list(value: Any) -> str:
    return to_json(list(value))


def _digest_of(kept: Any) -> str | None:
    digest = kept.get("digest") if isinstance(kept, Mapping) else None
    return digest if isinstance(digest, str) else None


# Column -> how it is written. A change may name only these columns.
RUN: dict[str, Encoder] = {
    "name": text,
    "project": text,
    "user": text,
    "state": text,
    "desired": text,
    "priority": integer,
    "tags": _list,
    "job": to_json,
    "command": _list,
    "code": _maybe(text),
    "created_at": number,
    "started_at": _maybe(number),
    "ended_at": _maybe(number),
    "exit_code": _maybe(integer),
    "cause": _maybe(text),
    "reason": text,
    "attempt": integer,
    "failures": integer,
    "faults": integer,
    "not_before": number,
    "outputs": _maybe(to_json),
    "warnings": _list,
    "folder": _maybe(to_json),
}
ATTEMPT: dict[str, Encoder] = {
    "generation": integer,
    "state": text,
    "cause": _maybe(text),
    "evidence": to_json,
    "exit_code": _maybe(integer),
    "created_at": number,
    "started_at": _maybe(number),
    "ended_at": _maybe(number),
    "engine": text,
    "handle": to_json,
    "placement": lambda value: to_json(placement.encode(value)),
    "resumed_from": _maybe(text),
    "usage": to_json,
    "removed": bool,
}
TASK: dict[str, Encoder] = {
    "incarnation": integer,
    "phase": text,
    "exit_code": _maybe(integer),
    "usage": to_json,
}
CHECKPOINT: dict[str, Encoder] = {
    "attempt": integer,
    "generation": integer,
    "name": exact,
    "digest": text,
    "size": integer,
    "how": text,
    "created_at": number,
    "written_at": number,
    "step": _maybe(integer),
    "metrics": to_json,
    "kept": bool,
    "world_size": _maybe(integer),
}
PART: dict[str, Encoder] = {
    "name": exact,
    "digest": text,
    "size": integer,
    "how": text,
    "created_at": number,
    "written_at": number,
    "step": _maybe(integer),
    "metrics": to_json,
    "checkpoint": _maybe(text),
}
TRANSFER: dict[str, Encoder] = {
    "offset": integer,
    "length": integer,
    **{name: PART[name] for name in ("name", "size", "how", "created_at", "written_at", "step", "metrics")},
}
EVENT: dict[str, Encoder] = {"t": number, "kind": text, "text": text, "data": to_json}


def columns(row: Any, encoders: Mapping[str, Encoder]) -> Columns:
    return {name: encode(getattr(row, name)) for name, encode in encoders.items()}


def changed(values: Mapping[str, Any], encoders: Mapping[str, Encoder], what: str) -> Columns:
    """The columns of a change. Raises ValueError for an unknown one."""
    unknown = [name for name in values if name not in encoders]
    if unknown:
        raise ValueError(
            f"{what} has no column {unknown[0]!r} that may change; choices: {', '.join(encoders)}"
        )
    encoded = {name: encoders[name](value) for name, value in values.items()}
    if encoders is RUN and "outputs" in values:
        encoded["output_digest"] = _digest_of(values["outputs"])
    if encoders is RUN and "folder" in values:
        encoded["folder_digest"] = _digest_of(values["folder"])
    if encoders is RUN and "state" in values and values["state"] not in TERMINAL:
        encoded["removed_at"] = None  # its tasks were found again: nothing that goes on is hidden
    return encoded


def new_run(new: NewRun, run_id: str, now: float) -> Columns:
    return {
        "id": run_id,
        "key": exact(new.key),
        "fingerprint": text(new.fingerprint),
        "name": text(new.name),
        "project": text(new.project),
        "user": text(new.user),
        "state": "queued",
        "desired": "run",
        "priority": integer(new.priority),
        "tags": _list(new.tags),
        "job": to_json(new.job),
        "command": _list(new.command),
        "code": None if new.code is None else text(new.code),
        "created_at": number(now),
        "started_at": None,
        "ended_at": None,
        "exit_code": None,
        "cause": None,
        "reason": "",
        "attempt": 0,
        "failures": 0,
        "faults": 0,
        "not_before": 0.0,
        "outputs": None,
        "output_digest": None,
        "warnings": "[]",
        "folder": None,
        "folder_digest": None,
        "removed_at": None,
    }


# -- reading -----------------------------------------------------------------------------------------------------

_JSON = {
    AttemptRow: ("evidence", "handle", "placement", "usage"),
    TaskRow: ("usage",),
    CheckpointRow: ("metrics",),
    PartRow: ("metrics",),
    TransferRow: ("metrics",),
    EventRow: ("data",),
    ClusterRow: ("config",),
}
_EXACT_NAMES = (CheckpointRow, PartRow, TransferRow)
_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in _JSON}
RUN_COLUMNS = tuple(f.name for f in fields(RunRow) if f.name != "record")
"""The columns of `run_row`, in its order."""
_decoder = json.JSONDecoder()


def run_row(row: Sequence[Any], record: str | None) -> RunRow:
    """Decodes a run. It may decode tens of thousands of rows at once, so it avoids lookups by name and the slow
    constructor of a frozen dataclass."""
    values = dict(zip(RUN_COLUMNS, row, strict=False))
    try:
        values["key"] = from_exact(values["key"])
        values["job"] = _parse(values["job"])
        values["command"] = _parse(values["command"])
        values["tags"] = () if values["tags"] == "[]" else tuple(_parse(values["tags"]))
        values["warnings"] = () if values["warnings"] == "[]" else tuple(_parse(values["warnings"]))
        values["outputs"] = None if values["outputs"] is None else _parse(values["outputs"])
        values["folder"] = None if values["folder"] is None else _parse(values["folder"])
        values["record"] = {} if record is None else _parse(record)
    except (ValueError, TypeError) as exc:
        raise damaged("a run", exc) from exc
    run = object.__new__(RunRow)
    run.__dict__.update(values)
    return run


def _parse(value: str) -> Any:
    found, end = _decoder.raw_decode(value)
    if end != len(value):
        raise ValueError(f"{value[end : end + 20]!r} after the end")
    return found


def decode(kind: type[Row], row: Found) -> Row:
    """A row of any kind. Ignores columns that are not its fields."""
    try:
        values = {name: row[name] for name in _NAMES[kind]}
        for name in _JSON[kind]:
            if values[name] is not None:
                values[name] = json.loads(values[name])
        if kind in _EXACT_NAMES:
            values["name"] = from_exact(values["name"])
        if kind is AttemptRow:
            values["placement"] = placement.decode(values["placement"])
        return kind(**values)
    except (ValueError, TypeError) as exc:
        raise damaged(f"a row of {kind.__name__}", exc) from exc


def damaged(what: str, exc: Exception) -> StoreDamaged:
    return StoreDamaged(f"the database is damaged: {what} in it cannot be read: {exc}", hint=RESTORE_HINT)


RESTORE_HINT = "Restore the last consistent copy: stoker backup restore"
