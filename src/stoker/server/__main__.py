"""`python -m stoker.server --home PATH`: the server of one home, in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from stoker import __version__
from stoker.blobs import BlobStore
from stoker.control import run_secrets
from stoker.control.controller import Controller
from stoker.control.logs.reader import LogArchive
from stoker.engine.local import LocalEngine
from stoker.errors import StokerError, StoreDamaged, StoreLost
from stoker.launcher.recovery import collect
from stoker.server import startup
from stoker.server.clusters import Kubernetes
from stoker.server.http_server import Server
from stoker.server.leadership import Holder, Leadership
from stoker.server.log_redaction import redactor
from stoker.server.services import Services
from stoker.settings import Home, Settings
from stoker.store import Store, is_shared, secrets_in

log = logging.getLogger("stoker.server")


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGTERM, SIGINT or the shutdown route. Returns 0 after an orderly end."""
    arguments = _parse(argv)
    if arguments.report is not None:
        os.set_inheritable(arguments.report, False)
    home = Home.from_environment()
    if arguments.home:
        home = replace(home, root=Path(arguments.home).expanduser().absolute())
    try:
        startup.check_name(home)
        startup.prepare(home)
        lock = startup.take_lock(home)
    except StokerError as exc:
        return _refuse(exc, arguments.report)
    try:
        startup.log_to(home)
        return _serve(home, arguments, lock)
    except StokerError as exc:
        log.error("cannot start: %s", exc)
        return _refuse(exc, arguments.report)
    except OSError as exc:
        log.error("cannot start: %s", exc)
        return _refuse(startup.unusable(home, exc), arguments.report)
    finally:
        os.close(lock)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stoker.server", description=__doc__)
    parser.add_argument("--home", help="where everything is kept (default: STOKER_HOME)")
    parser.add_argument("--host", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, help="port to listen on (default: a free one)")
    parser.add_argument(
        "--report", type=int, help=argparse.SUPPRESS
    )  # pipe to the command that starts the server
    return parser.parse_args(argv)


def _refuse(exc: StokerError, report: int | None) -> int:
    """Reports the error in one line, for a user or for the command that started this server."""
    hint = f" hint: {exc.hint}" if exc.hint else ""
    line = f"stoker: {exc.message}{hint}".replace("\n", " ").rstrip() + "\n"
    # The log may be on the disk that is full, and the command may have ended.
    with contextlib.suppress(OSError):
        sys.stderr.write(line)
        sys.stderr.flush()
    if report is not None:
        with contextlib.suppress(OSError):
            os.write(report, line.encode(errors="replace"))
    return exc.exit_code


def _serve(home: Home, arguments: argparse.Namespace, lock: int) -> int:
    os.chdir(home.root)
    settings = _settings(home, arguments)
    token = startup.token_of(home)
    startup.check_exposure(settings.server.host, token)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(
            contextlib.closing(startup.bind(settings.server.host, settings.server.port))
        )
        services = _services(settings, token, startup.url_of(sock))
        stack.callback(_remove_record, services)
        if is_shared(settings.database):
            _wait_to_lead(services, lock, stack)
        else:
            stack.callback(_deactivate, services)
            _activate(services)
        log.info("serving %s at %s, version %s, pid %d", home.root, services.url, __version__, os.getpid())
        startup.tune_garbage_collector()
        Server(services, lock).run(sockets=[sock])
        log.info("ending")
    return 0


def _wait_to_lead(services: Services, lock: int, stack: contextlib.ExitStack) -> None:
    """Waits in the background. Meanwhile this server answers that it does not lead."""
    settings, home = services.settings, services.settings.home
    leading = Leadership(
        str(settings.database),
        holder=Holder.of(lock, home.replica),
        url=services.url,
        lease=settings.server.lease,
    )
    if not home.replica:
        leading.connect()  # the only server of a home fails at once when its database is unreachable
    services.leading = leading
    stack.callback(leading.leave)
    stack.callback(_deactivate, services)
    leading.start(lambda epoch: _activate(services, epoch))
    stack.callback(leading.stop_waiting)


def _activate(services: Services, epoch: int | None = None) -> None:
    """Opens the database and starts the control loop."""
    settings = services.settings
    try:
        store = Store.of_home(settings.home, settings.database, epoch=epoch)
    except (StoreDamaged, StoreLost) as exc:
        # Stays up to report the fault: every route that needs the database refuses. Tasks go on.
        log.error("%s. %s", exc, exc.hint)
        services.trouble = exc
    else:
        redactor.hide(run_secrets.every(settings.home))  # secrets that an earlier server received
        if services.leading is not None:
            store.when_fenced(services.leading.fenced)
        controller = Controller(
            settings, store, services.blobs, LocalEngine(settings, collect), Kubernetes(settings)
        )
        services.parts = (store, controller)
        controller.start()
    try:
        startup.write_record(settings.home, services.url, services.started_at)
    except OSError as exc:
        raise startup.unusable(settings.home, exc, settings.home.server_record) from exc


def _deactivate(services: Services) -> None:
    if services.parts is not None:
        store, controller = services.parts
        controller.shutdown()
        store.close()


def _settings(home: Home, arguments: argparse.Namespace) -> Settings:
    settings = Settings.load(home)
    redactor.hide(secrets_in(settings.database))
    startup.check_sharing(home, shared=is_shared(settings.database))
    server = settings.server
    if arguments.host is not None:
        server = replace(server, host=arguments.host)
    if arguments.port is not None:
        server = replace(server, port=arguments.port)
    return replace(settings, server=server)


def _services(settings: Settings, token: str, url: str) -> Services:
    home = settings.home
    return Services(
        settings=settings,
        token=token,
        home_id=startup.home_id(home),
        blobs=BlobStore(home.blobs),
        archive=LogArchive(home),
        user=_user(),
        started_at=time.time(),
        version=__version__,
        url=url,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # An account without a name, as is common in containers.
        return f"uid-{os.getuid()}"


def _remove_record(services: Services) -> None:
    """Removes server.json, so that the next command starts a new server."""
    home = services.settings.home
    if startup.is_recorded(home, services.url):
        with contextlib.suppress(OSError):
            home.server_record.unlink()


if __name__ == "__main__":
    sys.exit(main())
