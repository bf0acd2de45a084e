"""What has happened to one unit, and when it may have settled. Pure: times are arguments."""

from __future__ import annotations

from typing import Optional

from stoker.launcher.checkpoints.stager import StagingJob
from stoker.launcher.folder.units import FILE, Unit

SETTLE = 0.2
"""Seconds after which a file that was closed counts as complete, if no process has it open."""
EXAMINE_AGAIN = 1.0
"""Seconds until a unit that a process has open is examined again."""
COPY_GAP = 0.2
COPY_SHARE = 10.0
"""Least seconds between two copies of a unit, also as a multiple of the duration of a copy: a copy must not slow the training,
so of a file that is rewritten all the time not every state is copied."""
RETRY_DISK = 30.0


class Changes:
    """The guard passes events to it (`see`, `look`), examines it when it is `due`, and reports the result (`settle`,
    `still_open`, `copied`)."""

    def __init__(self, unit: Unit, quiet: float) -> None:
        self.unit = unit
        self._quiet = quiet
        self.pending = False
        """It has changed since it last settled."""
        self.renamed = False
        """All changes since then were renames into place."""
        self.due: Optional[float] = None
        """When to examine whether it has settled."""
        self.version = 0
        """Increased with every change; what was found before says nothing about a later version."""
        self.copy_due: Optional[float] = None
        """When to copy it; None: there is nothing to copy."""
        self.job: Optional[StagingJob] = None
        self.copying = ""
        """The state that is being copied."""
        self.settled_at: Optional[float] = None
        self.key = ""
        """State at the last full scan; used only where the kernel sends no events."""
        self._missed = False
        self._not_before = 0.0

    @property
    def patient(self) -> bool:
        """Whether its next copy may be throttled. Not if it changed before the last one was complete."""
        return not self._missed

    def see(self, kind: str, now: float, *, itself: bool) -> None:
        """An event (see `tree_watch`). `itself`: of the file or directory that is the unit, not of a file inside."""
        if kind == "gone" and itself:
            self.version += 1
            self.pending, self.due, self.copy_due = False, None, None
            return
        arrived = kind == "arrived"
        self.renamed = arrived and (self.renamed or not self.pending)
        self.pending = True
        self.version += 1
        self.copy_due = None
        if arrived and self.due is not None and self.due <= now:
            return  # a directory that was renamed into place, and its files
        wait = (SETTLE if self.unit.kind == FILE else self._quiet) if not (arrived and itself) else 0.0
        self.due = now + wait

    def look(self, key: str, now: float) -> None:
        """A full scan has found another state than before. How it was written is not known."""
        if key == self.key:
            return
        self.key = key
        self.version += 1
        self.pending, self.renamed, self.copy_due = True, False, None
        self.due = now + self._quiet

    def still_open(self, now: float) -> None:
        """A process has it open for writing, even if it was renamed."""
        self.renamed = False
        self.due = now + max(EXAMINE_AGAIN, 0.0 if self.unit.kind == FILE else self._quiet)

    def settle(self, now: float, *, copy: bool) -> None:
        """It is complete. `copy`: a version of this state is wanted."""
        self.pending = self.renamed = False
        self.due = None
        self.settled_at = now
        self.copy_due = max(now, self._not_before) if copy else None

    def doubt(self) -> None:
        """Its format proves it damaged: it has not settled, and waits for the next change."""
        self.pending, self.due, self.copy_due = True, None, None

    def copied(self, now: float, seconds: float, *, missed: bool) -> None:
        """Its copy has ended. `missed`: it changed meanwhile."""
        self.job = None
        # A throttled copy that was missed is soon made again, at full speed.
        share = 0.0 if missed and not self._missed else COPY_SHARE
        self._missed = missed
        self._not_before = now + max(COPY_GAP, share * seconds)

    def retry(self, now: float) -> None:
        """There was no room for its copy."""
        if not self.pending:
            self.copy_due = now + RETRY_DISK
