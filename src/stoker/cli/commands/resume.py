"""`stoker resume`."""

from __future__ import annotations

from stoker.cli import job_flags, params, submit_flow
from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal
from stoker.cli.watch_run import watch


def resume(
    ctx: Context,
    *,
    run: str,
    sets: tuple[str, ...],
    secret: tuple[str, ...],
    follow: bool,
    key: str | None,
    as_json: bool,
) -> int:
    old = on_run(ctx, run, ctx.client.run)
    given = {item.partition("=")[0] for item in secret}
    # A suspended run still has its secrets; an ended one does not.
    needed = [] if old["state"] == "suspended" else old["job"].get("secrets") or []
    names = [*secret, *(name for name in needed if name not in given)]
    secrets = job_flags.secrets(names, lambda name: submit_flow.ask_secret(ctx, name))
    if old["state"] != "suspended":
        secrets = {**submit_flow.shell_secrets_again(ctx, old, secrets), **secrets}
    answer = ctx.client.resume(old["id"], key=key or submit_flow.new_key(), secrets=secrets, set=sets)
    if as_json:
        ctx.json(answer)
        return 0
    name = terminal.safe(answer["id"])
    ctx.note(f"{name} {terminal.safe(answer['state'])}")
    if follow:
        attempts = old.get("attempts") or [{}]
        return watch(ctx, answer, after=attempts[-1])
    ctx.print(name)
    return 0


COMMANDS = {
    "resume": Command(
        "resume",
        resume,
        summary="continue an ended or suspended run from its checkpoint",
        help="Continue a stopped, failed, suspended or succeeded run from its newest checkpoint, as a new attempt of the "
        "same run. Secrets are not kept with an ended run, so their values are read again.",
        arguments=[Argument("run", complete="run")],
        options=[
            params.set_option("Change a key, as in timeout=24h."),
            params.SECRET,
            Option("-f", "--follow", flag=True, help="Show its output and exit as the training does."),
            Option("--key", metavar="KEY", help="Idempotency key: the same key resumes once."),
            JSON,
        ],
        examples=[("stoker resume digits-7f3k", ""), ("stoker resume digits-7f3k --set timeout=24h -f", "")],
        shapes="the run",
    )
}
