"""`stoker shell`."""

from __future__ import annotations

import os
import shutil

from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, task_option
from stoker.cli.rendering import terminal
from stoker.errors import StokerError


def shell(ctx: Context, *, run: str, command: tuple[str, ...], task: str | None, as_json: bool) -> int:
    task, command = _trailing_task(task, command)
    entry = on_run(ctx, run, lambda run_id: ctx.client.shell(run_id, task))
    argv = [*(str(word) for word in entry["argv"]), *command]
    if not ctx.interactive:
        argv = ["-i" if word == "-it" else word for word in argv]
    if as_json:
        ctx.json({**entry, "argv": argv})
        return 0
    if shutil.which(argv[0]) is None:
        raise StokerError(
            f"{argv[0]!r} is not on this machine",
            hint="Where it is installed, run: " + " ".join(terminal.safe(word) for word in argv),
        )
    environment = {**os.environ, **{str(key): str(value) for key, value in (entry.get("env") or {}).items()}}
    if entry.get("cwd"):
        os.chdir(entry["cwd"])
    ctx.out.flush()
    return os.execvpe(argv[0], argv, environment)


def _trailing_task(task: str | None, command: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Takes `--task` after the run as Stoker's own option: no program has that name."""
    if command[:1] == ("--task",) and len(command) > 1:
        return command[1], command[2:]
    if command and command[0].startswith("--task="):
        return command[0].partition("=")[2], command[1:]
    return task, command


COMMANDS = {
    "shell": Command(
        "shell",
        shell,
        summary="open a shell in a run's task",
        help="Opens a shell in a run's task: its files, its environment, its container. Works while it runs, and after a failure where "
        "the job has `keep_on_failure`. On a cluster it runs kubectl exec.",
        arguments=[Argument("run", complete="run"), Argument("command", metavar="COMMAND", count=-1)],
        options=[task_option("Which task, as in worker-1 (default: the first)."), JSON],
        rest=True,
        examples=[
            ("stoker shell digits-7f3k", ""),
            ("stoker shell digits-7f3k nvidia-smi", "one command instead of a shell"),
            ("stoker shell digits-7f3k --task worker-1", "one of several tasks"),
        ],
        shapes="`{argv, env, cwd}`: the command that opens it",
    )
}
