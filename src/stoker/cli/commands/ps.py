"""`stoker ps`: the list of runs."""

from __future__ import annotations

import time
from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.guess import nearest
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering.tables import LIVE, STATE_STYLES, runs_table

DEFAULT = 20
PAGE = 500


def ps(
    ctx: Context,
    *,
    filters: tuple[str, ...],
    words: tuple[str, ...],
    all: bool,
    limit: int | None,
    as_json: bool,
    watch: bool,
    trash: bool,
) -> int:
    query = parse_filters((*filters, *words))
    if trash:
        query["trash"] = True
    if limit is not None and limit < 1:
        raise UsageMistake(f"--limit: {limit} is not at least 1", hint="For all runs: stoker ps -a")
    if all and limit is not None:
        raise UsageMistake("--all and --limit exclude each other", hint="Use one of them.")
    if watch:
        return _watch(ctx, query, all, limit, as_json)
    runs, more = collect(ctx, query, all, limit)
    if as_json:
        ctx.json(runs)
        return 0
    _print(ctx, runs, more, bool(query), trash)
    return 0


def parse_filters(expressions: tuple[str, ...]) -> dict[str, Any]:
    """A query from `state=running,queued`, `tag=baseline`, `name=digits`, `name~=dig`, `project=vision`."""
    query: dict[str, Any] = {}
    for expression in expressions:
        key, equals, value = expression.partition("=")
        if key == "name~":
            key = "name_like"
        if not equals or not value or key not in ("state", "tag", "name", "name_like", "project"):
            raise UsageMistake(
                f"cannot understand the filter {expression!r}",
                hint="Filters: state=running,queued  tag=baseline  name=digits  name~=dig  project=vision",
            )
        if key == "state":
            _check_states(value)
        if key in ("state", "tag"):
            query[key] = [*query.get(key, []), *value.split(",")]
        elif key in query:
            raise UsageMistake(f"the filter {expression.split('=')[0]}= is given twice", hint="Give it once.")
        else:
            query[key] = value
    return query


def _check_states(value: str) -> None:
    for state in value.split(","):
        if state not in STATE_STYLES:
            close = nearest(state, list(STATE_STYLES))
            hint = f"Did you mean {close}?" if close else f"States: {', '.join(STATE_STYLES)}."
            raise UsageMistake(f"state={state!r} is not a state", hint=hint)


def collect(
    ctx: Context, query: dict[str, Any], all: bool, limit: int | None
) -> tuple[list[dict[str, Any]], bool]:
    """The runs, newest first, and whether there are more. Without a filter or a limit: the live and the newest."""
    if all:
        return _every(ctx, query), False
    wanted = limit or DEFAULT
    page = ctx.client.runs(**query, limit=wanted)
    runs: list[dict[str, Any]] = page["runs"]
    if page["next"] is None or query or limit is not None:
        return runs, page["next"] is not None
    seen = {run["id"] for run in runs}
    live = ctx.client.runs(state=[*LIVE, "suspended"], limit=PAGE)["runs"]
    older = [run for run in live if run["id"] not in seen]
    if older:
        # Live runs matter most: the newest ended ones fill the rest of the page.
        ended = [run for run in runs if run["state"] not in (*LIVE, "suspended")]
        dropped = {run["id"] for run in ended[max(0, len(ended) - len(older)) :]}
        runs = [run for run in runs if run["id"] not in dropped] + older
    return runs, True


def _every(ctx: Context, query: dict[str, Any]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    before: int | None = None
    while True:
        page = ctx.client.runs(**query, limit=PAGE, before=before)
        runs += page["runs"]
        before = page["next"]
        if before is None:
            return runs


def _print(ctx: Context, runs: list[dict[str, Any]], more: bool, filtered: bool, trash: bool) -> None:
    if not runs and trash:
        ctx.note("no removed runs match")
        return
    if not runs:
        ctx.note("no runs match" if filtered else "no runs yet; start one: stoker run train.py")
        return
    for line in runs_table(runs, fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)
    if more:
        ctx.out.flush()
        ctx.note(_how_many_more(ctx, len(runs), filtered))


def _how_many_more(ctx: Context, shown: int, filtered: bool) -> str:
    if filtered:
        return "there are more: stoker ps -a or -n N with the same filter"
    total = sum((ctx.client.server().get("counts") or {}).values())
    return f"{max(1, total - shown)} more: stoker ps -a, or -n N"


def _watch(ctx: Context, query: dict[str, Any], all: bool, limit: int | None, as_json: bool) -> int:
    if ctx.columns is None or as_json:
        raise UsageMistake(
            "--watch needs a terminal", hint="For scripts: stoker wait RUN, or stoker ps --json in a loop."
        )
    ctx.out.write("\x1b[2J")
    try:
        _draw_forever(ctx, query, all, limit)
    except KeyboardInterrupt:
        ctx.print()
    return 0


def _draw_forever(ctx: Context, query: dict[str, Any], all: bool, limit: int | None) -> None:
    while True:
        runs, more = collect(ctx, query, all, limit)
        lines = runs_table(runs, fit=ctx.columns, color=ctx.out_color) if runs else ["no runs"]
        height = _height(ctx) - 2
        clock = time.strftime("%H:%M:%S")
        footer = f"{clock}  {len(runs)} shown{', there are more' if more or len(lines) > height else ''}  Ctrl-C ends"
        # Cursor home, each line cleared to its end, then the rest of the screen: no flicker.
        ctx.out.write(
            "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines[:height]) + f"{footer}\x1b[K\x1b[J"
        )
        ctx.out.flush()
        time.sleep(2)


def _height(ctx: Context) -> int:
    import shutil

    return max(5, shutil.get_terminal_size().lines)


COMMANDS = {
    "ps": Command(
        "ps",
        ps,
        summary="list runs",
        help="List runs, newest first: all live ones and the newest others, up to 20.\n\n"
        "TIME counts from the first start. INFO is the place in the queue and what it waits for, where it runs, "
        "or how it ended.",
        arguments=[Argument("words", metavar="FILTER", count=-1, help="The same as --filter.")],
        options=[
            Option(
                "--filter",
                dest="filters",
                multiple=True,
                metavar="EXPR",
                help="Only runs with state=A[,B], tag=T, name=N, name~=PART or project=P; may be repeated, all must hold.",
            ),
            Option("-a", "--all", flag=True, help="All of them."),
            Option("-n", "--limit", kind=int, metavar="N", help="At most N."),
            JSON,
            Option("--trash", flag=True, help="Removed runs instead (stoker rm)."),
            Option("-w", "--watch", flag=True, help="Keep showing, every two seconds."),
        ],
        examples=[
            ("stoker ps state=running", ""),
            ("stoker ps --filter tag=baseline --filter name~=digits", ""),
            ("stoker ps -a --json", "everything, for a script"),
        ],
        shapes="a list of runs, as `GET /api/v1/runs` gives them",
    )
}
