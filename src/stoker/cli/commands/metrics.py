"""`stoker metrics`."""

from __future__ import annotations

from typing import Any

from stoker.cli.context import Context
from stoker.cli.guess import nearest
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal, units
from stoker.cli.rendering.plot import numeric, plot
from stoker.cli.rendering.tables import Column, table
from stoker.errors import NotFound

POINTS = 2000
PLOTS = 6
"""Curves drawn without being asked by name."""


def metrics(
    ctx: Context,
    *,
    run: str,
    key: str | None,
    all_ranks: bool,
    as_plot: bool,
    no_plot: bool,
    as_json: bool,
) -> int:
    if key is None:
        return _list(ctx, run, all_ranks, as_plot, no_plot, as_json)
    run_id, keys = _keys(ctx, run)
    names = [str(entry["key"]) for entry in keys]
    if key not in names:
        close = nearest(key, names)
        known = ", ".join(terminal.safe(name) for name in names[:10]) or "none yet"
        raise NotFound(
            f"{run_id} has no metric {key!r}",
            hint=f"Did you mean {close}?" if close else f"Metrics: {known}.",
        )
    found = ctx.client.metric(run_id, key, max_points=POINTS)
    if as_json:
        ctx.json(found)
        return 0
    if ctx.columns is not None or as_plot:
        _draw(ctx, str(found["key"]), found["points"], rows=12)
        return 0
    ctx.print("step\tvalue\ttime\tattempt")
    for step, value, t, attempt in found["points"]:
        ctx.print(f"{step}\t{value}\t{t}\t{attempt}")
    return 0


def _keys(ctx: Context, run: str) -> tuple[str, list[dict[str, Any]]]:
    used = ""

    def call(run_id: str) -> dict[str, Any]:
        nonlocal used
        used = run_id
        answer: dict[str, Any] = ctx.client.metrics(run_id)
        return answer

    answer = on_run(ctx, run, call)
    return used, answer["keys"]


def _list(ctx: Context, run: str, all_ranks: bool, as_plot: bool, no_plot: bool, as_json: bool) -> int:
    run_id, keys = _keys(ctx, run)
    if not all_ranks:
        keys = _plain(keys)
    if as_json:
        ctx.json(keys)
        return 0
    if not keys:
        ctx.note(
            f"{terminal.safe(run_id)} has reported no metrics; report some with stoker.report(step=..., loss=...)"
        )
        return 0
    columns = (
        Column("METRIC", shrink=True),
        Column("LAST", right=True),
        Column("MIN", right=True),
        Column("MAX", right=True),
        Column("STEP", right=True),
        Column("POINTS", right=True),
    )
    rows = [
        (
            terminal.safe(entry["key"]),
            *(
                terminal.safe(units.number(entry.get(name)))
                for name in ("last", "min", "max", "last_step", "count")
            ),
        )
        for entry in keys
    ]
    for line in table(columns, rows, fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)
    if as_plot or (ctx.columns is not None and not no_plot):
        for entry in keys if as_plot else keys[:PLOTS]:
            points = ctx.client.metric(run_id, entry["key"], max_points=POINTS)["points"]
            ctx.print()
            _draw(ctx, str(entry["key"]), points, rows=5)
    return 0


def _plain(keys: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what other tasks report under a name that the first task reports too: `loss@worker-1` beside `loss`."""
    names = {entry["key"] for entry in keys}
    return [
        entry for entry in keys if "task" not in entry or str(entry["key"]).rpartition("@")[0] not in names
    ]


def _draw(ctx: Context, key: str, points: list[Any], *, rows: int) -> None:
    drawable = numeric(points)
    left_out = len(points) - len(drawable)
    note = f"  ({units.plural(left_out, 'point')} NaN or infinite)" if left_out else ""
    ctx.print(ctx.style(terminal.safe(key), "bold") + note)
    for line in plot(
        drawable, columns=min(ctx.columns or 80, 120), rows=rows, unicode=terminal.unicode_ok(ctx.out)
    ):
        ctx.print(line)


COMMANDS = {
    "metrics": Command(
        "metrics",
        metrics,
        summary="a run's metrics, with small plots",
        help="A run's metrics: last, smallest and largest value of each, with small plots on a terminal. With KEY: one "
        "curve, larger; in a pipe its points, as tab-separated step, value, time, attempt.",
        arguments=[Argument("run", complete="run"), Argument("key", count=0)],
        options=[
            Option("--plot", dest="as_plot", flag=True, help="Plot in a pipe as well, and every metric."),
            Option("--no-plot", flag=True, help="No plots in the list."),
            Option(
                "--all-ranks",
                flag=True,
                help="Show what every task reports, as in `loss@worker-1`; default: the first task's values.",
            ),
            JSON,
        ],
        examples=[("stoker metrics digits-7f3k", ""), ("stoker metrics digits-7f3k loss", "one curve")],
        shapes="a list of `{key, count, last, min, max, last_step}`, with `task` where another than the first reported it; with KEY `{key, points}`",
    )
}
