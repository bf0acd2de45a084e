"""`stoker wait`."""

from __future__ import annotations

import time
from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import tables, terminal, units
from stoker.cli.rendering.run_details import warnings
from stoker.errors import ServerUnreachable

TIMED_OUT = 124


def wait(ctx: Context, *, runs: tuple[str, ...], timeout: str | None, as_json: bool) -> int:
    """Returns the exit code of the first run (as given) that did not succeed."""
    seconds = None
    if timeout is not None:
        seconds = units.parse_duration(timeout)
        if seconds is None:
            raise UsageMistake(
                f"--timeout: {timeout!r} is not a duration", hint="Write 90, 10m, 2h or 1h30m."
            )
    until = None if seconds is None else time.monotonic() + seconds
    ids = [on_run(ctx, ref, lambda run_id: str(ctx.client.run(run_id)["id"])) for ref in runs]
    ended = []
    for run_id in ids:
        run = await_end(ctx, run_id, until)
        if run is None:
            unit = "" if timeout is None or timeout[-1:].isalpha() else "s"
            ctx.note(f"{terminal.safe(run_id)} has not ended after {timeout}{unit}")
            return TIMED_OUT
        ended.append(run)
        if not as_json:
            ctx.note(ending_line(run))
            for warning in warnings(run):
                ctx.note(f"{terminal.style('warning', 'yellow', 'bold', on=ctx.err_color)}: {warning}")
    if as_json:
        ctx.json(ended)
    return next((code for code in map(tables.exit_status, ended) if code), 0)


def await_end(ctx: Context, run_id: str, until: float | None) -> dict[str, Any] | None:
    """The run once it is terminal or suspended; None at the deadline. Starts the server again if it dies."""
    failures = 0
    while True:
        left = 30.0 if until is None else min(30.0, until - time.monotonic())
        try:
            run: dict[str, Any] = ctx.client.wait(run_id, timeout=max(0.0, left))
            failures = 0
        except ServerUnreachable:
            failures += 1
            if failures > 5:
                raise
            ctx.reconnect()
            continue
        if run["state"] in tables.TERMINAL or run["state"] == "suspended":
            return run
        if until is not None and time.monotonic() >= until:
            return None


def ending_line(run: dict[str, Any]) -> str:
    """`digits-7f3k failed after 3m20s: exit code 1`"""
    took = tables.ran_for(run, time.time())
    after = f" after {units.duration(took)}" if took is not None else ""
    detail = "" if run["state"] == "succeeded" else tables.info(run)
    if detail == run["state"]:
        detail = ""
    return f"{terminal.safe(run['id'])} {terminal.safe(run['state'])}{after}" + (
        f": {detail}" if detail else ""
    )


COMMANDS = {
    "wait": Command(
        "wait",
        wait,
        summary="wait until runs have ended, exit as the training did",
        help="Wait until every given run has ended or is suspended. Exits with the training's own exit code (128 + N "
        "when signal N ended it): that of the first run that did not succeed. 75: suspended. 124: --timeout passed.",
        arguments=[Argument("runs", metavar="RUN", count=-2, complete="run")],
        options=[Option("--timeout", metavar="TIME", help="Give up after 90, 10m, 2h..."), JSON],
        examples=[("stoker wait digits-7f3k && stoker pull digits-7f3k", "")],
        shapes="a list of the runs as they ended",
    )
}
