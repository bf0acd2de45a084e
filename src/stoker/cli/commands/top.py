"""`stoker top`."""

from __future__ import annotations

import time
from typing import Any

from stoker.cli.context import Context
from stoker.cli.params import JSON, Command, Option
from stoker.cli.rendering import terminal, units
from stoker.cli.rendering.tables import Cell, Column, table

Json = dict[str, Any]
_BAR = 10
_CLEAR = "\x1b[H\x1b[2J"


def top(ctx: Context, *, watch: bool, every: float, as_json: bool) -> int:
    if as_json:
        ctx.json(ctx.client.nodes()["nodes"])
        return 0
    while True:
        lines = _lines(ctx, ctx.client.nodes()["nodes"])
        if watch and terminal.is_terminal(ctx.out):
            ctx.out.write(_CLEAR)
        for line in lines:
            ctx.print(line)
        ctx.out.flush()
        if not watch:
            return 0
        time.sleep(max(0.5, every))


def _lines(ctx: Context, nodes: list[Json]) -> list[str]:
    columns = (
        Column("NODE / RUN"),
        Column("CPU"),
        Column("MEMORY", spare=True),
        Column("GPU", spare=True),
        Column("USED", shrink=True),
        Column("USER", spare=True),
    )
    rows: list[list[Cell | str]] = []
    wide = _BAR if ctx.columns is None or ctx.columns >= 100 else 0
    for node in nodes:
        rows.append(_node(node, wide))
        here = sorted(node.get("runs") or [], key=lambda run: (str(run["id"]), natural(run.get("task"))))
        several = {run["id"] for run in here if sum(other["id"] == run["id"] for other in here) > 1}
        rows += [_run(run, named=run["id"] in several or run.get("task") != "worker-0") for run in here]
    return table(columns, rows, fit=ctx.columns, color=ctx.out_color)


def _node(node: Json, wide: int) -> list[Cell | str]:
    """`wide`: the width of the bars; 0 on a narrow terminal."""
    used = node.get("used") or {}
    gpus = len(node.get("gpus") or [])
    style = ("bold",) if node.get("ready") else ("red", "bold")
    return [
        Cell(terminal.safe(node["name"]) + ("" if node.get("ready") else " (not ready)"), style),
        f"{bar(used.get('cpu') or 0, node.get('cpu') or 0, wide)}{units.number(used.get('cpu') or 0)}/{units.number(node.get('cpu'))}",
        f"{bar(used.get('memory') or 0, node.get('memory') or 0, wide)}{units.size(used.get('memory') or 0)}/{units.size(node.get('memory'))}",
        f"{bar(used.get('gpus') or 0, gpus, wide)}{used.get('gpus') or 0}/{gpus}" if gpus else "-",
        "",
        "",
    ]


def natural(task: Any) -> tuple[str, int]:
    """worker-2 before worker-10."""
    role, _, number = str(task or "").rpartition("-")
    return role, int(number) if number.isdigit() else 0


def _run(run: Json, *, named: bool) -> list[Cell | str]:
    """`named`: show the task too, for a run with several of them here."""
    usage = run.get("usage") or {}
    parts = []
    if usage.get("cpu") is not None:
        parts.append(f"{units.number(round(usage['cpu'], 1))} CPU")
    if usage.get("memory"):
        parts.append(units.size(usage["memory"]))
    if usage.get("gpu") is not None:
        parts.append(f"GPU {usage['gpu']:.0f}%")
    elif usage.get("gpu_peak") is not None:
        parts.append(f"GPU up to {usage['gpu_peak']:.0f}%")
    task = f" {terminal.safe(run['task'])}" if named and run.get("task") else ""
    return [
        f"  {terminal.safe(run['id'])}{task}",
        units.number(run.get("cpu") or 0),
        units.size(run["memory"]) if run.get("memory") else "-",
        str(len(run.get("gpus") or [])) if run.get("gpus") else "-",
        terminal.safe(", ".join(parts)),
        terminal.safe(run.get("user") or ""),
    ]


def bar(used: float, total: float, wide: int = _BAR) -> str:
    """`####...... `: the used share."""
    share = min(1.0, used / total) if total else 0.0
    full = round(share * wide)
    return "#" * full + "." * (wide - full) + (" " if wide else "")


COMMANDS = {
    "top": Command(
        "top",
        top,
        summary="what each run uses on which node, live",
        help="Every node with its CPUs, memory and GPUs, how much of each is held by which run, and what each run "
        "really uses. `--watch` goes on until interrupted.",
        options=[
            Option("--watch", "-w", flag=True, help="Refresh until interrupted."),
            Option("--every", kind=float, default=2.0, metavar="SECONDS", help="How often, with --watch."),
            JSON,
        ],
        examples=[("stoker top", ""), ("stoker top -w", "")],
        shapes="a list of nodes, as `GET /api/v1/nodes` gives them",
    )
}
