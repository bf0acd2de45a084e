"""`stoker doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.cli import checklist
from stoker.cli.checklist import fact
from stoker.cli.context import Context
from stoker.cli.params import JSON, Command
from stoker.errors import ServerUnreachable, StokerError

if TYPE_CHECKING:
    from stoker.settings import Home, Settings

Json = dict[str, Any]


def doctor(ctx: Context, *, as_json: bool) -> int:
    """Exits 1 when something fails; a warning is no failure."""
    found = [*_program(), *_settings(ctx), *_server(ctx)]
    if as_json:
        failed = any(one["status"] == "fail" for one in found)
        ctx.json({"ok": not failed, "facts": found})
        return 1 if failed else 0
    return checklist.show(ctx, found)


def _program() -> list[Json]:
    from stoker import __version__

    return [fact("stoker", "ok", __version__)]


def _settings(ctx: Context) -> list[Json]:
    """Facts about the machine by the settings of this home; or what is wrong with the settings."""
    from stoker.settings import Settings

    try:
        settings = Settings.load(ctx.home)
    except (StokerError, OSError) as exc:
        fix = exc.hint if isinstance(exc, StokerError) else None
        return [fact("settings", "fail", str(exc), fix or "Fix config.toml in the home.")]
    return [*_machine(settings), *_home(settings.home), *_ports(settings)]


def _machine(settings: Settings) -> list[Json]:
    from stoker.engine.local import doctor_facts  # lazy: the engine is large

    return [fact(found.name, str(found.status), found.text, found.fix) for found in doctor_facts(settings)]


def _home(home: Home) -> list[Json]:
    root = home.root
    if not root.exists():
        return [fact("home", "ok", f"{root} (made on first use)")]
    mode = root.stat().st_mode & 0o777
    found = []
    if mode & 0o077:
        found.append(fact("home", "warn", f"{root} can be read by others ({mode:o})", f"chmod 700 {root}"))
    else:
        found.append(fact("home", "ok", str(root)))
    if home.token.exists() and home.token.stat().st_mode & 0o077:
        found.append(fact("token", "fail", f"{home.token} can be read by others", f"chmod 600 {home.token}"))
    return found


def _ports(settings: Settings) -> list[Json]:
    """Whether the server could listen on its port. Nothing while it runs: then it holds the port itself."""
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
            fact(
                "port",
                "fail",
                text,
                f"Choose another port in [server] of {settings.home.config}, or 0 for any.",
            )
        ]
    return [fact("port", "ok", f"{port} is free" if port else f"a free one on {host}")]


def _server(ctx: Context) -> list[Json]:
    """Whether the server answers. It is not started for this."""
    from stoker import __version__

    try:
        server = ctx.connect(autostart=False).server()
    except ServerUnreachable as exc:
        if "does not run" in exc.message:
            return [fact("server", "ok", "does not run; the first command that needs it starts it")]
        return [fact("server", "fail", exc.message, exc.hint or "stoker server restart")]
    except StokerError as exc:
        return [fact("server", "fail", exc.message, exc.hint or "See stoker server logs.")]
    found = [fact("server", "ok", f"answers at {server['url']}, pid {server['pid']}")]
    if server.get("version") != __version__:
        text = f"runs version {server.get('version')}, this is {__version__}"
        found.append(fact("server version", "warn", text, "stoker server restart; runs go on."))
    status = (server.get("store") or {}).get("status")
    if status != "ok":
        hint = (server.get("store") or {}).get("hint")
        found.append(fact("database", "fail", str(status), str(hint or "stoker backup restore")))
    if unknown := server.get("unknown"):
        running = sum(bool(run["tasks"]) for run in unknown)
        text = f"does not know {len(unknown)} run(s) of this home, {running} of them with tasks: {unknown[0]['id']}, ..."
        fix = "stoker server status names them; stoker backup forget RUN | --all ends and forgets them"
        found.append(fact("database", "warn", text, fix))
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
