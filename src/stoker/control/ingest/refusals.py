"""Refused checkpoints, in the warnings of their run until a checkpoint of the same name is kept. Pure.

The event reports the refusal at once; the warnings show it to users and scripts later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stoker.control.ingest import validation
from stoker.spec import refusals
from stoker.store.rows import AddCheckpoint, AddEvent, Change, EventRow

_REASON = 300
"""Characters of a reason."""


def said(name: object, why: object) -> tuple[str, dict[str, str]]:
    """Text and data of the event, as `after` reads them."""
    name, why = validation.text(name, validation.NAME), validation.text(why, _REASON)
    return refusals.line_of(name, why), {"name": name, "refused": why}


def after(warnings: Sequence[str], changes: Iterable[Change]) -> tuple[str, ...]:
    """The warnings of a run after these changes."""
    found = refusals.read(warnings)
    for change in changes:
        if isinstance(change, AddCheckpoint):
            found.keep(change.row.name)
        elif isinstance(change, AddEvent) and "refused" in change.row.data:
            found.add(change.row.data["name"], change.row.data["refused"])
    return found.warnings()


def of_last_attempt(events: Iterable[EventRow], changes: Iterable[Change]) -> bool:
    """Whether a checkpoint of the newest attempt was refused, by the run's events and the changes about to be recorded.
    Not counted: a stored checkpoint that was found damaged. It has an id, and no attempt has its files."""
    found = False
    for event in [*events, *(change.row for change in changes if isinstance(change, AddEvent))]:
        if event.kind == "starting":
            found = False
        elif "refused" in event.data and "id" not in event.data:
            found = True
    return found


def places(found: Mapping[int, str], days: str) -> str:
    """Text: where the files of these attempts are, newest first. Empty: none."""
    text = ""
    for number, place in sorted(found.items(), reverse=True):
        text += (
            f", what attempt {number} wrote in {place}"
            if text
            else f"what attempt {number} wrote is left for {days} in {place}"
        )
    return text
