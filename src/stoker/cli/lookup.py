"""Which run a reference means.

The server understands an id, a name (its newest run) and the beginning of an id. `@last` and `-`, the newest
run of all, are looked up here. The call uses the reference as typed, so an id costs no extra request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from stoker.errors import NotFound

if TYPE_CHECKING:
    from stoker.cli.context import Context

T = TypeVar("T")
LAST = ("-", "@last")


def on_run(ctx: Context, ref: str, call: Callable[[str], T]) -> T:
    """`call(ref)` for the run that `ref` means."""
    if ref in LAST:
        return call(newest(ctx))
    if not plausible(ref):
        raise NotFound(f"no run {ref[:100]!r}", hint="stoker ps -a lists all runs.")
    return call(ref)


def plausible(ref: str) -> bool:
    """Whether it could be an id or a name, and is one word of a URL."""
    return (
        0 < len(ref) <= 200
        and ref.isascii()
        and all(char.isalnum() or char in "-_." for char in ref)
        and ref.strip(".") != ""
    )


def newest(ctx: Context) -> str:
    runs = ctx.client.runs(limit=1)["runs"]
    if not runs:
        raise NotFound("there are no runs yet", hint="Start one: stoker run train.py")
    return str(runs[0]["id"])
