"""`stoker server`."""

from __future__ import annotations

import os
import time
from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.params import JSON, Command, Option
from stoker.cli.rendering import terminal, units
from stoker.errors import Conflict, ServerUnreachable, StokerError

Json = dict[str, Any]
STOP_LIMIT = 30.0


def start(ctx: Context, *, anew: bool = False, as_json: bool) -> int:
    _own_server_only()
    from stoker.client import local

    if anew:
        _move_aside(ctx)
    before = local.running(ctx.home)
    record = before or local.start(ctx.home)
    if as_json:
        ctx.json(facts(ctx))
        return 0
    ctx.note(
        f"the server {'already runs' if before else 'runs'}: pid {record['pid']}, {terminal.safe(record['url'])}"
    )
    found = facts(ctx)
    if has_no_database(found):
        ctx.note(f"but it refuses every request: {terminal.safe(found['store']['status'])}")
        ctx.note(f"hint: {terminal.safe(found['store'].get('hint') or 'See stoker server logs.')}")
    return 0


def _move_aside(ctx: Context) -> None:
    from stoker.cli.new_database import move_aside_all  # lazy: rarely needed

    if has_no_database(facts(ctx)):
        stop_server(ctx)
    aside = move_aside_all(ctx.home)
    if aside is not None:
        ctx.note(f"what was left of the lost database is in {terminal.safe(str(aside))}")


def stop(ctx: Context, *, as_json: bool) -> int:
    _own_server_only()
    stopped = stop_server(ctx)
    if as_json:
        ctx.json({"running": False, "stopped": stopped})
    else:
        ctx.note("the server has stopped; runs go on" if stopped else "the server does not run")
    return 0


def stop_server(ctx: Context) -> bool:
    """End the server of this home and wait until it has ended; False when none ran. Its tasks go on."""
    from stoker.client import local

    record = local.running(ctx.home)
    if record is None:
        return False
    try:
        ctx.connect(autostart=False).shutdown()
    except ServerUnreachable:
        # The server ended before it could answer.
        pass
    until = time.monotonic() + STOP_LIMIT
    # The server holds its lock a little longer than server.json. A caller may start the next one, which needs the
    # lock.
    while local.running(ctx.home) is not None or local.locked(ctx.home):
        if time.monotonic() > until:
            raise Conflict(
                f"the server (pid {record['pid']}) has not stopped within {STOP_LIMIT:.0f} seconds",
                hint=f"See stoker server logs; kill {record['pid']} ends it, runs go on.",
            )
        time.sleep(0.02)
    return True


def restart(ctx: Context, *, as_json: bool) -> int:
    _own_server_only()
    stop_server(ctx)
    return start(ctx, as_json=as_json)


def status(ctx: Context, *, as_json: bool) -> int:
    """0 when it answers, 4 when it does not."""
    found = facts(ctx)
    if as_json:
        ctx.json(found)
        return 0 if found["running"] else 4
    if not found["running"]:
        ctx.print(f"the server of {terminal.safe(found['home'])} does not run")
        return 4
    for label, text in _lines(found):
        ctx.print(f"{label:<9} {text}")
    return 0


def facts(ctx: Context) -> Json:
    """`{running, home, pid, url, version, started_at, leading, store, counts, unknown}`; never starts a server."""
    home = str(ctx.home.root)
    try:
        server: Json = ctx.connect(autostart=False).server()
    except ServerUnreachable as exc:
        return {"running": False, "home": home, "pid": None, "url": None, "reason": exc.message}
    return {"running": True, **server, "home": server.get("home") or home}


def has_no_database(found: Json) -> bool:
    """Whether it runs only to report that its database is lost or damaged."""
    store = found.get("store") or {}
    return bool(found.get("leading")) and store.get("schema") is None and store.get("status") != "ok"


def _lines(found: Json) -> list[tuple[str, str]]:
    store = found.get("store") or {}
    counts = found.get("counts") or {}
    states = ", ".join(f"{count} {terminal.safe(state)}" for state, count in sorted(counts.items()) if count)
    return [
        ("url", terminal.safe(found["url"])),
        ("pid", str(found["pid"])),
        ("version", terminal.safe(found.get("version") or "?")),
        ("home", terminal.safe(found["home"])),
        ("up", units.age(found.get("started_at"))),
        (
            "store",
            f"{terminal.safe(store.get('kind'))}, schema {store.get('schema')}, {terminal.safe(store.get('status'))}",
        ),
        ("runs", states or "none"),
        *_unknown(found.get("unknown") or []),
    ]


def _unknown(runs: list[Json]) -> list[tuple[str, str]]:
    if not runs:
        return []
    names = ", ".join(f"{terminal.safe(run['id'])}{_tasks(run)}" for run in runs[:10])
    more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
    return [
        ("unknown", f"to the database, but not to this home: {names}{more}"),
        ("", "not touched; to end their tasks and free their blobs: stoker backup forget RUN | --all"),
    ]


