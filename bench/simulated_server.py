"""A real server (HTTP, control loop, SQLite) whose tasks are simulated: a thousand of them on a machine
with two CPUs. `python -m bench.simulated_server --home PATH --cpu N`; bodies never end by themselves."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import sys
import time
from pathlib import Path

from stoker import __version__
from stoker.blobs import BlobStore
from stoker.control.controller import Controller
from stoker.control.logs.reader import LogArchive
from stoker.engine.base import Node
from stoker.server import startup
from stoker.server.http_server import Server
from stoker.server.services import Services
from stoker.settings import Home, Settings
from stoker.store import Store
from stoker.task import formats
from stoker.testing.fake_engine import Behaviour, FakeEngine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.simulated_server", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--cpu", type=float, required=True, help="CPUs of the simulated machine")
    arguments = parser.parse_args(argv)
    home = Home(arguments.home.absolute())
    startup.prepare(home)
    lock = startup.take_lock(home)
    try:
        startup.log_to(home)
        serve(home, arguments.cpu)
    finally:
        os.close(lock)
    return 0


def serve(home: Home, cpu: float) -> None:
    """Serve until SIGTERM. Everything but the engine is the same as in `python -m stoker.server`."""
    settings = Settings.load(home)
    token = startup.token_of(home)
    blobs = BlobStore(home.blobs)
    engine = FakeEngine(home, _hang, nodes=[Node("simulated", cpu=cpu, memory=1 << 50)])
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(startup.bind("127.0.0.1", 0)))
        services = Services(
            settings=settings,
            token=token,
            home_id=startup.home_id(home),
            blobs=blobs,
            archive=LogArchive(home),
            user=getpass.getuser(),
            started_at=time.time(),
            version=__version__,
            url=startup.url_of(sock),
        )
        store = Store.open(home.database)
        stack.callback(store.close)
        controller = Controller(settings, store, blobs, engine)
        services.parts = (store, controller)
        controller.start()
        stack.callback(controller.shutdown)
        startup.write_record(home, services.url, services.started_at)
        startup.tune_garbage_collector()
        Server(services).run(sockets=[sock])


def _hang(info: formats.TaskInfo, order: formats.Order) -> Behaviour:
    return Behaviour(hang=True)


if __name__ == "__main__":
    sys.exit(main())
