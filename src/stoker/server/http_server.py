"""uvicorn with this server's limits and shutdown."""

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
from stoker.server.security import has_token
from stoker.server.services import Services

log = logging.getLogger(__name__)

GRACE = 5
"""Seconds for requests under way to finish once the server is told to end."""


CHECK_EVERY = 1.0
"""Seconds between checks of files that users may delete. server.json is written again. A deleted lock ends the
server, because the next server would not know of this one."""


class Server(uvicorn.Server):
    """uvicorn, ended by a signal or by the shutdown route. Requests that wait for a run are ended first, because they
    would delay the end."""

    def __init__(self, services: Services, lock: int | None = None, limits: Limits | None = None) -> None:
        """`lock`: the descriptor of the home's lock, watched while the server runs."""
        connections = Connections(functools.partial(has_token, services.token.encode()), limits or Limits())
        config = uvicorn.Config(
            create_app(services),
            loop="uvloop",
            http=functools.partial(GuardedProtocol, connections),  # type: ignore[arg-type]  # called, never inspected
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
        self._ending = asyncio.Event()
        """Set when the server is to end."""
        services.stop = self.stop

    def stop(self) -> None:
        """Ends the server. May be called more than once, from any thread."""
        services = self._services
        with contextlib.suppress(OSError):
            if services.not_leading is None or startup.is_recorded(services.settings.home, services.url):
                startup.write_record(services.settings.home, services.url, services.started_at, stopping=True)
        services.closing.set()
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        """Replaces uvicorn's loop, which wakes ten times a second to see whether it should end."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            if self._lock is not None:
                self._check_files(self._lock)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), CHECK_EVERY)

    def _check_files(self, lock: int) -> None:
        services = self._services
        home = services.settings.home
        if not startup.still_locked(home, lock):
            log.error(
                "the lock of the home %s was deleted; the server ends, so that there are never two", home.root
            )
            self.stop()
        elif not startup.is_recorded(home, services.url) and _belongs_in_record(services):
            with contextlib.suppress(OSError):
                startup.write_record(home, services.url, services.started_at)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's handler, which raises the signal again at the end and skips this server's own cleanup."""
        log.info("ending on signal %d", sig)
        self.stop()


def _belongs_in_record(services: Services) -> bool:
    """Whether server.json should name this server: when it leads, or when it is the only one of this home and can
    report that a server elsewhere leads."""
    if services.not_leading is None or services.leading is None:
        return True
    home = services.settings.home
    return not home.replica and services.leading.leader is not None and running(home) is None
