"""`stoker show`."""

from __future__ import annotations

from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering.run_details import Page, events_page, show_page


def show(ctx: Context, *, run: str, events: bool, as_json: bool) -> int:
    whole = on_run(ctx, run, ctx.client.run)
    if as_json and not events:
        ctx.json(whole)
        return 0
    happened = ctx.client.events(whole["id"])["events"]
    if as_json:
        ctx.json(happened)
        return 0
    page = Page(fit=ctx.columns, color=ctx.out_color)
    for line in events_page(happened, page) if events else show_page(whole, happened, page):
        ctx.print(line)
    return 0


COMMANDS = {
    "show": Command(
        "show",
        show,
        summary="everything about one run",
        help="Everything about one run: what it asked for and used, attempts with causes and evidence, checkpoints, "
        "outputs, events.",
        arguments=[Argument("run", complete="run")],
        options=[Option("--events", flag=True, help="Only the events, all of them."), JSON],
        examples=[
            ("stoker show digits-7f3k", ""),
            ("stoker show @last --json", "the newest run, for a script"),
        ],
        shapes="the run as `GET /api/v1/runs/{run}` gives it; with --events a list of events",
    )
}
