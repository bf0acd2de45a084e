"""`stoker nodes`."""

from __future__ import annotations

from typing import Any

from stoker.cli import human, term
from stoker.cli.context import Context
from stoker.cli.params import JSON, Command
from stoker.cli.render import Cell, Column, table


def nodes(ctx: Context, *, as_json: bool) -> int:
    answer = ctx.client.nodes()
    if as_json:
        ctx.json(answer["nodes"])
        return 0
    columns = (
        Column("NODE"),
        Column("READY"),
        Column("CPU"),
        Column("MEMORY"),
        Column("GPU"),
        Column("RUNS", right=True),
        Column("ISOLATION", shrink=True),
    )
    rows = [_row(node) for node in answer["nodes"]]
    for line in table(columns, rows, fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)
    for node in answer["nodes"]:
        for gpu in node.get("gpus") or []:
            ctx.print(_gpu(node, gpu))
    return 0


def _row(node: dict[str, Any]) -> list[Cell | str]:
    used = node.get("used") or {}
    gpus = node.get("gpus") or []
    isolation = node.get("isolation") or {}
    enforced = ", ".join(f"{term.safe(key)}: {term.safe(value)}" for key, value in sorted(isolation.items()))
    return [
        Cell(term.safe(node["name"]), ("bold",)),
        Cell("yes", ("green",)) if node.get("ready") else Cell("no", ("red", "bold")),
        f"{human.number(used.get('cpu') or 0)}/{human.number(node.get('cpu'))}",
        f"{human.size(used.get('memory') or 0)}/{human.size(node.get('memory'))}",
        f"{_count(used.get('gpus'))}/{len(gpus)}" if gpus else "-",
        str(len(node.get("runs") or [])),
        enforced or Cell("none", ("yellow",)),
    ]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict) else int(value or 0)


def _gpu(node: dict[str, Any], gpu: Any) -> str:
    if not isinstance(gpu, dict):
        return f"  gpu {term.safe(gpu)}"
    state = "" if gpu.get("healthy", True) else f"  set aside: {term.safe(gpu.get('reason') or 'unhealthy')}"
    model = term.safe(gpu.get("model") or "")
    return f"  gpu {term.safe(gpu.get('index', '?'))}  {model}  {human.size(gpu.get('memory'))}{state}"


COMMANDS = {
    "nodes": Command(
        "nodes",
        nodes,
        summary="what there is to run on and who uses it",
        help="What there is to run on: used and total CPU, memory and GPUs, and which limits are enforced how.",
        options=[JSON],
        examples=[("stoker nodes", "")],
        shapes="a list of nodes, as `GET /api/v1/nodes` gives them",
    )
}
