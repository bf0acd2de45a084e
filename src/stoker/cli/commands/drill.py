"""`stoker drill`: inject a fault into a run and report how it recovers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option, task_option
from stoker.cli.rendering import tables, terminal, units
from stoker.errors import Conflict, ServerUnreachable, StokerError

HOWS = ("process", "launcher", "server", "preempt")
LOOK_EVERY = 0.2
Json = dict[str, Any]


def drill(ctx: Context, *, run: str, how: str, task: str | None, timeout: str, as_json: bool) -> int:
    limit = units.parse_duration(timeout)
    if task is not None and how in ("server", "preempt"):
        raise UsageMistake(
            f"--task goes with --how process or launcher, not {how}",
            hint="Leave --task out: this concerns the whole run.",
        )
    if limit is None:
        raise UsageMistake(f"--timeout: {timeout!r} is not a duration", hint="Write 90, 5m or 1h.")
    before = on_run(ctx, run, ctx.client.run)
    if before["state"] != "running":
        raise Conflict(
            f"{before['id']} is {before['state']}, and only a running run can be drilled",
            hint=f"stoker resume {before['id']} starts it again."
            if before["state"] in tables.TERMINAL
            else "Wait until it runs.",
        )
    if task is None and how in ("process", "launcher"):
        task = next((str(one["name"]) for one in _tasks(before)), None)
    watcher = _Watcher(ctx, str(before["id"]), task, quiet=as_json)
    watcher.skip_past()
    began, injected_at = time.monotonic(), time.time()
    did, last_step = _inject(ctx, before, how, task)
    if not as_json:
        ctx.note(terminal.safe(did))
    after = watcher.until_recovered(before, how, began + limit)
    report = judge(before, after, how, did, last_step, time.monotonic() - began, injected_at, task)
    if as_json:
        ctx.json(report)
    else:
        _print(ctx, report)
    return 0 if report["resumed"] else 1


def _inject(ctx: Context, before: Json, how: str, task: str | None) -> tuple[str, int | None]:
    """What was done, and the newest step reported before it."""
    if how == "server":
        last = _last_step(ctx, before["id"])
        return _kill_server(ctx), last
    named = task if len(_tasks(before)) > 1 else None
    did = str(ctx.client.drill(before["id"], how, named)["did"])
    return did, _last_step(ctx, before["id"])


def _kill_server(ctx: Context) -> str:
    """SIGKILL to the user's own server, by the pid that it reports. Then it is started again."""
    server = ctx.client.server()
    pid = int(server["pid"])
    if pid <= 1:
        raise StokerError(f"the server gives {pid} as its process id", hint="See stoker server status.")
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError as exc:
        raise Conflict(
            f"the server (pid {pid}) does not run on this machine", hint="Drill it where it runs."
        ) from exc
    except PermissionError as exc:
        raise Conflict(
            f"the server (pid {pid}) belongs to another user", hint="Only your own server can be drilled."
        ) from exc
    until = time.monotonic() + 30
    while True:
        try:
            answered = ctx.reconnect().server()
            if int(answered["pid"]) != pid:
                return f"killed the server (pid {pid}); a new one (pid {answered['pid']}) is up"
        except ServerUnreachable:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def _last_step(ctx: Context, run_id: str) -> int | None:
    steps = [entry.get("last_step") for entry in ctx.client.metrics(run_id)["keys"]]
    known = [int(step) for step in steps if step is not None]
    return max(known) if known else None


class _Watcher:
    """Polls a run and shows its new events, until it has recovered or ended."""

    def __init__(self, ctx: Context, run_id: str, task: str | None, *, quiet: bool) -> None:
        self.ctx = ctx
        self.run_id = run_id
        self.task = task
        self.quiet = quiet
        self._shown = 0

    def skip_past(self) -> None:
        self._shown = len(self.ctx.client.events(self.run_id)["events"])

    def until_recovered(self, before: Json, how: str, until: float) -> Json:
        while True:
            try:
                run: Json = self.ctx.client.run(self.run_id)
                self._show_events()
            except ServerUnreachable:
                if time.monotonic() >= until:
                    raise
                self.ctx.reconnect()
                continue
            over = _ended(run) or _is_recovered(before, run, how) or _loss_ignored(run, self.task)
            if over or time.monotonic() >= until:
                self._show_events()
                return run
            time.sleep(LOOK_EVERY)

    def _show_events(self) -> None:
        events = self.ctx.client.events(self.run_id)["events"]
        for event in events[self._shown :] if not self.quiet else []:
            self.ctx.note(
                f"  {units.clock(event['t'])}  {terminal.pad(terminal.safe(event['kind']), 10)}  {terminal.safe(event.get('text') or '')}"
            )
        self._shown = len(events)


