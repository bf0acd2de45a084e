"""`stoker shell`."""

from __future__ import annotations

import os
import shutil

from stoker.cli import term
from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command
from stoker.errors import StokerError


def shell(ctx: Context, *, run: str, command: tuple[str, ...], as_json: bool) -> int:
    way = on_run(ctx, run, ctx.client.shell)
    argv = [*(str(word) for word in way["argv"]), *command]
    if not ctx.interactive:
        argv = ["-i" if word == "-it" else word for word in argv]
    if as_json:
        ctx.json({**way, "argv": argv})
        return 0
    if shutil.which(argv[0]) is None:
        raise StokerError(
            f"{argv[0]!r} is not on this machine",
            hint="Where it is, this gets you in: " + " ".join(term.safe(word) for word in argv),
        )
    environment = {**os.environ, **{str(key): str(value) for key, value in (way.get("env") or {}).items()}}
    if way.get("cwd"):
        os.chdir(way["cwd"])
    ctx.out.flush()
    return os.execvpe(argv[0], argv, environment)


COMMANDS = {
    "shell": Command(
        "shell",
        shell,
        summary="look into a run's task with a shell",
        help="A shell in a run's task: its files, its environment, its container. While it runs, or after a failure where "
        "the job has `keep_on_failure`. On a cluster kubectl takes you there.",
        arguments=[Argument("run", complete="run"), Argument("command", metavar="COMMAND", count=-1)],
        options=[JSON],
        rest=True,
        examples=[
            ("stoker shell digits-7f3k", ""),
            ("stoker shell digits-7f3k nvidia-smi", "one command instead of a shell"),
        ],
        shapes="`{argv, env, cwd}`: how to get there",
    )
}
