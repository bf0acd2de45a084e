"""Which run a person means: an id, a name, the beginning of an id, or `@last`.

The id itself costs no extra request: the call is made with what was typed, and only when the server does not
know it is the list consulted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.cli import term
from stoker.cli.guess import nearest
from stoker.cli.render import LIVE
from stoker.errors import Conflict, NotFound

if TYPE_CHECKING:
    from stoker.cli.context import Context

T = TypeVar("T")
LAST = ("-", "@last")
WINDOW = 500
"""How far back a beginning of an id is looked for."""


def on_run(ctx: Context, ref: str, call: Callable[[str], T]) -> T:
    """`call(id)` for the run that `ref` means."""
    if ref in LAST or not plain(ref):
        return call(find(ctx, ref))
    try:
        return call(ref)
    except NotFound as exc:
        if exc.details.get("what", "run") != "run":
            raise
        found = find(ctx, ref)
        if found == ref:
            raise
        return call(found)


def plain(ref: str) -> bool:
    """May stand in a URL as it is. Anything else is not an id."""
    return bool(ref) and all(char.isalnum() or char in "-_." for char in ref) and ref.isascii()


def find(ctx: Context, ref: str) -> str:
    """The id of the run that `ref` means. A name means the one live run of that name, else the newest."""
    if ref in LAST:
        runs = ctx.client.runs(limit=1)["runs"]
        if not runs:
            raise NotFound("there are no runs yet", hint="Start one: stoker run train.py")
        return str(runs[0]["id"])
    named: list[dict[str, Any]] = ctx.client.runs(name=ref, limit=50)["runs"] if ref else []
    if named:
        return _one_of_name(ref, named)
    recent: list[dict[str, Any]] = ctx.client.runs(limit=WINDOW)["runs"]
    begins = [run for run in recent if ref and str(run["id"]).startswith(ref)]
    if len(begins) == 1:
        return str(begins[0]["id"])
    if begins:
        raise Conflict(f"{ref!r} could be {len(begins)} runs: {_names(begins)}", hint="Type more of the id.")
    raise _no_run(ref, recent)


def _one_of_name(ref: str, named: list[dict[str, Any]]) -> str:
    live = [run for run in named if run["state"] in LIVE]
    if len(live) > 1:
        raise Conflict(f"{len(live)} live runs are named {ref!r}: {_names(live)}", hint="Use an id.")
    return str((live or named)[0]["id"])


def _names(runs: list[dict[str, Any]]) -> str:
    shown = ", ".join(term.safe(run["id"]) for run in runs[:5])
    return shown + (", ..." if len(runs) > 5 else "")


def _no_run(ref: str, recent: list[dict[str, Any]]) -> NotFound:
    close = nearest(ref, [str(run["id"]) for run in recent] + [str(run["name"]) for run in recent])
    hint = f"Did you mean {term.safe(close)}?" if close else "stoker ps -a lists all runs."
    return NotFound(f"no run {ref!r}", hint=hint)