def _ended(run: Json) -> bool:
    return run["state"] in tables.TERMINAL or run["state"] == "suspended"


def _tasks(run: Json) -> list[Json]:
    return list((run.get("attempts") or [{}])[-1].get("tasks") or [])


def _body(run: Json) -> tuple[int, int]:
    newest = (run.get("attempts") or [{}])[-1]
    return int(newest.get("number") or 0), int(newest.get("generation") or 0)


def _is_recovered(before: Json, run: Json, how: str) -> bool:
    if run["state"] != "running":
        return False
    if how == "server":
        return True
    # Several tasks come back as a new generation of the same attempt: all of that generation have to run again.
    return _body(run) > _body(before) and all(_runs(task) for task in _tasks(run) if _is_new(task, run))


def _is_new(task: Json, run: Json) -> bool:
    """Whether it belongs to the newest generation. A task that never stopped or was released keeps an older one."""
    return len(_tasks(run)) > 1 and task.get("generation") == _body(run)[1]


def _runs(task: Json) -> bool:
    return task.get("phase") == "running" or (task.get("phase") == "ended" and task.get("exit_code") == 0)


def _loss_ignored(run: Json, task: str | None) -> bool:
    """Whether the task has ended and the job ignores its loss (`on_loss: ignore`)."""
    found = next((one for one in _tasks(run) if one.get("name") == task), None)
    if found is None or found.get("phase") != "ended" or run["state"] != "running":
        return False
    job = run.get("job") or {}
    role = (job.get("roles") or {}).get(found.get("role"))
    rule = role.get("on_loss") if role is not None else job.get("on_loss")
    return len(_tasks(run)) > 1 and rule == "ignore"


def _recovered_alone(before: Json, after: Json, task: str | None) -> bool:
    """Whether that task alone has a new generation, so that the others never stopped."""
    if len(_tasks(after)) < 2 or _body(after)[0] != _body(before)[0]:
        return False
    old = {one["name"]: one.get("generation") for one in _tasks(before)}
    changed = {one["name"] for one in _tasks(after) if one.get("generation") != old.get(one["name"])}
    return changed == {task}


def judge(
    before: Json,
    after: Json,
    how: str,
    did: str,
    last_step: int | None,
    seconds: float,
    injected_at: float,
    task: str | None = None,
) -> Json:
    """The report: whether and how fast it came back, from where, and what was lost. Pure."""
    newest = (after.get("attempts") or [{}])[-1]
    same = _body(after) == _body(before)
    finished = how == "server" and after["state"] == "succeeded"
    resumed = _is_recovered(before, after, how) or finished or (after["state"] == "succeeded" and not same)
    checkpoint = newest.get("resumed_from") if not same else None
    known = {c["id"]: c for c in after.get("checkpoints") or []}
    from_step = known.get(checkpoint, {}).get("step") if checkpoint else None
    kept_going = same and resumed
    loss_ignored = same and not resumed and _loss_ignored(after, task)
    alone = resumed and _recovered_alone(before, after, task)
    folder = _folder(before, after) if checkpoint is None and not same else None
    lost = (
        None
        if last_step is None or kept_going or alone or folder is not None
        else max(0, last_step - (from_step or 0))
        if checkpoint is None or from_step is not None
        else None
    )
    since = known.get(checkpoint, {}).get("created_at") if checkpoint else _started(before)
    if folder is not None:
        since = folder.get("newest_at")
    lost_time = None if since is None or same or alone else max(0.0, injected_at - since)
    report = {
        "run": after["id"],
        "how": how,
        "did": did,
        "task": task,
        "resumed": resumed or loss_ignored,
        "kept_going": kept_going or loss_ignored,
        "alone": alone,
        "seconds": round(seconds, 2),
        "state": after["state"],
        "cause": after.get("cause"),
        "reason": after.get("reason"),
        "attempt": newest.get("number"),
        "generation": newest.get("generation"),
        "from_checkpoint": checkpoint,
        "from_step": from_step,
        "from_file": folder.get("newest") if folder is not None else None,
        "last_step": last_step,
        "lost_steps": 0 if kept_going or loss_ignored else lost,
        "lost_seconds": 0.0
        if kept_going or loss_ignored
        else None
        if lost_time is None
        else round(lost_time, 2),
    }
    report["verdict"] = _verdict(report)
    return report


