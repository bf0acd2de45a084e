"""uvicorn as this server uses it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from types import FrameType

import uvicorn

from stoker.client.local import running
from stoker.server import startup
from stoker.server.app import create_app
from stoker.server.connections import Connections, GuardedProtocol, Limits
from stoker.server.security import shows
from stoker.server.services import Services

log = logging.getLogger(__name__)

GRACE = 5
"""Seconds that requests under way have to finish once the server is told to end."""


LOOK = 1.0
"""Seconds between looks at what people may delete by hand: server.json is written again, a deleted lock ends the
server, because the next one would not know of it."""


class Server(uvicorn.Server):
    """uvicorn, ended by a signal or by the shutdown route. Those who wait for a run are let go first, or they
    would hold it up."""

    def __init__(self, services: Services, lock: int | None = None, limits: Limits | None = None) -> None:
        """`lock`: the descriptor of the home's lock, watched for as long as the server runs."""
        door = Connections(functools.partial(shows, services.token.encode()), limits or Limits())
        config = uvicorn.Config(
            create_app(services),
            loop="uvloop",
            http=functools.partial(GuardedProtocol, door),  # type: ignore[arg-type]  # called, never inspected
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._services = services
        self._lock = lock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = asyncio.Event()
        """To end."""
        services.stop = self.stop

    def stop(self) -> None:
        """May be called more than once, from any thread."""
        services = self._services
        with contextlib.suppress(OSError):
            if services.waits is None or startup.is_recorded(services.settings.home, services.url):
                startup.write_record(services.settings.home, services.url, services.started_at, stopping=True)
        services.closing.set()
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: it has ended
                self._loop.call_soon_threadsafe(self._told.set)

    async def main_loop(self) -> None:
        """In place of uvicorn's, which wakes ten times a second to see whether it should end."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            if self._lock is not None:
                self._look(self._lock)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), LOOK)

    def _look(self, lock: int) -> None:
        services = self._services
        home = services.settings.home
        if not startup.still_locked(home, lock):
            log.error(
                "the lock of the home %s was deleted; ending, so that there are never two servers", home.root
            )
            self.stop()
        elif not startup.is_recorded(home, services.url) and _is_to_be_found(services):
            with contextlib.suppress(OSError):
                startup.write_record(home, services.url, services.started_at)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In place of uvicorn's, which would raise the signal again at the end and skip our own ending."""
        log.info("told to end by signal %d", sig)
        self.stop()


def _is_to_be_found(services: Services) -> bool:
    """Whether server.json should say where this server is: when it leads; and when a server elsewhere does and it
    is the only one here, to tell people so."""
    if services.waits is None or services.leading is None:
        return True
    home = services.settings.home
    return not home.replica and services.leading.leader is not None and running(home) is None
