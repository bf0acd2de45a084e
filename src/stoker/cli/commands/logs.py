"""`stoker logs`."""

from __future__ import annotations

import time
from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import Argument, Command, Option, task_option
from stoker.cli.rendering import units
from stoker.cli.rendering.tables import TERMINAL
from stoker.cli.stream import Printer, records, several_tasks
from stoker.errors import NotFound


def logs(
    ctx: Context,
    *,
    run: str,
    follow: bool,
    since: str | None,
    tail: int | None,
    task: str | None,
    attempt: int | None,
    stdout: bool,
    stderr: bool,
    timestamps: bool,
    raw: bool,
    as_json: bool,
) -> int:
    query: dict[str, Any] = {
        "task": task,
        "attempt": attempt,
        "stream": "stdout" if stdout else "stderr" if stderr else None,
        "since": None if since is None else since_when(since),
        "tail": tail,
    }
    _check(ctx, tail=tail, attempt=attempt, both=stdout and stderr, raw=raw)
    whole = on_run(ctx, run, ctx.client.run)
    _check_there(whole, task=task, attempt=attempt)
    if as_json:
        return _json(ctx, whole["id"], query, follow)
    printer = Printer(
        ctx,
        prefixes=several_tasks(whole) and task is None,
        timestamps=timestamps,
        raw=raw,
        everything_out=True,
        live=follow,
    )
    try:
        for record in records(ctx.connect, whole["id"], query, follow=follow):
            printer(record)
    except KeyboardInterrupt:
        if not follow:
            raise
        # Ctrl-C is how following ends: no message.
        printer.finish_line()
        return 130
    printer.finish_line()
    return 0


def _check(ctx: Context, *, tail: int | None, attempt: int | None, both: bool, raw: bool) -> None:
    if tail is not None and tail < 0:
        raise UsageMistake(f"--tail: {tail} is negative", hint="For the last ten lines: --tail 10")
    if attempt is not None and attempt < 1:
        raise UsageMistake(
            f"--attempt: {attempt} is not an attempt",
            hint="Attempts count from 1; stoker show RUN lists them.",
        )
    if both:
        raise UsageMistake("--stdout and --stderr exclude each other", hint="Without either, both are shown.")
    if raw and ctx.columns is not None:
        raise UsageMistake(
            "--raw is not for a terminal", hint="Send it somewhere: stoker logs RUN --raw > run.log"
        )


def _check_there(run: dict[str, Any], *, task: str | None, attempt: int | None) -> None:
    """Refuses a task or attempt that an ended run does not have: empty output would look like an empty log."""
    attempts = run.get("attempts") or []
    if run["state"] not in TERMINAL or not attempts:
        return
    numbers = [one["number"] for one in attempts]
    if attempt is not None and attempt not in numbers:
        raise NotFound(
            f"{run['id']} has no attempt {attempt}", hint=f"Attempts: {', '.join(map(str, numbers))}."
        )
    names = sorted({one["name"] for tried in attempts for one in tried.get("tasks") or []})
    if task is not None and names and task not in names:
        raise NotFound(f"{run['id']} has no task {task!r}", hint=f"Tasks: {', '.join(names)}.")


def since_when(text: str) -> float:
    """A time in the past (`10m`) or a moment: `2026-01-31`, `2026-01-31T14:00`, `14:00` (today), epoch seconds."""
    ago = units.parse_duration(text)
    if ago is not None:
        return ago if ago > 1e9 else time.time() - ago
    for form in ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text, form))
        except ValueError:
            continue
    for form in ("%H:%M:%S", "%H:%M"):
        try:
            at = time.strptime(text, form)
        except ValueError:
            continue
        today = time.localtime()
        return time.mktime((*today[:3], *at[3:6], 0, 0, -1))
    raise UsageMistake(f"--since: {text!r} is not a time", hint="Write 10m, 2h, 14:30 or 2026-01-31T14:30.")


def _json(ctx: Context, run_id: str, query: dict[str, Any], follow: bool) -> int:
    import json

    for record in records(ctx.connect, run_id, query, follow=follow):
        ctx.print(json.dumps(record))
        if follow:
            ctx.out.flush()
    return 0


COMMANDS = {
    "logs": Command(
        "logs",
        logs,
        summary="what a run printed",
        help="What a run printed, stdout and stderr of all its tasks, all attempts. Lines of several tasks are shown "
        "in the order of their times, each behind `[worker-1] `.\n\n"
        "Escape sequences are made harmless: colours pass on a terminal only, cursor moves are left out, other "
        "control characters are shown as text. --raw passes everything as it was written.",
        arguments=[Argument("run", complete="run")],
        options=[
            Option("-f", "--follow", flag=True, help="Go on until the run ends."),
            Option(
                "--since",
                metavar="TIME",
                help="Only what was printed since: 10m (ago), 14:30, 2026-01-31T14:30.",
            ),
            Option("-n", "--tail", kind=int, metavar="N", help="Only the last N lines."),
            task_option("Only this task, as in worker-0."),
            Option("--attempt", kind=int, metavar="N", help="Only this attempt."),
            Option("--stdout", flag=True, help="Only stdout."),
            Option("--stderr", flag=True, help="Only stderr."),
            Option("-t", "--timestamps", flag=True, help="When each line was printed, local time."),
            Option(
                "--raw", flag=True, help="As it was written, escape sequences and all; not for a terminal."
            ),
            Option("--json", dest="as_json", flag=True, help="One JSON record per line."),
        ],
        examples=[
            ("stoker logs -f digits-7f3k", ""),
            ("stoker logs @last --tail 20 --stderr", "the end of the newest run's stderr"),
            ("stoker logs digits --since 10m --task worker-0", ""),
        ],
        shapes="one record per line, as `GET /api/v1/runs/{run}/logs` streams them",
    )
}
