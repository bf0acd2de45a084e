"""The parts of the server that routes use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.blobs import BlobStore, Listings
from stoker.control.controller import Controller
from stoker.control.logs.reader import LogArchive
from stoker.errors import NotLeading, StoreError
from stoker.server.leadership import Leadership
from stoker.settings import Settings
from stoker.store import Store


@dataclass
class Services:
    """Everything a route may need. Made once per server.

    With a damaged or lost database `parts` is None: every route that needs it answers with the error, and the server
    stays up to report it.
    """

    settings: Settings
    token: str
    home_id: str
    blobs: BlobStore
    archive: LogArchive
    user: str
    started_at: float
    version: str
    url: str = ""
    parts: tuple[Store, Controller] | None = None
    trouble: StoreError | None = None
    """Why there is no store: it is damaged or lost."""
    leading: Leadership | None = None
    """Set where several servers share a database. Until this one leads, `parts` is None."""
    stop: Callable[[], None] = lambda: None
    """Ends the server once the requests under way are answered."""
    closing: Closing = field(default_factory=lambda: Closing())
    listings: Listings = field(init=False)

    def __post_init__(self) -> None:
        self.listings = Listings(self.blobs)

    @property
    def store(self) -> Store:
        return self._need()[0]

    @property
    def controller(self) -> Controller:
        return self._need()[1]

    @property
    def damaged(self) -> str | None:
        if self.parts is not None:
            return self.parts[0].damaged
        return None if self.trouble is None else self.trouble.message

    @property
    def not_leading(self) -> NotLeading | None:
        """The error to answer while this server does not lead; None: it leads, or is the only one."""
        return None if self.leading is None or self.leading.leads else self.leading.refusal()

    def _need(self) -> tuple[Store, Controller]:
        not_leading = self.not_leading
        if not_leading is not None:
            raise not_leading
        if self.parts is None:
            assert self.trouble is not None
            raise self.trouble
        return self.parts


class Closing:
    """Set when the server ends, so that requests which wait for a run (followers, long polls) return at once.

    `set` may be called from any thread; the rest belongs to the server's event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._lock:
            self._set = True
            waiters = set(self._waiters)
        for loop, event in waiters:
            loop.call_soon_threadsafe(event.set)

    async def wait_changed(self, controller: Controller, run_id: str, seen: int, timeout: float) -> int:
        """As Controller.changed, but returns early when the server ends."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        with self._lock:
            if self._set:
                return seen
            self._waiters.add(waiter)
        changed = asyncio.ensure_future(controller.changed(run_id, seen, timeout))
        closing = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({changed, closing}, return_when=asyncio.FIRST_COMPLETED)
            return changed.result() if changed.done() else seen
        finally:
            changed.cancel()
            closing.cancel()
            with self._lock:
                self._waiters.discard(waiter)
