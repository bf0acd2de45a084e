"""`stoker backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal, units
from stoker.cli.rendering.tables import Column, table
from stoker.errors import Conflict, NotFound, StoreDamaged

Json = dict[str, Any]


def create(ctx: Context, *, path: str | None, as_json: bool) -> int:
    target = None if path is None else str(Path(path).expanduser().absolute())
    answer = ctx.client.backup(target)
    if as_json:
        ctx.json(answer)
        return 0
    ctx.print(terminal.safe(answer["path"]))
    return 0


def listing(ctx: Context, *, as_json: bool) -> int:
    from stoker.cli.restore import listed

    found = listed(ctx.home)
    if as_json:
        ctx.json(found)
        return 0
    if not found:
        ctx.note("no backups yet; make one: stoker backup create")
        return 0
    columns = (
        Column("MADE"),
        Column("AGE", right=True),
        Column("KIND"),
        Column("RUNS", right=True),
        Column("SIZE", right=True),
        Column("PATH"),
    )
    rows = [
        (
            units.clock(entry["made_at"]),
            units.age(entry["made_at"]),
            str(entry["kind"]),
            "damaged" if entry["runs"] is None else str(entry["runs"]),
            units.size(entry["size"]),
            terminal.safe(entry["path"]),
        )
        for entry in found
    ]
    for line in table(columns, rows, fit=None, color=ctx.out_color):
        ctx.print(line)
    return 0


def restore(ctx: Context, *, path: str | None, stop_server: bool, as_json: bool) -> int:
    from stoker.cli import restore as restoring

    if path is None:
        paths = [Path(entry["path"]) for entry in restoring.best_first(ctx.home)]
        if not paths:
            raise NotFound(
                "this home has no backups",
                hint="Name one: stoker backup restore PATH. Without any: stoker server start --anew",
                details={"what": "backup"},
            )
    else:
        paths = [Path(path).expanduser().absolute()]
    restoring.database_in(ctx.home, paths[0])
    _server_away(ctx, stop_server)
    report = _restore_first(ctx, paths)
    if as_json:
        ctx.json(report)
        return 0
    _print_restored(ctx, report)
    return 0


def _restore_first(ctx: Context, paths: list[Path]) -> Json:
    """Restores the first copy that is not damaged."""
    from stoker.cli import restore as restoring

    damaged: list[str] = []
    for copy in paths:
        try:
            return {**restoring.restore(ctx.home, copy), "damaged": damaged}
        except StoreDamaged as exc:
            if copy == paths[-1]:
                raise
            ctx.note(f"passed over: {terminal.safe(exc.message)}")
            damaged.append(str(copy))
    raise AssertionError("no copy was named")


def _print_restored(ctx: Context, report: Json) -> None:
    runs = "?" if report["runs"] is None else units.plural(report["runs"], "run")
    ctx.note(
        f"restored from {terminal.safe(report['from'])}: {runs}, made {units.age(report['made_at'])} ago"
    )
    if report["aside"]:
        ctx.note(f"what was there is in {terminal.safe(report['aside'])}")
    if not report["missing"]:
        ctx.note("every run this home acknowledged is there")
        return
    count = len(report["missing"])
    ctx.note(
        f"{units.plural(count, 'run')} acknowledged after the copy was made {'is' if count == 1 else 'are'} missing:"
    )
    for entry in report["missing"]:
        when = units.clock(entry["t"]) if isinstance(entry.get("t"), int | float) else "-"
        ctx.print(f"{terminal.safe(entry['id'])}  {when}  {terminal.safe(entry.get('name') or '')}".rstrip())
    ctx.note(
        "their files and running tasks are kept; to end the tasks and free the rest: stoker backup forget"
    )


def forget(ctx: Context, *, runs: tuple[str, ...], everything: bool, as_json: bool) -> int:
    if bool(runs) == everything:
        raise UsageMistake(
            "name runs, or --all", hint="stoker server status lists those that the database lacks."
        )
    answer = ctx.client.forget(runs)
    if as_json:
        ctx.json(answer["forgotten"])
        return 0
    for entry in answer["forgotten"]:
        ended = f", {units.plural(len(entry['tasks']), 'task')} told to end" if entry["tasks"] else ""
        ctx.note(f"{terminal.safe(entry['id'])} forgotten{ended}")
    return 0


def _server_away(ctx: Context, stop: bool) -> None:
    from stoker.cli.commands.server import facts, has_no_database, stop_server
    from stoker.client import local

    record = local.running(ctx.home)
    if record is None:
        return
    stop = stop or has_no_database(facts(ctx))
    if not stop and ctx.interactive:
        ctx.err.write(f"the server (pid {record['pid']}) runs; stop it? runs go on. [y/N] ")
        ctx.err.flush()
        assert ctx.stdin is not None
        stop = terminal.read_line(ctx.stdin).strip().lower() in ("y", "yes")
    if not stop:
        raise Conflict(
            "the server runs, and its database cannot be replaced under it",
            hint="stoker server stop, or add --stop-server; runs go on meanwhile.",
        )
    stop_server(ctx)


_SUBS = (
    Command(
        "create",
        create,
        summary="copy the whole home, while the server runs; prints where",
        arguments=[
            Argument("path", count=0, complete="file", help="Where to; default: a new folder in the home.")
        ],
        options=[JSON],
        shapes="what `POST /api/v1/backups` answers (has `path`)",
    ),
    Command(
        "restore",
        restore,
        summary="restore the home from a copy, and list runs that the copy does not know",
        help="Restore the home from a copy (default: of those in the home with the most runs, the newest). The "
        "server must be stopped. The old database is moved aside, not deleted. Tasks go on. Runs that were acknowledged "
        "after the copy was made are listed, and left alone.",
        arguments=[Argument("path", count=0, complete="file")],
        options=[Option("--stop-server", flag=True, help="Stop the server without asking."), JSON],
        shapes="`{from, runs, made_at, aside, added, damaged: [path], missing: [{id, name, t}]}`",
    ),
    Command(
        "forget",
        forget,
        summary="end and forget runs that a restored database does not know",
        help="End and forget runs that the database does not know, because it was restored from an older copy. Their running "
        "tasks are ended (SIGTERM, 30 seconds, SIGKILL), and blobs that nothing else needs are freed later. Until "
        "then these runs are not touched and no blobs are swept. Their logs and task directories stay in the home.",
        arguments=[Argument("runs", metavar="RUN", count=-1, help="As `stoker server status` names them.")],
        options=[Option("--all", dest="everything", flag=True, help="All of them."), JSON],
        shapes="a list of `{id, name, t, tasks: [{attempt, task, engine, node}]}`",
    ),
    Command(
        "list",
        listing,
        summary="the copies in this home",
        options=[JSON],
        shapes="a list of `{path, kind, made_at, size, runs}`",
    ),
)

COMMANDS = {
    "backup": Command(
        "backup",
        None,
        summary="copy the whole home, or restore it",
        help="Copies of the home: runs, logs, checkpoints, outputs. The database alone is also copied every hour.",
        subcommands=_SUBS,
    )
}
