"""Files from the server to a folder: continued where they were cut off, verified, never outside the folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli import human, term
from stoker.errors import DiskFull, Refused, ServerUnreachable, StokerError

if TYPE_CHECKING:
    from stoker.cli.context import Context

TRIES = 5
PIECE = 1 << 20


class Plan:
    """One file to bring. Unfinished bytes wait in `NAME.part` beside it."""

    def __init__(self, path: str, target: Path, size: int, sha256: str | None) -> None:
        self.path = path
        self.target = target
        self.size = size
        self.sha256 = sha256

    @property
    def part(self) -> Path:
        return self.target.with_name(self.target.name + ".part")

    def is_here(self) -> bool:
        """The very file is in place already."""
        try:
            if not self.target.is_file() or self.target.stat().st_size != self.size:
                return False
        except OSError:
            return False
        return self.sha256 is not None and digest(self.target) == self.sha256


def target_of(folder: Path, path: str) -> Path:
    """Where a file of that path goes. The server is not believed: a path that leaves the folder is refused."""
    parts = path.split("/")
    if not path or "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"the server names an unsafe path {path!r}", hint="Nothing was written for it.")
    return folder.joinpath(*parts)


def digest(path: Path) -> str:
    import hashlib  # lazy: only where there is something to check

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Download:
    """Brings planned files one after another, showing progress on a terminal."""

    def __init__(self, ctx: Context, run: str, what: str, checkpoint: str | None, total: int) -> None:
        self.ctx = ctx
        self.run = run
        self.what = what
        self.checkpoint = checkpoint
        self.total = total
        self.done = 0
        self.fetched = 0
        self._terminal = term.is_terminal(ctx.err)
        self._drawn = 0.0

    def file(self, plan: Plan) -> None:
        if plan.is_here():
            self.done += plan.size
            return
        try:
            plan.target.parent.mkdir(parents=True, exist_ok=True)
            self._fetch(plan)
            self._verify(plan)
            plan.part.replace(plan.target)
        except OSError as exc:
            raise _disk_error(exc, plan.target) from exc

    def finish(self) -> None:
        if self._terminal and self._drawn:
            self.ctx.err.write("\r\x1b[K")
            self.ctx.err.flush()

    def _fetch(self, plan: Plan) -> None:
        for attempt in range(TRIES):
            have = plan.part.stat().st_size if plan.part.exists() else 0
            if have > plan.size:
                plan.part.unlink()
                have = 0
            start = self.done
            self.done += have
            try:
                self._append(plan, have)
                return
            except ServerUnreachable:
                self.done = start
                if attempt == TRIES - 1:
                    raise
                time.sleep(0.2 * 2**attempt)
                self.ctx.reconnect()

    def _append(self, plan: Plan, have: int) -> None:
        with plan.part.open("ab") as file:
            if have == plan.size:
                return
            pieces = self.ctx.client.content(
                self.run, plan.path, what=self.what, checkpoint=self.checkpoint, offset=have
            )
            for piece in pieces:
                file.write(piece)
                self.done += len(piece)
                self.fetched += len(piece)
                self._draw(plan)
            file.flush()
            os.fsync(file.fileno())

    def _verify(self, plan: Plan) -> None:
        size = plan.part.stat().st_size
        if size == plan.size and (plan.sha256 is None or digest(plan.part) == plan.sha256):
            return
        if plan.sha256 is None and size > plan.size:
            # A log that grew while it was read: what was listed is there, and more.
            return
        plan.part.unlink()
        what = (
            f"{human.size(size)} of {human.size(plan.size)} arrived"
            if size != plan.size
            else "its SHA-256 differs"
        )
        raise StokerError(f"{plan.path!r} arrived damaged: {what}", hint="It was removed; pull again.")

    def _draw(self, plan: Plan) -> None:
        now = time.monotonic()
        if not self._terminal or now - self._drawn < 0.1:
            return
        self._drawn = now
        share = 100 * self.done // self.total if self.total else 100
        line = f"{share:3d}%  {human.size(self.done)} of {human.size(self.total)}  {term.safe(plan.path)}"
        self.ctx.err.write("\r" + term.cut(line, (term.columns(self.ctx.err) or 80) - 1) + "\x1b[K")
        self.ctx.err.flush()


def _disk_error(exc: OSError, target: Path) -> StokerError:
    import errno

    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"no space left for {str(target)!r}",
            hint="Free some space and pull again: it goes on where it was.",
        )
    return StokerError(
        f"cannot write {str(target)!r}: {exc.strerror}", hint="Choose another folder with -o DIR."
    )
