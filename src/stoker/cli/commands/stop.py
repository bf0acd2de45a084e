"""`stoker stop`."""

from __future__ import annotations

from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal
from stoker.cli.rendering.tables import TERMINAL
from stoker.errors import StokerError

ENDING = (*TERMINAL, "stopping", "suspended")
"""States that already say what stop did."""


def stop(ctx: Context, *, runs: tuple[str, ...], kill: bool, wait: bool, as_json: bool) -> int:
    """Tries every run, whatever happens to the others. The first error decides the exit code."""
    code = 0
    answers = []
    for ref in runs:
        try:
            run = on_run(ctx, ref, lambda run_id: ctx.client.stop(run_id, kill=kill))
            if wait:
                while run["state"] not in TERMINAL:
                    run = ctx.client.wait(run["id"], timeout=30)
        except StokerError as exc:
            ctx.fail(exc)
            code = code or ctx.exit_code(exc)
            continue
        answers.append(run)
        if not as_json:
            asked = "" if run["state"] in ENDING else ", kill requested" if kill else ", stop requested"
            ctx.note(f"{terminal.safe(run['id'])} {terminal.safe(run['state'])}{asked}")
    if as_json:
        ctx.json(answers)
    return code


COMMANDS = {
    "stop": Command(
        "stop",
        stop,
        summary="end runs: SIGTERM, the grace period, SIGKILL",
        help="End runs. Each process gets SIGTERM and the job's grace period to write a last checkpoint; what is "
        "left then gets SIGKILL, with everything it started. Stopping an ended run changes nothing.",
        arguments=[Argument("runs", metavar="RUN", count=-2, complete="run")],
        options=[
            Option("--kill", flag=True, help="SIGKILL at once, no grace."),
            Option("--wait", flag=True, help="Return when they have ended."),
            JSON,
        ],
        examples=[("stoker stop digits-7f3k", ""), ("stoker stop @last --kill", "the newest run, at once")],
        shapes="a list of the runs",
    )
}
