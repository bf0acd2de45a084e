"""`stoker resize`."""

from __future__ import annotations

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal


def resize(ctx: Context, *, run: str, cpu: str | None, memory: str | None, as_json: bool) -> int:
    if cpu is None and memory is None:
        raise UsageMistake("nothing to change", hint="As in: stoker resize digits-7f3k --memory 8Gi --cpu 4")
    answer = on_run(ctx, run, lambda run_id: ctx.client.resize(run_id, cpu=cpu, memory=memory))
    if as_json:
        ctx.json(answer)
    else:
        ctx.note(f"{terminal.safe(answer['how'])}: {terminal.safe(answer['text'])}")
    return 0


COMMANDS = {
    "resize": Command(
        "resize",
        resize,
        summary="give a run more or less CPU and memory",
        help="Give a run more or less CPU and memory. Done in place where possible (a cgroup, a pod's resize), else by checkpoint and "
        "restart with the new size; the answer says which. Later attempts have the new size too.",
        arguments=[Argument("run", complete="run")],
        options=[
            Option("--cpu", metavar="CPUS", help="As in a job file: 4, 500m."),
            Option("--memory", metavar="SIZE", help="As in a job file: 8Gi."),
            JSON,
        ],
        examples=[("stoker resize digits-7f3k --memory 8Gi --cpu 4", "")],
        shapes='`{how: "in place" | "restart" | "queued", text}`',
    )
}
