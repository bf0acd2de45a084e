"""What the parts of control work with, and how they ask the loop for another look."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.blobs import BlobStore
from stoker.control.committer import Committer
from stoker.control.fleet import Fleet
from stoker.control.ingest.checkpoint_transfer import CheckpointTransfers
from stoker.control.ingest.installed_packages import InstalledPackages
from stoker.control.logs.reader import LogArchive
from stoker.control.notifier import Notifier
from stoker.control.state import LiveRun
from stoker.engine.port_allocator import PortAllocator
from stoker.scheduling import Scheduler
from stoker.settings import Settings
from stoker.store import Store
from stoker.store.rows import AttemptRow


class Wakeups(Protocol):
    """Asks the control loop for another look. Called in the loop's thread, but for `observe_from_anywhere`.

    Every call only marks work as due and returns at once. Calls that arrive while a session ends are dropped: the next
    session looks at everything anyway.
    """

    def kick(self, live: LiveRun, task: str = "") -> None:
        """There may be something to do for this run: in one of its tasks, or in any."""
        ...

    def kick_later(self, live: LiveRun, delay: float) -> None:
        """The same after `delay` seconds. A later call replaces an earlier one."""
        ...

    def schedule_soon(self) -> None:
        """The queue or what is free may have changed."""
        ...

    def observe_soon(self) -> None:
        """A task may have ended: have every engine show its tasks now."""
        ...

    def observe_from_anywhere(self) -> None:
        """`observe_soon`, from any thread."""
        ...

    def nodes_changed(self) -> None:
        """Nodes came, went, or are trusted again."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this in the background of the session. EngineError is logged and ends only this work."""
        ...


@dataclass
class Context:
    """Belongs to the loop's thread. What `begin_session` replaces is read from here each time, never kept elsewhere."""

    settings: Settings
    store: Store
    blobs: BlobStore
    fleet: Fleet
    notifier: Notifier
    wakeups: Wakeups
    archive: LogArchive
    packages: InstalledPackages
    committer: Committer
    ports: PortAllocator = field(default_factory=PortAllocator)
    """Of this machine. Ports outlive a session, as tasks do."""
    dropped: set[str] = field(default_factory=set)
    """Trees of checkpoints that retention let go of; the sweeper frees them."""
    runs: dict[str, LiveRun] = field(default_factory=dict)
    """Every run that is not over."""
    held: dict[str, AttemptRow] = field(default_factory=dict)
    """By run: attempts that failed and are held for a person to look into."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    transfers: CheckpointTransfers = field(default_factory=CheckpointTransfers)

    def begin_session(self) -> None:
        """Forget what is only in memory: the database is read again."""
        for live in self.runs.values():
            if live.timer is not None:
                live.timer.cancel()
        self.runs.clear()
        self.held.clear()
        self.transfers = CheckpointTransfers()
        self.scheduler = Scheduler()
        self.committer = Committer(self.store)
