"""`stoker rm` and `stoker prune`: the trash."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal, units
from stoker.cli.rendering.tables import TERMINAL, Column, state_cell, table
from stoker.errors import Conflict, StokerError

Json = dict[str, Any]

ASKED_FROM = 1 << 30
"""Bytes from which also a single run is asked about."""
KINDS = {"checkpoints": "checkpoints", "outputs": "outputs", "folder": "working folder", "logs": "logs"}
_PAGE = 500
_NAMED = 10
"""How many runs a question names."""
_LOWER_IS_BETTER = ("loss", "error", "perplexity")


def rm(
    ctx: Context,
    *,
    runs: tuple[str, ...],
    older_than: str | None,
    state: str | None,
    keep_best: str | None,
    yes: bool,
    listing: bool,
    undo: bool,
    as_json: bool,
) -> int:
    """Tries every run, whatever happens to the others. The first error decides the exit code."""
    filtered = (older_than, state, keep_best) != (None, None, None)
    if listing and (runs or filtered or undo):
        raise UsageMistake("--list takes nothing else", hint="stoker rm --list")
    if listing:
        return _list(ctx, as_json)
    if undo and (filtered or not runs):
        raise UsageMistake("--undo takes runs, and no filters", hint="stoker rm --list shows the trash.")
    if undo:
        return _undo(ctx, runs, as_json)
    if not runs and not filtered:
        raise UsageMistake(
            "no run is named", hint="Name runs, or select ended ones: --older-than 30d, --state failed."
        )
    age, states, best = _age(older_than), _states(state), _metric(keep_best)
    found, code = _named(ctx, runs) if runs else (list(_ended(ctx)), 0)
    chosen = [run for run in found if run["state"] in states and _is_older(run, age)]
    sizes = _sizes(ctx, chosen, None if best is None else best[0])
    if best is not None:
        chosen = _without_best(ctx, chosen, sizes, *best)
    if not chosen:
        if not as_json and not code:
            ctx.note("no ended run matches")
        if as_json:
            ctx.json([])
        return code
    if not yes and not _allowed(ctx, chosen, sizes):
        ctx.note("nothing was removed")
        return 1
    return _remove(ctx, chosen, as_json) or code


def prune(ctx: Context, *, yes: bool, as_json: bool) -> int:
    runs = list(_pages(ctx, trash=True))
    if not runs:
        if as_json:
            ctx.json({"runs": [], "held": [], "bytes": 0, "later": False})
        else:
            ctx.note("the trash is empty")
        return 0
    if not yes:
        what = f"{units.plural(len(runs), 'removed run')} ({_said(_sum(_sizes(ctx, runs).values()))})"
        if not ctx.interactive:
            raise UsageMistake(
                f"{what} would be deleted for good, and nobody can be asked", hint="Add --yes."
            )
        if not _answered(ctx, f"delete {what} for good?"):
            ctx.note("nothing was deleted")
            return 1
    answer = ctx.client.empty_trash()
    if as_json:
        ctx.json(answer)
        return 0
    ctx.note(f"{units.plural(len(answer['runs']), 'run')} deleted, {units.size(answer['bytes'])} freed")
    if answer["later"]:
        ctx.note("files that were used within the last minute follow soon")
    if answer["held"]:
        ctx.note(
            f"kept until their cluster has let go of them: {', '.join(map(terminal.safe, answer['held']))}"
        )
    return 0


# -- what is chosen --------------------------------------------------------------------------------------------


def _age(older_than: str | None) -> float:
    if older_than is None:
        return 0.0
    # A bare number would be seconds, which nobody means here.
    seconds = units.parse_duration(older_than) if older_than[-1:].isalpha() else None
    if seconds is None:
        raise UsageMistake(f"--older-than: {older_than!r} is not a duration", hint="Write 12h, 30d or 8w.")
    return seconds


def _states(state: str | None) -> frozenset[str]:
    if state is None:
        return TERMINAL
    states = frozenset(state.split(","))
    for one in states - TERMINAL:
        raise UsageMistake(
            f"--state: {one!r} is not a state of ended runs", hint=f"States: {', '.join(sorted(TERMINAL))}."
        )
    return states


def _metric(keep_best: str | None) -> tuple[str, bool] | None:
    """The metric, and whether a higher value is better."""
    if keep_best is None:
        return None
    name, colon, mode = keep_best.rpartition(":")
    if colon and mode in ("max", "min"):
        key, higher = name, mode == "max"
    else:
        key, higher = keep_best, not any(part in keep_best.lower() for part in _LOWER_IS_BETTER)
    if not key:
        raise UsageMistake(
            f"--keep-best: {keep_best!r} names no metric", hint="Write val_acc:max or loss:min."
        )
    return key, higher


def _is_older(run: Mapping[str, Any], age: float) -> bool:
    ended = run.get("ended_at") or run["created_at"]
    return float(ended) <= time.time() - age


def _named(ctx: Context, refs: Sequence[str]) -> tuple[list[Json], int]:
    """The runs, each once, and an exit code. Live ones are refused."""
    found: dict[str, Json] = {}
    code = 0
    for ref in refs:
        try:
            run = on_run(ctx, ref, ctx.client.run)
            if run["state"] not in TERMINAL:
                raise Conflict(
                    f"run {run['id']} is {run['state']}: only ended runs can be removed",
                    hint=f"End it first: stoker stop --wait {run['id']}",
                )
        except StokerError as exc:
            ctx.fail(exc)
            code = code or ctx.exit_code(exc)
            continue
        found[run["id"]] = run
    return list(found.values()), code


def _ended(ctx: Context) -> Iterator[Json]:
    return _pages(ctx, state=sorted(TERMINAL))


def _pages(ctx: Context, **query: Any) -> Iterator[Json]:
    before: int | None = None
    while True:
        page = ctx.client.runs(**query, limit=_PAGE, before=before)
        yield from page["runs"]
        before = page["next"]
        if before is None:
            return


def _sizes(ctx: Context, runs: Sequence[Json], metric: str | None = None) -> dict[str, Json]:
    """By run: `bytes`, and `metric` where it has that one."""
    found: dict[str, Json] = {}
    for start in range(0, len(runs), _PAGE):
        ids = [str(run["id"]) for run in runs[start : start + _PAGE]]
        found.update(ctx.client.sizes(ids, metric=metric)["runs"])
    return found


def _without_best(
    ctx: Context, runs: Sequence[Json], sizes: Mapping[str, Json], key: str, higher: bool
) -> list[Json]:
    values = {
        run["id"]: value
        for run in runs
        # NaN and infinities are text in JSON: neither is the best.
        if isinstance(value := sizes.get(run["id"], {}).get("metric"), int | float)
    }
    if runs and not values:
        raise StokerError(
            f"none of the {units.plural(len(runs), 'selected run')} has a value of {key!r}; nothing was removed",
            hint="stoker metrics RUN lists the metrics of a run.",
        )
    if not values:
        return []
    best = (max if higher else min)(values, key=lambda run: values[run])
    ctx.note(f"{terminal.safe(best)} stays: {terminal.safe(key)} {units.number(values[best])}")
    return [run for run in runs if run["id"] != best]


# -- asking and doing ------------------------------------------------------------------------------------------


def _allowed(ctx: Context, runs: Sequence[Json], sizes: Mapping[str, Json]) -> bool:
    total = _sum(sizes[run["id"]] for run in runs if run["id"] in sizes)
    several = len(runs) > 1
    if not several and total["total"] <= ASKED_FROM:
        return True
    what = f"{units.plural(len(runs), 'run')} ({_said(total)})"
    if not ctx.interactive:
        if not several:
            return True
        raise UsageMistake(f"{what} would be removed, and nobody can be asked", hint="Add --yes.")
    for run in runs[:_NAMED]:
        size = sizes.get(run["id"], {}).get("bytes", {}).get("total")
        ctx.note(f"  {terminal.safe(run['id'])}  {terminal.safe(run['state'])}  {units.size(size)}")
    if len(runs) > _NAMED:
        ctx.note(f"  and {len(runs) - _NAMED} more")
    return _answered(ctx, f"remove {what}?")


def _answered(ctx: Context, question: str) -> bool:
    ctx.err.write(f"{question} [y/N] ")
    ctx.err.flush()
    assert ctx.stdin is not None
    return terminal.read_line(ctx.stdin).strip().lower() in ("y", "yes")


def _remove(ctx: Context, runs: Sequence[Json], as_json: bool) -> int:
    code = 0
    answers: list[Json] = []
    for run in runs:
        try:
            answer = ctx.client.remove(run["id"])
        except StokerError as exc:
            ctx.fail(exc)
            code = code or ctx.exit_code(exc)
            continue
        answers.append(answer)
        if not as_json:
            ctx.note(f"{terminal.safe(answer['id'])} removed: {_said(answer['bytes'])}")
    if as_json:
        ctx.json(answers)
    elif answers:
        until = units.clock(min(answer["until"] for answer in answers))
        ctx.note(f"in the trash until {until}; back: stoker rm --undo RUN, room now: stoker prune")
    return code


def _undo(ctx: Context, refs: Sequence[str], as_json: bool) -> int:
    code = 0
    answers = []
    for ref in refs:
        try:
            run = on_run(ctx, ref, ctx.client.restore)
        except StokerError as exc:
            ctx.fail(exc)
            code = code or ctx.exit_code(exc)
            continue
        answers.append(run)
        if not as_json:
            ctx.note(f"{terminal.safe(run['id'])} is back: {terminal.safe(run['state'])}")
    if as_json:
        ctx.json(answers)
    return code


def _list(ctx: Context, as_json: bool) -> int:
    runs = list(_pages(ctx, trash=True))
    sizes = _sizes(ctx, runs)
    runs = [{**run, "bytes": sizes[run["id"]]["bytes"]} for run in runs if run["id"] in sizes]
    runs.sort(key=lambda run: -float(run["removed_at"]))
    if as_json:
        ctx.json(runs)
        return 0
    if not runs:
        ctx.note("the trash is empty")
        return 0
    columns = (
        Column("ID"),
        Column("STATE"),
        Column("REMOVED", right=True),
        Column("SIZE", right=True),
        Column("DELETED"),
    )
    rows = [
        (
            terminal.safe(run["id"]),
            state_cell(run["state"]),
            units.age(run["removed_at"]),
            units.size(run["bytes"]["total"]),
            units.clock(run["until"]),
        )
        for run in runs
    ]
    for line in table(columns, rows, fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)
    return 0


def _sum(sizes: Any) -> Json:
    total = dict.fromkeys((*KINDS, "total"), 0)
    for size in sizes:
        for kind in total:
            total[kind] += size["bytes"].get(kind, 0)
    return total


def _said(size: Mapping[str, Any]) -> str:
    """`1.5 GiB: 1.4 GiB checkpoints, 12 KiB logs`, or `12 KiB of logs`"""
    parts = [(units.size(size[kind]), name) for kind, name in KINDS.items() if size.get(kind)]
    if not parts:
        return "nothing stored"
    if len(parts) == 1:
        return " of ".join(parts[0])
    return f"{units.size(size['total'])}: {', '.join(map(' '.join, parts))}"


YES = Option("-y", "--yes", flag=True, help="Do not ask.")

COMMANDS = {
    "rm": Command(
        "rm",
        rm,
        summary="remove ended runs; for a week they can be brought back",
        help="Remove ended runs, and say what they take: checkpoints, outputs, working folder, logs (content that several "
        "runs share counts for each). A removed run is in the trash for seven days: no list shows it, and `--undo` brings "
        "it back as it was. Then it is deleted for good; `stoker prune` does that now. Its id is never used again.\n\n"
        "More than one run, or more than 1 GiB, is asked about; without a terminal several runs need `--yes`. Filters "
        "select among the named runs, or among all ended ones. Live runs are never removed: stop them first.",
        arguments=[Argument("runs", metavar="RUN", count=-1, complete="run")],
        options=[
            Option("--older-than", metavar="AGE", help="Only runs that ended longer ago: 12h, 30d, 8w."),
            Option(
                "--state", metavar="STATE[,STATE]", help="Only runs that are failed, stopped or succeeded."
            ),
            Option(
                "--keep-best",
                metavar="METRIC[:max|min]",
                help="Of the selected runs the one with the best last value of this metric stays. Without max or min: "
                "min for names with loss, error or perplexity, else max.",
            ),
            YES,
            Option("--list", dest="listing", flag=True, help="Show the trash."),
            Option("--undo", flag=True, help="Take the named runs out of the trash."),
            JSON,
        ],
        examples=[
            ("stoker rm digits-7f3k", ""),
            ("stoker rm --undo digits-7f3k", "back again"),
            ("stoker rm --state failed --older-than 30d", ""),
            ("stoker rm --older-than 7d --keep-best val_acc:max", "all but the best"),
        ],
        shapes="a list of what `DELETE /api/v1/runs/{run}` answers; with `--list` and `--undo` a list of runs",
    ),
    "prune": Command(
        "prune",
        prune,
        summary="empty the trash now",
        help="Delete all removed runs for good: what the database has of them, their logs, and stored files that no other "
        "run has. Files that were used within the last minute follow soon, code within a day.",
        options=[YES, JSON],
        examples=[("stoker prune", "")],
        shapes="what `POST /api/v1/trash/empty` answers",
    ),
}
