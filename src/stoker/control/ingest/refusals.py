"""Checkpoints that are not offered: said in the warnings of their run, until one of that name is kept. Pure.

An event says it at the moment; the warnings are what a person and a script see who look at the run later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.control.ingest import validation
from stoker.spec import refusals
from stoker.store.rows import AddCheckpoint, AddEvent, Change

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
