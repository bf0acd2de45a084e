"""`stoker backup`."""

from __future__ import annotations

from pathlib import Path

from stoker.cli import human, term
from stoker.cli.context import Context
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.render import Column, table
from stoker.errors import Conflict, NotFound


def create(ctx: Context, *, path: str | None, as_json: bool) -> int:
    target = None if path is None else str(Path(path).expanduser().absolute())
    answer = ctx.client.backup(target)
    if as_json:
        ctx.json(answer)
        return 0
    ctx.print(term.safe(answer["path"]))
    return 0


def listing(ctx: Context, *, as_json: bool) -> int:
    from stoker.cli.restoring import copies

    found = copies(ctx.home)
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
        Column("SIZE", right=True),
        Column("PATH"),
    )
    rows = [
        (
            human.clock(entry["made_at"]),
            human.age(entry["made_at"]),
            str(entry["kind"]),
            human.size(entry["size"]),
            term.safe(entry["path"]),
        )
        for entry in found
    ]
    for line in table(columns, rows, fit=None, color=ctx.out_color):
        ctx.print(line)
    return 0


def restore(ctx: Context, *, path: str | None, stop_server: bool, as_json: bool) -> int:
    from stoker.cli import restoring

    if path is None:
        found = restoring.copies(ctx.home)
        if not found:
            raise NotFound(
                "this home has no backups",
                hint="Name one: stoker backup restore PATH",
                details={"what": "backup"},
            )
        path = str(found[0]["path"])
    copy = Path(path).expanduser().absolute()
    restoring.database_in(ctx.home, copy)
    _server_away(ctx, stop_server)
    report = restoring.restore(ctx.home, copy)
    if as_json:
        ctx.json(report)
        return 0
    ctx.note(f"restored from {term.safe(report['from'])}")
    if report["aside"]:
        ctx.note(f"what was there is in {term.safe(report['aside'])}")
    if not report["missing"]:
        ctx.note("every run this home acknowledged is there")
        return 0
    count = len(report["missing"])
    ctx.note(
        f"{human.plural(count, 'run')} acknowledged after the copy was made {'is' if count == 1 else 'are'} missing:"
    )
    for entry in report["missing"]:
        when = human.clock(entry["t"]) if isinstance(entry.get("t"), int | float) else "-"
        ctx.print(f"{term.safe(entry['id'])}  {when}  {term.safe(entry.get('name') or '')}".rstrip())
    return 0


def _server_away(ctx: Context, stop: bool) -> None:
    from stoker.cli.commands.server import stop_server
    from stoker.client import local

    record = local.running(ctx.home)
    if record is None:
        return
    if not stop and ctx.interactive:
        ctx.err.write(f"the server (pid {record['pid']}) runs; stop it? runs go on. [y/N] ")
        ctx.err.flush()
        assert ctx.stdin is not None
        stop = ctx.stdin.readline().strip().lower() in ("y", "yes")
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
        summary="bring the home back from a copy, and say which runs it does not know",
        help="Bring the home back from a copy (default: the newest in the home). The server must be stopped. What was "
        "there is put aside, not deleted. Runs that were acknowledged after the copy was made are listed.",
        arguments=[Argument("path", count=0, complete="file")],
        options=[Option("--stop-server", flag=True, help="Stop the server without asking."), JSON],
        shapes="`{from, aside, added, missing: [{id, name, t}]}`",
    ),
    Command(
        "list",
        listing,
        summary="the copies in this home",
        options=[JSON],
        shapes="a list of `{path, kind, made_at, size}`",
    ),
)

COMMANDS = {
    "backup": Command(
        "backup",
        None,
        summary="copy the whole home, and bring it back",
        help="Copies of the home: runs, logs, checkpoints, outputs. The database alone is also copied every hour.",
        subcommands=_SUBS,
    )
}
