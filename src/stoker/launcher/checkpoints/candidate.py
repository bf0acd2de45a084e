"""A possible checkpoint, and the rules about when it may be complete. Pure: times are arguments."""

from __future__ import annotations

from typing import Any, Dict, Optional

from stoker.launcher.checkpoints.directory_watch import DirectoryChange
from stoker.launcher.checkpoints.stager import StagingJob

RENAME_SETTLE = 0.2
"""Seconds between a rename and the copy: the SDK declares a checkpoint just after the rename."""
COPY_GAP = 0.2
"""Least seconds between two copies of a checkpoint that is saved again and again. Also at least `COPY_SHARE` times the duration
of the copy."""
COPY_SHARE = 5.0
EXAMINE_AGAIN = 1.0
"""Seconds until a file that is still open, or changed during its copy, is examined again."""


class Candidate:
    """The scanner passes events to it (`see`, `declare`, `look`), and asks whether it is complete now (`sign`)."""

    def __init__(self, name: str, quiet: float) -> None:
        self.name = name
        self.quiet = quiet
        self.fresh: Dict[str, str] = {}
        """Entries that are new since the last decision: `renamed` or `written`."""
        self.changed = 0.0
        self.closed = False
        """Whether its writer has closed it, so that its format may prove that it is complete."""
        self.not_before = 0.0
        """It is not copied before this time: a copy slows down the training, so a file that is overwritten all the time is
        copied at intervals only. The newest version is copied at the end."""
        self.missed = False
        """Whether it changed before its last copy was complete."""
        self.due: Optional[float] = None
        """When to decide about it."""
        self.job: Optional[StagingJob] = None
        self.version = 0
        """Increased with every change; a copy of an older version says nothing about this one."""
        self.key = ""
        """State at the last full scan; used only where the kernel sends no events."""
        self.commit: Optional[Dict[str, Any]] = None
        self._commit_version = 0

    @property
    def renamed(self) -> bool:
        return bool(self.fresh) and all(how == "renamed" for how in self.fresh.values())

    def see(self, change: DirectoryChange, now: float) -> None:
        if change.kind == "closed":
            # The writes came before; after the close it may be examined.
            if self.fresh and not change.inside:
                self.closed = True
                self.due = min(now if self.due is None else self.due, max(now, self.not_before))
            return
        self.version += 1
        self.changed = now
        if change.inside or change.kind in ("created", "written"):
            self.fresh[change.entry] = "written"
            self.closed = False
            self.due = now + self.quiet
            # A file that is replaced or deleted does not change for a copy that has it open.
            if self.job is not None and (change.inside or change.kind == "written"):
                self.job.stale = True
        elif change.kind == "arrived":
            # A script that saves again and again must not delay the copy without end.
            waiting = self.due if self.renamed else None
            self.fresh[change.entry] = "renamed"
            self.due = min(now + RENAME_SETTLE, now + RENAME_SETTLE if waiting is None else waiting)
        else:
            self.fresh.pop(change.entry, None)
            if not self.fresh:
                self.due = None

    def look(self, members: Dict[str, str], key: str, now: float) -> None:
        """A full scan has found another state. Whether the files are closed is not known; open files are looked for later."""
        self.key = key
        self.version += 1
        self.changed = now
        self.fresh = members
        self.closed = True
        self.due = now
        if self.job is not None:
            self.job.stale = True

    def declare(self, commit: Dict[str, Any], now: float) -> None:
        """The SDK has declared the present state complete."""
        self.commit, self._commit_version = commit, self.version
        self.due = now

    def sign(self, now: float) -> Optional[str]:
        """The sign that it is complete now; None: there is none, and `due` is the time of the next examination."""
        self.due = None
        if self.commit is None and not self.fresh:
            return None
        if now < self.not_before:
            self.due = self.not_before
            return None
        if self.commit is not None:
            return "sdk"
        if self.renamed:
            return "rename"
        if (
            now >= self.changed + self.quiet
        ):  # the same expression as in `due`, so that rounding cannot make them differ
            return "quiet"
        self.due = self.changed + self.quiet
        return "verified" if self.closed and len(self.fresh) == 1 else None

    def still_open(self, now: float) -> None:
        """A process has it open and may go on writing, even if it was renamed."""
        self.fresh = dict.fromkeys(self.fresh, "written")
        self.closed = False
        self.changed = max(self.changed, now - self.quiet + min(self.quiet, EXAMINE_AGAIN))
        self.due = self.changed + self.quiet

    def take_commit(self, version: int) -> Optional[Dict[str, Any]]:
        """The SDK's commit of this version, once."""
        if self.commit is None or self._commit_version != version:
            return None
        commit, self.commit = self.commit, None
        return commit

    def copied(self, now: float, seconds: float) -> None:
        self.job = None
        self.not_before = now + max(COPY_GAP, COPY_SHARE * seconds)

    def settle(self, version: int) -> None:
        """This version has been decided."""
        if version != self.version:
            return
        self.fresh.clear()
        self.due = None
        self.closed = False
        self.commit = None
