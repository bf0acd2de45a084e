"""`stoker disk`: what takes the room."""

from __future__ import annotations

from typing import Any

from stoker.cli.context import Context
from stoker.cli.params import JSON, Command
from stoker.cli.rendering import terminal, units
from stoker.cli.rendering.tables import Cell, Column, state_cell, table

KINDS = {
    "checkpoints": ("checkpoints", ""),
    "outputs": ("outputs", ""),
    "folder": ("working folders", "what scripts wrote beside their code"),
    "code": ("code", ""),
    "trash": ("trash", "only removed runs have it: stoker prune"),
    "rest": ("unreferenced", "freed within a day"),
    "logs": ("logs", ""),
    "tasks": ("task directories", "of runs that are not over, or not cleaned up"),
    "setups": ("setup environments", "made by `setup:`"),
    "backups": ("backups", ""),
    "database": ("database", ""),
    "other": ("other", "the server's log, caches"),
}


def disk(ctx: Context, *, as_json: bool) -> int:
    found = ctx.client.disk()
    if as_json:
        ctx.json(found)
        return 0
    sizes = found["kinds"]
    rows = [
        (label, "elsewhere" if sizes[kind] is None else units.size(sizes[kind]), what)
        for kind, (label, what) in KINDS.items()
        if kind in sizes
    ]
    rows += [("total", units.size(found["total"]), terminal.safe(found["home"]))]
    rows += [("free", units.size(found["free"]), "")]
    columns = (Column("WHAT"), Column("SIZE", right=True), Column("", shrink=True))
    for line in table(columns, rows, fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)
    if found["runs"]:
        ctx.print()
        for line in _runs(ctx, found["runs"]):
            ctx.print(line)
    return 0


def _runs(ctx: Context, runs: list[dict[str, Any]]) -> list[str]:
    kinds = ("total", "checkpoints", "outputs", "folder", "logs", "tasks")
    columns = [Column("LARGEST RUNS"), Column("STATE")]
    columns += [Column(kind.upper(), right=True, spare=kind != "total") for kind in kinds]
    rows: list[list[Cell | str]] = [
        [
            terminal.safe(run["id"]),
            state_cell(run["state"]),
            *(units.size(run["bytes"].get(kind)) for kind in kinds),
        ]
        for run in runs
    ]
    return table(columns, rows, fit=ctx.columns, color=ctx.out_color)


COMMANDS = {
    "disk": Command(
        "disk",
        disk,
        summary="what takes the room in the home, and the largest runs",
        help="What takes the room in the home of the server, by kind, the free room of its disk, and the ten largest "
        "runs. What several kinds share counts for the first in the list; what several runs share counts for each run.",
        options=[JSON],
        examples=[("stoker disk", "")],
        shapes="what `GET /api/v1/disk` answers",
    )
}
