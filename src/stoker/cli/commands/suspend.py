"""`stoker suspend`."""

from __future__ import annotations

from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command
from stoker.cli.rendering import terminal


def suspend(ctx: Context, *, run: str, as_json: bool) -> int:
    answer = on_run(ctx, run, ctx.client.suspend)
    if as_json:
        ctx.json(answer)
        return 0
    name = terminal.safe(answer["id"])
    asked = "" if answer["state"] == "suspended" else ", suspension requested"
    ctx.note(f"{name} {terminal.safe(answer['state'])}{asked}; later: stoker resume {name}")
    return 0


COMMANDS = {
    "suspend": Command(
        "suspend",
        suspend,
        summary="checkpoint, give back what it holds, keep it for later",
        help="Ask a run to write a checkpoint (SIGTERM and the grace period), then give back all it holds. "
        "`stoker resume` continues it.",
        arguments=[Argument("run", complete="run")],
        options=[JSON],
        examples=[("stoker suspend digits-7f3k", "")],
        shapes="the run",
    )
}