def _tasks(run: Json) -> str:
    return f" ({units.plural(len(run['tasks']), 'task')} there)" if run["tasks"] else ""


def logs(ctx: Context, *, follow: bool, tail: int) -> int:
    if tail < 0:
        raise UsageMistake(f"--tail: {tail} is negative", hint="For the last ten lines: --tail 10")
    path = ctx.home.server_log
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise StokerError(
            f"there is no {path}", hint="The server has not been started in this home yet."
        ) from None
    except OSError as exc:
        raise StokerError(f"cannot read {path}: {(exc.strerror or '').lower()}") from exc
    with file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - (1 << 20)))
        lines = file.read().decode(errors="replace").splitlines()
        for line in lines[len(lines) - min(tail, len(lines)) :]:
            ctx.print(terminal.safe_log(line, colors=False))
        rest = b""
        while follow:
            ctx.out.flush()
            *whole, rest = (rest + file.read()).split(b"\n")
            for found in whole:
                ctx.print(terminal.safe_log(found.decode(errors="replace"), colors=False))
            time.sleep(0.3)
    return 0


def migrate(ctx: Context, *, to: str | None, as_json: bool) -> int:
    _own_server_only()
    from stoker.cli.database_move import migrate as move

    progress = _Rows(ctx)
    try:
        report = move(ctx.home, to, progress)
    finally:
        progress.clear()
    if as_json:
        ctx.json(report)
        return 0
    done = "was there already" if report["already"] else "moved and compared"
    ctx.note(f"{sum(report['rows'].values())} rows {done}: {terminal.safe(report['to'])}")
    if report["kept"]:
        ctx.note(f"the old database is kept: {terminal.safe(report['kept'])}")
    ctx.note(f"set in {terminal.safe(report['setting'])}; the next start of the server uses it")
    return 0


class _Rows:
    """Progress of the move: one transient line on a terminal, else a line per table."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._terminal = terminal.is_terminal(ctx.err)
        self._drawn = False

    def __call__(self, table: str, done: int, of: int) -> None:
        text = f"{table}: {done} of {of} rows"
        if self._terminal:
            self._drawn = True
            self._ctx.err.write(f"\r{text}\x1b[K")
            self._ctx.err.flush()
        elif done == of:
            self._ctx.note(text)

    def clear(self) -> None:
        if self._drawn:
            self._ctx.err.write("\r\x1b[K")
            self._ctx.err.flush()


def _own_server_only() -> None:
    if os.environ.get("STOKER_URL"):
        raise Conflict(
            "STOKER_URL names a server that is not this home's own",
            hint="Unset STOKER_URL to manage your own server.",
        )


_SUBS = (
    Command(
        "start",
        start,
        summary="start it if it does not run",
        options=[
            Option(
                "--anew",
                flag=True,
                help="When the database is lost: move what is left (runs, blobs, copies) into a folder of the home "
                "and start with an empty database.",
            ),
            JSON,
        ],
        shapes="as `server status`",
    ),
    Command(
        "stop", stop, summary="end it; runs go on without it", options=[JSON], shapes="`{running, stopped}`"
    ),
    Command(
        "restart",
        restart,
        summary="end it and start it again; runs go on",
        options=[JSON],
        shapes="as `server status`",
    ),
    Command(
        "status",
        status,
        summary="whether it runs and where; exit code 4 when it does not",
        options=[JSON],
        shapes="`{running, home, pid, url, version, started_at, leading, store, counts, unknown}`",
    ),
    Command(
        "logs",
        logs,
        summary="show its log",
        options=[
            Option("-f", "--follow", flag=True, help="Go on until Ctrl-C."),
            Option(
                "-n", "--tail", kind=int, default=100, metavar="N", help="The last N lines (default 100)."
            ),
        ],
    ),
    Command(
        "migrate",
        migrate,
        summary="move the home's database to PostgreSQL, or back",
        help="Copies every row while the server is stopped, compares all of them, writes the setting and keeps the old "
        "database. After an interruption it can be run again. The target must be empty or hold the same rows.",
        options=[
            Option(
                "--to",
                metavar="URL",
                help="postgresql://user:password@host/name, or sqlite for the file in the home. Default: STOKER_DATABASE, "
                "which keeps a password out of the command line.",
            ),
            JSON,
        ],
        shapes="`{from, to, rows: {table: n}, already, kept, setting}`",
    ),
)

COMMANDS = {
    "server": Command(
        "server",
        None,
        summary="start, stop and look at your own server",
        help="Your own server: it runs in the background and is started by the first command that needs it. Training "
        "does not depend on it.",
        subcommands=_SUBS,
    )
}
