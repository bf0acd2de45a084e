"""Findings with a mark, and what to do about each: `doctor`, `cluster check`."""

from __future__ import annotations

from typing import Any

from stoker.cli.context import Context
from stoker.cli.rendering import tables, terminal, units

Json = dict[str, Any]
MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def fact(name: str, status: str, text: str, fix: str = "") -> Json:
    return {"name": name, "status": status, "text": text, "fix": fix}


def show(ctx: Context, facts: list[Json]) -> int:
    """Prints the findings, then how many are bad. Returns the exit code: 1 when one fails; a warning is no failure."""
    failed = sum(found["status"] == "fail" for found in facts)
    warned = sum(found["status"] == "warn" for found in facts)
    wide = max((terminal.width(terminal.safe(found["name"])) for found in facts), default=0)
    for found in facts:
        _print(ctx, found, wide)
    ctx.out.flush()
    if failed or warned:
        ctx.note(f"\n{_count(failed, 'problem')}, {_count(warned, 'warning')}")
    else:
        ctx.note("\nno problems")
    return 1 if failed else 0


def _print(ctx: Context, found: Json, wide: int) -> None:
    mark, colour = MARKS.get(found["status"], ("?", "red"))
    room = 100_000 if ctx.columns is None else ctx.columns - wide - 8
    first, *rest = tables.wrap(str(found["text"]), room) or [""]
    ctx.print(
        f"{ctx.style(f'{mark:<4}', colour)}  {terminal.pad(terminal.safe(found['name']), wide)}  {first}".rstrip()
    )
    indent = " " * (wide + 8)
    for line in rest:
        ctx.print(indent + line)
    if found.get("fix") and found["status"] != "ok":
        for line in tables.wrap(f"fix: {found['fix']}", room):
            ctx.print(ctx.style(indent + line, "cyan"))


def _count(number: int, word: str) -> str:
    return units.plural(number, word) if number else f"no {word}s"
