"""Downloads files to a folder: continued after a break, verified, never outside the folder.

Every file appears by one rename once it is complete, verified and on the disk. Small files come many in one answer
and are synced together. Large ones come one by one, and continue where they broke off. A file that does not
come, or comes damaged, does not stop the others: it is reported at the end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.pull_plan import Plan, digest
from stoker.cli.rendering import terminal, units
from stoker.errors import BlobDamaged, DiskFull, NotFound, ServerUnreachable, StokerError
from stoker.linux.descriptors import Closing

if TYPE_CHECKING:
    from stoker.cli.context import Context

TRIES = 5
"""Failed connections in a row, without any new byte, before the download gives up."""
SMALL = 1 << 20
"""Largest size of a file that comes with others in one answer. Such a file is held in memory, and starts anew
when the connection breaks."""
BATCH = 32 << 20
"""Bytes of one answer. They are synced together before the files appear."""
BATCH_FILES = 5_000
TOGETHER = 64
"""From this many files on, the file system is synced once instead of each file."""
GIVE_UP = 20
"""Files in a row that the server refuses one by one, before the rest is given up."""


class Download:
    """Downloads planned files and shows progress on a terminal."""

    def __init__(self, ctx: Context, run: str, what: str, checkpoint: str | None, total: int) -> None:
        self.ctx = ctx
        self.run = run
        self.what = what
        self.checkpoint = checkpoint
        self.total = total
        self.done = 0
        self.fetched = 0
        self._failed: list[StokerError] = []
        self._made: set[Path] = set()
        self._terminal = terminal.is_terminal(ctx.err)
        self._drawn = 0.0

    def fetch(self, plans: Sequence[Plan]) -> None:
        """Downloads all of them. Raises for those that failed, after the others have arrived."""
        self.done = sum(plan.size for plan in plans if plan.is_here)
        try:
            self._fetch_large(self._fetch_small([plan for plan in plans if not plan.is_here]))
        finally:
            self._clear()
        if self._failed:
            raise _summary(self._failed, len(plans))

    # -- many in one answer ----------------------------------------------------------------------------------

    def _fetch_small(self, plans: Sequence[Plan]) -> list[Plan]:
        """Downloads the small ones. Returns the others, which have to come one by one."""
        small: list[Plan] = []
        rest: list[Plan] = []
        for plan in plans:
            (small if _is_small(plan) else rest).append(plan)
        if len(small) < 2:
            return list(plans)
        left: list[Plan] = []
        for batch in _batches(small):
            left += self._batch(batch) if not left else batch
        return left + rest

    def _batch(self, batch: Sequence[Plan]) -> list[Plan]:
        """Returns those that the server does not send this way."""
        waiting: dict[str, list[Plan]] = {}
        for plan in batch:
            waiting.setdefault(str(plan.sha256), []).append(plan)
        written: list[Plan] = []
        tries = 0
        try:
            while waiting:
                left = len(waiting)
                try:
                    self._answer(waiting, written)
                except ServerUnreachable as exc:
                    tries = tries + 1 if len(waiting) == left else 1
                    self._again(tries, exc)
                except NotFound:
                    # The server is older than the route, or the run is gone. A request for one file shows which.
                    return [plan for plans in waiting.values() for plan in plans]
            return []
        finally:
            # However this ends, the written files are complete.
            self._place(written)

    def _answer(self, waiting: dict[str, list[Plan]], written: list[Plan]) -> None:
        """Reads one answer and removes what has arrived from `waiting`."""
        from hashlib import sha256  # lazy: only where there is something to check

        answer = self.ctx.client.contents(
            self.run, list(waiting), what=self.what, checkpoint=self.checkpoint, limit=SMALL
        )
        with contextlib.closing(answer):
            for name, content in answer:
                plans = waiting.pop(name, None)
                if plans is None:
                    raise StokerError(f"the server sends {name!r}, which was not requested")
                if isinstance(content, str):
                    self._failed += [_not_sent(plan, content) for plan in plans]
                    continue
                self.fetched += len(content)
                found = sha256(content).hexdigest()
                for plan in plans:
                    self._arrived(plan, content, found, written)
        if waiting:
            raise StokerError(f"the server leaves out {len(waiting)} of the requested files")

    def _arrived(self, plan: Plan, content: bytes, found: str, written: list[Plan]) -> None:
        if len(content) != plan.size or found != plan.sha256:
            self._failed.append(_damaged(plan, len(content)))
            return
        try:
            self._make_parent(plan)
            _write(plan.part, content)
        except OSError as exc:
            raise _disk_error(exc, plan.target) from exc
        written.append(plan)
        self.done += plan.size
        self._draw(plan)

    def _place(self, written: Sequence[Plan]) -> None:
        """Syncs them, then renames them into place."""
        from stoker.blobs.files import sync_file_system  # lazy: loads ctypes

        many = len(written) >= TOGETHER
        parents = {plan.parent for plan in written} if many else set()
        try:
            for parent in {parent.stat().st_dev: parent for parent in parents}.values():
                sync_file_system(parent)
        except OSError as exc:
            raise _disk_error(exc, written[0].target) from exc
        for plan in written:
            try:
                if not many:
                    _sync(plan.part)
                plan.part.replace(plan.target)
            except OSError as exc:
                raise _disk_error(exc, plan.target) from exc

    # -- one by one ------------------------------------------------------------------------------------------

    def _fetch_large(self, plans: Sequence[Plan]) -> None:
        refused = 0
        for plan in plans:
            try:
                self._make_parent(plan)
                self._fetch(plan)
                _verify(plan)
                plan.part.replace(plan.target)
                refused = 0
            except (NotFound, BlobDamaged) as exc:
                self._failed.append(exc)
                refused += 1
                if refused == GIVE_UP:
                    return
            except OSError as exc:
                raise _disk_error(exc, plan.target) from exc

    def _fetch(self, plan: Plan) -> None:
        tries, furthest = 0, 0
        while True:
            have = plan.begun()
            if have > plan.size:
                plan.part.unlink()
                have = 0
            start = self.done
            self.done += have
            try:
                self._append(plan, have)
                return
            except ServerUnreachable as exc:
                self.done = start
                got = plan.begun()
                tries = 1 if got > max(furthest, have) else tries + 1
                furthest = max(furthest, got)
                self._again(tries, exc)

    def _append(self, plan: Plan, have: int) -> None:
        with open(plan.part, "ab", opener=_opener) as file:
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

    # -- both ------------------------------------------------------------------------------------------------

    def _again(self, tries: int, exc: ServerUnreachable) -> None:
        """Connects anew, or raises `exc` after too many tries."""
        if tries >= TRIES:
            raise exc
        time.sleep(0.2 * 2 ** (tries - 1))
        self.ctx.reconnect()

    def _make_parent(self, plan: Plan) -> None:
        if plan.parent not in self._made:
            plan.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(plan.parent)

    def _draw(self, plan: Plan) -> None:
        now = time.monotonic()
        if not self._terminal or now - self._drawn < 0.1:
            return
        self._drawn = now
        share = 100 * self.done // self.total if self.total else 100
        line = f"{share:3d}%  {units.size(self.done)} of {units.size(self.total)}  {terminal.safe(plan.path)}"
        self.ctx.err.write("\r" + terminal.cut(line, (terminal.columns(self.ctx.err) or 80) - 1) + "\x1b[K")
        self.ctx.err.flush()

    def _clear(self) -> None:
        if self._terminal and self._drawn:
            self.ctx.err.write("\r\x1b[K")
            self.ctx.err.flush()


def _is_small(plan: Plan) -> bool:
    """Whether it comes with others: it has a hash to be identified by, and no part of it is here to continue."""
    return plan.sha256 is not None and plan.size <= SMALL and not plan.begun()


def _batches(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    batch: list[Plan] = []
    size = 0
    for plan in plans:
        if batch and (size + plan.size > BATCH or len(batch) >= BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(plan)
        size += plan.size
    if batch:
        yield batch


def _write(part: Path, content: bytes) -> None:
    with Closing(_opener(str(part), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)) as fd:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]


def _sync(part: Path) -> None:
    with Closing(_opener(str(part), os.O_WRONLY)) as fd:
        os.fsync(fd)


def _opener(path: str, flags: int) -> int:
    """Refuses a link in place of a part: it would lead out of the folder."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _verify(plan: Plan) -> None:
    size = plan.part.stat().st_size
    if size == plan.size and (plan.sha256 is None or digest(plan.part) == plan.sha256):
        return
    if plan.sha256 is None and size > plan.size:
        # A log that grew while it was read: everything that was listed has arrived.
        return
    plan.part.unlink()
    raise _damaged(plan, size)


