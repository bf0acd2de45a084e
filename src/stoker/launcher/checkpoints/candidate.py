"""One checkpoint as far as it is known, and the pure rules about when it may be complete. Times come from outside."""

from __future__ import annotations

from typing import Any, Dict, Optional

from stoker.launcher.checkpoints.directory_watch import DirectoryChange
from stoker.launcher.checkpoints.stager import StagingJob

RENAME_SETTLE = 0.2
"""Seconds after a rename before it is copied: the SDK's word about it comes just after the rename."""
COPY_GAP = 0.2
"""Least seconds between two copies of one checkpoint that is saved again and again, and
`COPY_SHARE` times what the copy took."""
COPY_SHARE = 5.0
LOOK_AGAIN = 1.0
"""Seconds until a file that is still open, or changed under our hands, is looked at again."""


class Candidate:
    """Its owner tells it what happened (`see`, `commit`, `look`) and asks whether that makes it complete (`sign`)."""

    def __init__(self, name: str, quiet: float) -> None:
        self.name = name
        self.quiet = quiet
        self.fresh: Dict[str, str] = {}
        """Entries that are new since it was last dealt with: `renamed` or `written`."""
        self.changed = 0.0
        self.closed = False
        """Its writer has closed it; its format may prove that it is complete."""
        self.not_before = 0.0
        """Not to be copied again before: a copy costs the training something, and what is overwritten all the time
        is copied now and then; the newest is there at the end anyway."""
        self.missed = False
        """It was written to before its last copy had been made."""
        self.due: Optional[float] = None
        """When to decide about it."""
        self.job: Optional[StagingJob] = None
        self.version = 0
        """Raised with every change; a copy of an older version says nothing about this one."""
        self.key = ""
        """State at the last look; only where the kernel does not tell."""
        self.commit: Optional[Dict[str, Any]] = None
        self._commit_version = 0

    @property
    def renamed(self) -> bool:
        return bool(self.fresh) and all(how == "renamed" for how in self.fresh.values())

    def see(self, change: DirectoryChange, now: float) -> None:
        if change.kind == "closed":
            # The bytes went before; this only says that it may be looked at.
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
            # A file that was replaced or deleted does not change under the copier's open descriptor.
            if self.job is not None and (change.inside or change.kind == "written"):
                self.job.stale = True
        elif change.kind == "arrived":
            # A script that saves again and again must not push its own copy away for ever.
            waiting = self.due if self.renamed else None
            self.fresh[change.entry] = "renamed"
            self.due = min(now + RENAME_SETTLE, now + RENAME_SETTLE if waiting is None else waiting)
        else:
            self.fresh.pop(change.entry, None)
            if not self.fresh:
                self.due = None

    def look(self, members: Dict[str, str], key: str, now: float) -> None:
        """Found in another state than before, by looking. Whether it was closed is not known: who has it open will be."""
        self.key = key
        self.version += 1
        self.changed = now
        self.fresh = members
        self.closed = True
        self.due = now
        if self.job is not None:
            self.job.stale = True

    def declare(self, commit: Dict[str, Any], now: float) -> None:
        """The SDK says that it is complete as it is now."""
        self.commit, self._commit_version = commit, self.version
        self.due = now

    def sign(self, now: float) -> Optional[str]:
        """Why it may be complete now; None: it may not, and `due` says when to look again."""
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
        if now >= self.changed + self.quiet:  # in the words of `due`, or both would wait for each other
            return "quiet"
        self.due = self.changed + self.quiet
        return "verified" if self.closed and len(self.fresh) == 1 else None

    def still_open(self, now: float) -> None:
        """Whoever has it open may go on writing, renamed or not."""
        self.fresh = dict.fromkeys(self.fresh, "written")
        self.closed = False
        self.changed = max(self.changed, now - self.quiet + min(self.quiet, LOOK_AGAIN))
        self.due = self.changed + self.quiet

    def take_commit(self, version: int) -> Optional[Dict[str, Any]]:
        """What the SDK said about this version, once."""
        if self.commit is None or self._commit_version != version:
            return None
        commit, self.commit = self.commit, None
        return commit

    def copied(self, now: float, seconds: float) -> None:
        self.job = None
        self.not_before = now + max(COPY_GAP, COPY_SHARE * seconds)

    def settle(self, version: int) -> None:
        """This version has been dealt with."""
        if version != self.version:
            return
        self.fresh.clear()
        self.due = None
        self.closed = False
        self.commit = None
