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
        """The SDK's newest declaration that is not staged."""
        self._commit_version = 0
        self._ahead = 0
        """Renames since the last decision that the SDK has not declared yet: it declares each just after it."""
        self._by_sdk = False
        self._waits_since: Optional[float] = None
        """Since when a rename waits for its declaration."""

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
            self._ahead += 1
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
        """The SDK has declared a state complete: the present one, unless there are renames that it has not declared."""
        self.commit, self._commit_version = commit, self.version
        self._ahead, self._by_sdk = max(0, self._ahead - 1), True
        self.due = now

    @property
    def declared(self) -> bool:
        """The SDK's commit is of the present state."""
        return self.commit is not None and not self._ahead

    def sign(self, now: float) -> Optional[str]:
        """The sign that it is complete now; None: there is none, and `due` is the time of the next examination."""
        self.due = None
        if self.commit is None and not self.fresh:
            return None
        if now < self.not_before:
            self.due = self.not_before
            return None
        if self.declared:
            return "sdk"
        if self.renamed and self._awaits_commit(now):
            self.due = now + RENAME_SETTLE
            return None
        if self.renamed:
            return "rename"
        if (
            now >= self.changed + self.quiet
        ):  # the same expression as in `due`, so that rounding cannot make them differ
            return "quiet"
        self.due = self.changed + self.quiet
        return "verified" if self.closed and len(self.fresh) == 1 else None

    def _awaits_commit(self, now: float) -> bool:
        """The SDK has declared it before, so it will again: on a busy machine some time after the rename. Not for ever: the
        script may rename by itself now."""
        if not self._by_sdk:
            return False
        if self._waits_since is None:
            self._waits_since = now
        return now < self._waits_since + self.quiet

    def still_open(self, now: float) -> None:
        """A process has it open and may go on writing, even if it was renamed."""
        self.fresh = dict.fromkeys(self.fresh, "written")
        self.closed = False
        self.changed = max(self.changed, now - self.quiet + min(self.quiet, EXAMINE_AGAIN))
        self.due = self.changed + self.quiet

    def commit_of(self, job: StagingJob) -> Optional[Dict[str, Any]]:
        """The SDK's commit of the version that this job has copied."""
        if job.commit is None and self.declared and self._commit_version == job.version:
            return self.commit  # declared since the copy began
        return job.commit

    def copied(self, now: float, seconds: float) -> None:
        self.job = self._waits_since = None
        self.not_before = now + max(COPY_GAP, COPY_SHARE * seconds)

    def settle(self, job: StagingJob) -> None:
        """The version that it has copied has been decided."""
        if self.commit is job.commit:
            self.commit = None
        if job.version != self.version:
            return
        self.fresh.clear()
        self.due = None
        self.closed = False
        self.commit = None
        self._ahead = 0
