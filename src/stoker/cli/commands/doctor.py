"""`stoker doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.cli import render, term
from stoker.cli.context import Context
from stoker.cli.params import JSON, Command
from stoker.errors import ServerUnreachable, StokerError

if TYPE_CHECKING:
    from stoker.settings import Home, Settings

Json = dict[str, Any]
MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def doctor(ctx: Context, *, as_json: bool) -> int:
    """Exits 1 when something fails; warnings are not failures."""
    facts = [*_program(), *_settings(ctx), *_server(ctx)]
    failed = sum(fact["status"] == "fail" for fact in facts)
    warned = sum(fact["status"] == "warn" for fact in facts)
    if as_json:
        ctx.json({"ok": not failed, "facts": facts})
        return 1 if failed else 0
    wide = max(term.width(term.safe(fact["name"])) for fact in facts)
    for fact in facts:
        _print(ctx, fact, wide)
    ctx.out.flush()
    if failed or warned:
        ctx.note(f"\n{_count(failed, 'problem')}, {_count(warned, 'warning')}")
    else:
        ctx.note("\nall is well")
    return 1 if failed else 0


def _print(ctx: Context, fact: Json, wide: int) -> None:
    mark, colour = MARKS.get(fact["status"], ("?", "red"))
    room = 100_000 if ctx.columns is None else ctx.columns - wide - 8
    first, *rest = render.wrap(str(fact["text"]), room) or [""]
    ctx.print(
        f"{ctx.style(f'{mark:<4}', colour)}  {term.pad(term.safe(fact['name']), wide)}  {first}".rstrip()
    )
    indent = " " * (wide + 8)
    for line in rest:
        ctx.print(indent + line)
    if fact.get("fix") and fact["status"] != "ok":
        fixes = render.wrap(f"fix: {fact['fix']}", room)
        for line in fixes:
            ctx.print(ctx.style(indent + line, "cyan"))


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def _fact(name: str, status: str, text: str, fix: str = "") -> Json:
    return {"name": name, "status": status, "text": text, "fix": fix}


def _program() -> list[Json]:
    from stoker import __version__

    return [_fact("stoker", "ok", __version__)]


def _settings(ctx: Context) -> list[Json]:
    """The machine, looked at with the settings of this home; or what is wrong with the settings."""
    from stoker.settings import Settings

    try:
        settings = Settings.load(ctx.home)
    except (StokerError, OSError) as exc:
        fix = exc.hint if isinstance(exc, StokerError) else None
        return [_fact("settings", "fail", str(exc), fix or "Fix config.toml in the home.")]
    return [*_machine(settings), *_home(settings.home), *_ports(settings)]


def _machine(settings: Settings) -> list[Json]:
    from stoker.engine.local import doctor_facts  # lazy: the engine is large

    return [_fact(fact.name, str(fact.status), fact.text, fact.fix) for fact in doctor_facts(settings)]


def _home(home: Home) -> list[Json]:
    root = home.root
    if not root.exists():
        return [_fact("home", "ok", f"{root} (made on first use)")]
    mode = root.stat().st_mode & 0o777
    found = []
    if mode & 0o077:
        found.append(_fact("home", "warn", f"{root} can be read by others ({mode:o})", f"chmod 700 {root}"))
    else:
        found.append(_fact("home", "ok", str(root)))
    if home.token.exists() and home.token.stat().st_mode & 0o077:
        found.append(_fact("token", "fail", f"{home.token} can be read by others", f"chmod 600 {home.token}"))
    return found


def _ports(settings: Settings) -> list[Json]:
    """Whether the server could listen where it is told to; one that runs holds its port rightly."""
    from stoker.client import local

    host, port = settings.server.host, settings.server.port
    if local.running(settings.home) is not None:
        return []
    import socket

    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as exc:
        text = f"cannot listen on {host} port {port or '(any)'}: {exc}"
        return [
            _fact(
                "port",
                "fail",
                text,
                f"Choose another port in [server] of {settings.home.config}, or 0 for any.",
            )
        ]
    return [_fact("port", "ok", f"{port} is free" if port else f"a free one on {host}")]


def _server(ctx: Context) -> list[Json]:
    """Whether the server answers; it is not started for this."""
    from stoker import __version__

    try:
        server = ctx.connect(autostart=False).server()
    except ServerUnreachable as exc:
        if "does not run" in exc.message:
            return [_fact("server", "ok", "does not run; the first command that needs it starts it")]
        return [_fact("server", "fail", exc.message, exc.hint or "stoker server restart")]
    except StokerError as exc:
        return [_fact("server", "fail", exc.message, exc.hint or "See stoker server logs.")]
    found = [_fact("server", "ok", f"answers at {server['url']}, pid {server['pid']}")]
    if server.get("version") != __version__:
        text = f"runs version {server.get('version')}, this is {__version__}"
        found.append(_fact("server version", "warn", text, "stoker server restart; runs go on."))
    status = (server.get("store") or {}).get("status")
    if status != "ok":
        found.append(_fact("database", "fail", str(status), "stoker backup restore"))
    return found


COMMANDS = {
    "doctor": Command(
        "doctor",
        doctor,
        summary="check this machine and say what to fix",
        help="Check this machine: what isolates runs from each other, CPU, memory, GPUs and their health, disk, limits, "
        "clock, home, server. Each finding comes with its fix. Changes nothing and starts no server. Exits 1 when "
        "something fails.",
        options=[JSON],
        examples=[("stoker doctor", "")],
        shapes="`{ok, facts: [{name, status: ok|warn|fail, text, fix}]}`",
    )
}
