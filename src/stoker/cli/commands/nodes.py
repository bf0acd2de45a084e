"""`stoker nodes`."""

from __future__ import annotations

from typing import Any

from stoker.cli.context import Context
from stoker.cli.params import JSON, Command
from stoker.cli.rendering import terminal, units
from stoker.cli.rendering.tables import Cell, Column, table


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
        Column("TASKS", right=True),
        Column("ISOLATION", shrink=True),
    )
    rows = [_row(node) for node in answer["nodes"]]
    for line in table(columns, rows, fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)
    for node in answer["nodes"]:
        for line in (*_gpus(node), *_set_aside(node)):
            ctx.print(line)
    return 0


def _set_aside(node: dict[str, Any]) -> list[str]:
    """Nodes and GPUs that too many tasks failed on: the scheduler avoids them or uses them last."""
    lines = []
    for aside in node.get("set_aside") or []:
        what = f"GPU {aside['gpu']} of {node['name']}" if aside.get("gpu") else node["name"]
        kept = "used last" if aside.get("spared") else "set aside"
        lines.append(f"  {terminal.safe(what)} is {kept}: {terminal.safe(aside['reason'])}")
    return lines


def _row(node: dict[str, Any]) -> list[Cell | str]:
    used = node.get("used") or {}
    gpus = node.get("gpus") or []
    isolation = node.get("isolation") or {}
    enforced = ", ".join(
        f"{terminal.safe(key)}: {terminal.safe(value)}" for key, value in sorted(isolation.items())
    )
    return [
        Cell(terminal.safe(node["name"]), ("bold",)),
        Cell("yes", ("green",)) if node.get("ready") else Cell("no", ("red", "bold")),
        f"{units.number(used.get('cpu') or 0)}/{units.number(node.get('cpu'))}",
        f"{units.size(used.get('memory') or 0)}/{units.size(node.get('memory'))}",
        f"{_count(used.get('gpus'))}/{len(gpus)}" if gpus else "-",
        str(len({run["id"] for run in node.get("runs") or []})),
        str(len(node.get("runs") or [])),
        enforced or Cell("none", ("yellow",)),
    ]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict) else int(value or 0)


def _gpus(node: dict[str, Any]) -> list[str]:
    """One line per GPU of a machine. GPUs of a cluster's node have no names: one line per run."""
    gpus = [gpu for gpu in node.get("gpus") or [] if isinstance(gpu, dict)]
    owners = {gpu: _owner(run, node) for run in node.get("runs") or [] for gpu in run.get("gpus") or []}
    if any(gpu.get("memory") for gpu in gpus) or node.get("cluster") in (None, "local"):
        return [_gpu(gpu, owners.get(gpu.get("id"))) for gpu in gpus]
    name = terminal.safe(node["name"])
    lines = []
    for run in node.get("runs") or []:
        held = len(run.get("gpus") or [])
        if held:
            model = terminal.safe(gpus[0].get("model") or "") if gpus else ""
            lines.append(
                f"  {name}  {units.plural(held, 'GPU')}  {model}  {terminal.safe(_owner(run, node))}".rstrip()
            )
    return lines


def _owner(run: dict[str, Any], node: dict[str, Any]) -> str:
    """The run, and its task where the run has several here."""
    task = run.get("task")
    alone = sum(other["id"] == run["id"] for other in node.get("runs") or []) == 1 and task == "worker-0"
    return str(run["id"]) if alone or not task else f"{run['id']} {task}"


def _gpu(gpu: dict[str, Any], owner: str | None) -> str:
    state = (
        "" if gpu.get("healthy", True) else f"  set aside: {terminal.safe(gpu.get('reason') or 'unhealthy')}"
    )
    held = f"  {terminal.safe(owner)}" if owner else ""
    model = terminal.safe(gpu.get("model") or "")
    return (
        f"  gpu {terminal.safe(gpu.get('index', '?'))}  {model}  {units.size(gpu.get('memory'))}{held}{state}"
    )


COMMANDS = {
    "nodes": Command(
        "nodes",
        nodes,
        summary="nodes and GPUs, and the runs on them",
        help="The nodes: used and total CPU, memory and GPUs, and how each limit is enforced.",
        options=[JSON],
        examples=[("stoker nodes", "")],
        shapes="a list of nodes, as `GET /api/v1/nodes` gives them",
    )
}
