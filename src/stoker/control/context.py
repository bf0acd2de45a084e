"""What the parts of control share, and the wake-ups by which they ask the loop for another step."""

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
    """Wakes the control loop. Called in the loop's thread, except `observe_from_anywhere`.

    Every call only marks work as due and returns at once. Calls that arrive while a session ends are dropped: the next
    session looks at every run.
    """

    def kick(self, live: LiveRun, task: str = "") -> None:
        """The run needs a step: one of its tasks may have changed; `task` empty: any of them."""
        ...

    def kick_later(self, live: LiveRun, delay: float) -> None:
        """Kick the run after `delay` seconds. A later call replaces an earlier one."""
        ...

    def schedule_soon(self) -> None:
        """The queue or the free capacity may have changed."""
        ...

    def observe_soon(self) -> None:
        """A task may have ended: every engine observes its tasks now."""
        ...

    def observe_from_anywhere(self) -> None:
        """`observe_soon`, from any thread."""
        ...

    def nodes_changed(self) -> None:
        """Nodes were added, removed, or are trusted again."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this in the background of the session. An EngineError is logged and ends only this work."""
        ...


@dataclass
class Context:
    """Belongs to the loop's thread. `begin_session` replaces some attributes: read them from here each time, and keep
    no copies."""

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
    """Of this machine. Ports outlive a session, like tasks."""
    dropped: set[str] = field(default_factory=set)
    """Trees of checkpoints that retention dropped; the sweeper frees them."""
    runs: dict[str, LiveRun] = field(default_factory=dict)
    """Every run that is not over."""
    held: dict[str, AttemptRow] = field(default_factory=dict)
    """By run: failed attempts that are held for the user to inspect."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    transfers: CheckpointTransfers = field(default_factory=CheckpointTransfers)

    def begin_session(self) -> None:
        """Clear the state in memory: the next session reads the database again."""
        for live in self.runs.values():
            if live.timer is not None:
                live.timer.cancel()
        self.runs.clear()
        self.held.clear()
        self.transfers = CheckpointTransfers()
        self.scheduler = Scheduler()
        self.committer = Committer(self.store)
