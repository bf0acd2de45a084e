"""Checkpoints that are not offered: said in the warnings of their run, until one of that name is kept. Pure.

An event says it at the moment; the warnings are what a person and a script see who look at the run later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stoker.control.ingest import validation
from stoker.spec import refusals
from stoker.store.rows import AddCheckpoint, AddEvent, Change, EventRow

_REASON = 300
"""Characters of a reason."""


def said(name: object, why: object) -> tuple[str, dict[str, str]]:
    """Text and data of the event: `after` reads them."""
    name, why = validation.text(name, validation.NAME), validation.text(why, _REASON)
    return refusals.line_of(name, why), {"name": name, "refused": why}


def after(warnings: Sequence[str], changes: Iterable[Change]) -> tuple[str, ...]:
    """The warnings of a run, once these changes are recorded."""
    found = refusals.read(warnings)
    for change in changes:
        if isinstance(change, AddCheckpoint):
            found.keep(change.row.name)
        elif isinstance(change, AddEvent) and "refused" in change.row.data:
            found.add(change.row.data["name"], change.row.data["refused"])
    return found.warnings()


def of_last_attempt(said: Iterable[EventRow], changes: Iterable[Change]) -> bool:
    """Whether something was refused that the attempt which started last wrote: by the run's events, and what is about to be
    recorded. A stored checkpoint that was found damaged has an id, and no files in any attempt."""
    found = False
    for event in [*said, *(change.row for change in changes if isinstance(change, AddEvent))]:
        if event.kind == "starting":
            found = False
        elif "refused" in event.data and "id" not in event.data:
            found = True
    return found


def places(found: Mapping[int, str], days: str) -> str:
    """Where the files of these attempts are, the newest first; empty: nowhere."""
    said = ""
    for number, place in sorted(found.items(), reverse=True):
        said += (
            f", what attempt {number} wrote in {place}"
            if said
            else f"what attempt {number} wrote is left for {days} in {place}"
        )
    return said
