"""`stoker cluster`: the clusters runs can go to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.cli import checklist
from stoker.cli.context import Context
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal, units
from stoker.cli.rendering.tables import Cell, Column, table
from stoker.errors import SpecError

Json = dict[str, Any]
_STATUS = {True: "ok", False: "fail", None: "warn"}


def add(
    ctx: Context,
    *,
    name: str,
    context: str | None,
    namespace: str | None,
    kubeconfig: str | None,
    in_cluster: bool,
    image: str | None,
    set: Sequence[str],
    as_json: bool,
) -> int:
    config: Json = {"kubeconfig": "in-cluster" if in_cluster else _kubeconfig(kubeconfig)}
    given = {"context": context, "namespace": namespace, "default_image": image}
    config.update({key: value for key, value in given.items() if value is not None})
    answer = ctx.client.add_cluster(name, config, list(set))
    if as_json:
        ctx.json(answer)
        return 0
    ctx.note(f"added {terminal.safe(name)}; checking it now")
    code = _check(ctx, name)
    ctx.note(f"try it: stoker run --cluster {terminal.safe(name)} -- python -c 'print(6 * 7)'")
    return code


def _kubeconfig(given: str | None) -> str:
    """Where kubectl would look. Absolute, because the server has another working directory."""
    names = (
        [given] if given else [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    )
    paths = [Path(part).expanduser().absolute() for part in names or ["~/.kube/config"]]
    if not any(path.is_file() for path in paths):
        raise SpecError(
            f"no kubeconfig at {', '.join(str(path) for path in paths)}",
            hint="Name one with --kubeconfig, or set KUBECONFIG as for kubectl.",
        )
    return os.pathsep.join(str(path) for path in paths)


def change(ctx: Context, *, name: str, settings: Sequence[str], as_json: bool) -> int:
    answer = ctx.client.change_cluster(name, list(settings))
    if as_json:
        ctx.json(answer)
    else:
        ctx.note(f"changed {terminal.safe(name)}; runs that are on it go on as they were")
    return 0


def listing(ctx: Context, *, as_json: bool) -> int:
    found = ctx.client.clusters()["clusters"]
    if as_json:
        ctx.json(found)
        return 0
    columns = (
        Column("CLUSTER"),
        Column("REACHABLE"),
        Column("NODES", right=True),
        Column("CPU", right=True),
        Column("MEMORY", right=True),
        Column("GPU", right=True),
        Column("RUNS", right=True),
        Column("WHERE", shrink=True),
    )
    for line in table(columns, [_row(one) for one in found], fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)
    if len(found) == 1:
        ctx.note("only this machine so far; add a cluster: stoker cluster add NAME [--context CONTEXT]")
    return 0


def _row(one: Json) -> list[Cell | str]:
    config = one.get("config") or {}
    where = config.get("context") or config.get("kubeconfig") or "this machine"
    if config.get("namespace"):
        where = f"{where} ({config['namespace']})"
    if one.get("trouble"):
        where = one["trouble"]
    reachable = Cell("yes", ("green",)) if one.get("reachable") else Cell("no", ("red", "bold"))
    return [
        Cell(terminal.safe(one["name"]) + (" *" if one.get("default") else ""), ("bold",)),
        reachable,
        f"{one['ready']}/{one['nodes']}",
        units.number(one["cpu"]),
        units.size(one["memory"]),
        str(one["gpus"]) if one["gpus"] else "-",
        str(one["runs"]),
        terminal.safe(str(where)),
    ]


def check(ctx: Context, *, name: str, as_json: bool) -> int:
    if as_json:
        found = ctx.client.check_cluster(name)["checks"]
        ctx.json(found)
        return 1 if any(one["ok"] is False for one in found) else 0
    return _check(ctx, name)


def _check(ctx: Context, name: str) -> int:
    found = ctx.client.check_cluster(name)["checks"]
    return checklist.show(
        ctx,
        [
            checklist.fact(one["name"], _STATUS[one["ok"]], one["text"], one.get("hint") or "")
            for one in found
        ],
    )


def remove(ctx: Context, *, name: str, as_json: bool) -> int:
    answer = ctx.client.remove_cluster(name)
    if as_json:
        ctx.json(answer)
    else:
        ctx.note(f"removed {terminal.safe(name)}")
    return 0


_NAME = Argument("name", help="The cluster's name here.")
_SUBS = (
    Command(
        "add",
        add,
        summary="add a cluster: its kubeconfig, context and namespace",
        help="Add a cluster under a name of your choice. Nothing is installed there: pods are made with your own "
        "kubeconfig, and Stoker's few files travel with them. The kubeconfig is read where it is, so rotated tokens "
        "and exec plugins keep working.",
        arguments=[_NAME],
        options=[
            Option("--context", help="Context of the kubeconfig; default: its current one."),
            Option("--namespace", help="Namespace for the pods; default: the context's."),
            Option("--kubeconfig", metavar="FILE", help="Default: KUBECONFIG, else ~/.kube/config."),
            Option("--in-cluster", flag=True, help="Use the service account of the pod the server runs in."),
            Option("--image", help="Image for jobs that name none."),
            Option(
                "--set", multiple=True, metavar="KEY=VALUE", help="Any further setting (docs/clusters.md)."
            ),
            JSON,
        ],
        examples=[
            ("stoker cluster add gpu-prod --context prod --namespace training", ""),
            ("stoker cluster add lab --set pools.a100.selector.gpu=a100", "with a node pool"),
        ],
        shapes="the cluster, as in `cluster ls --json`",
    ),
    Command(
        "ls",
        listing,
        summary="the clusters, what they have and whether they answer",
        options=[JSON],
        shapes="a list of `{name, default, reachable, trouble, nodes, ready, cpu, memory, gpus, runs, calls, config}`",
    ),
    Command(
        "check",
        check,
        summary="check that everything a run needs works there, and say what to fix",
        arguments=[_NAME],
        options=[JSON],
        shapes="a list of `{name, ok: true|false|null, text, hint}`; null is a warning",
    ),
    Command(
        "set",
        change,
        summary="change settings of a cluster",
        arguments=[_NAME, Argument("settings", metavar="KEY=VALUE", count=-2)],
        options=[JSON],
        examples=[("stoker cluster set gpu-prod default_image=python:3.12 start_deadline=20m", "")],
        shapes="the cluster, as in `cluster ls --json`",
    ),
    Command(
        "rm",
        remove,
        summary="forget a cluster that has no runs",
        arguments=[_NAME],
        options=[JSON],
        shapes="`{removed}`",
    ),
)

COMMANDS = {
    "cluster": Command(
        "cluster",
        None,
        summary="the Kubernetes clusters runs can go to",
        help="Kubernetes clusters. `stoker run --cluster NAME` (or `cluster:` in the job file) sends a run to one; `any` "
        "takes the first that has room.",
        subcommands=_SUBS,
    )
}