def _folder(before: Json, after: Json) -> Json | None:
    """What the attempt before left in the working folder, if it wrote anything there."""
    folder: Json | None = after.get("folder")
    ours = folder is not None and folder.get("attempt") == _body(before)[0] and folder.get("newest")
    return folder if ours else None


def _started(run: Json) -> float | None:
    started = (run.get("attempts") or [{}])[-1].get("started_at")
    return None if started is None else float(started)


def _verdict(report: Json) -> str:
    if report["kept_going"] and report["how"] != "server":
        return f"fine: {report['task']} has ended and the others go on, as the job says (on_loss: ignore)"
    if report["kept_going"]:
        return f"fine: the training went on; the server was back after {units.duration(report['seconds'])}"
    if not report["resumed"]:
        what = f": {report['reason']}" if report.get("reason") else ""
        return f"not resumed: {report['state']} after {units.duration(report['seconds'])}{what}"
    if report["from_file"] is not None:
        age = units.duration(report["lost_seconds"] or 0.0)
        where = f"in its working folder, newest file {report['from_file']}, written {age} before the kill"
        return f"resumed in {units.duration(report['seconds'])} {where}"
    if report["from_checkpoint"] is None:
        where = "from the start, because no checkpoint was there"
    elif report["from_step"] is not None:
        where = f"from step {report['from_step']}"
    else:
        where = f"from checkpoint {report['from_checkpoint']}"
    if report["alone"]:
        return f"{report['task']} came back alone in {units.duration(report['seconds'])}; the others never stopped"
    again = report.get("generation") or 1
    where = f"as generation {again} {where}" if again > 1 else where
    lost = report["lost_steps"]
    spent = report["lost_seconds"]
    parts = [units.plural(lost, "step")] if lost is not None else []
    parts += [f"{units.duration(spent)} of work"] if spent is not None else []
    cost = f"; lost {', '.join(parts)}" if parts else ""
    return f"resumed in {units.duration(report['seconds'])} {where}{cost}"


def _print(ctx: Context, report: Json) -> None:
    style = ("green", "bold") if report["resumed"] else ("red", "bold")
    ctx.print(f"{ctx.style('verdict', *style)}: {terminal.safe(report['verdict'])}")
    found = report["from_checkpoint"] is not None or report["from_file"] is not None
    fresh = not found and not report["kept_going"] and not report["alone"]
    if report["resumed"] and fresh:
        ctx.note(
            "\nhint: Write checkpoints to $STOKER_CHECKPOINT_DIR, and resume from $STOKER_RESUME_FROM when it is set."
        )
    elif not report["resumed"] and report["state"] == "failed":
        ctx.note(
            f"\nhint: With `--retries 1` a killed training is tried again. stoker why {terminal.safe(report['run'])} says more."
        )


COMMANDS = {
    "drill": Command(
        "drill",
        drill,
        summary="kill a run on purpose and see how it comes back",
        help="Kill a part of a run on purpose and report: did it recover, how fast, from which step, what was lost. `process` "
        "kills the training, `launcher` the launcher, `server` your own server (it is started again), `preempt` takes "
        "its place away as for a more urgent run. Of a run with several tasks one is killed, and the world comes back as "
        "a new generation. Exits 0 when the run came back.",
        arguments=[Argument("run", complete="run")],
        options=[
            Option(
                "--how",
                kind=HOWS,
                default="process",
                help="What to kill: process (default), launcher, server, preempt.",
            ),
            task_option("Which task to kill, as in worker-1 (default: the first)."),
            Option(
                "--timeout",
                default="5m",
                metavar="TIME",
                help="How long to wait for it to come back (default 5m).",
            ),
            JSON,
        ],
        examples=[
            ("stoker drill digits-7f3k", ""),
            ("stoker drill digits-7f3k --how launcher --task worker-1", "one of several tasks"),
            ("stoker drill digits-7f3k --how server", ""),
        ],
        shapes="`{run, how, task, did, resumed, kept_going, alone, seconds, state, cause, reason, attempt, generation, "
        "from_checkpoint, from_step, from_file, last_step, lost_steps, lost_seconds, verdict}`",
    )
}