def _damaged(plan: Plan, size: int) -> BlobDamaged:
    what = (
        f"{units.size(size)} of {units.size(plan.size)} arrived"
        if size != plan.size
        else "its SHA-256 differs"
    )
    return BlobDamaged(f"{plan.path!r} arrived damaged: {what}", hint="It was removed; pull again.")


def _not_sent(plan: Plan, word: str) -> StokerError:
    """`word`: the reason, as the server gives it."""
    if word == "missing":
        return NotFound(f"the content of {plan.path!r} is no longer stored")
    return BlobDamaged(f"the content of {plan.path!r} is stored, but {word[:20]}")


def _summary(failed: Sequence[StokerError], count: int) -> StokerError:
    if len(failed) == 1:
        return failed[0]
    kind = NotFound if all(isinstance(exc, NotFound) for exc in failed) else BlobDamaged
    first = "; ".join(exc.message for exc in failed[:3])
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    return kind(
        f"{len(failed)} of {units.plural(count, 'file')} did not arrive: {first}{more}",
        hint="What has arrived is in place. Pull again to try for the others.",
    )


def _disk_error(exc: OSError, target: Path) -> StokerError:
    import errno

    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"no space left for {str(target)!r}",
            hint="Free some space and pull again: it continues.",
        )
    return StokerError(
        f"cannot write {str(target)!r}: {exc.strerror}", hint="Choose another folder with -o DIR."
    )
