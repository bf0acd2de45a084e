"""Takes in what one task of one attempt writes, as rows, lines and blobs.

The reader reads the journal, logs and metrics, and never waits for the bytes of a checkpoint. A checkpoint that it finds
is recorded as a transfer, in the transaction that moves the cursor past its entry. The threads of `checkpoint_transfer`
move the bytes, one checkpoint of a task at a time. Once they are in the blobs, the transaction that records the
checkpoint drops the transfer. A later server reads the remaining transfers from the database and continues them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from stoker.blobs import BlobStore
from stoker.control.ingest import checkpoint_rows
from stoker.control.ingest.checkpoint_transfer import Abandoned, CheckpointTransfers
from stoker.control.ingest.journal_reader import OURS, Intake, JournalReader, Transfer
from stoker.errors import StokerError, StoreError
from stoker.store.rows import AddCheckpoint, DropTransfer, TransferRow
from stoker.task.directory import TaskDir

log = logging.getLogger(__name__)

TRY_AGAIN = 5.0
"""Seconds until the retry of a transfer that failed because of the machine or the network."""
MOST_FAULTS = 3
"""Tries of a transfer that fails with an unexpected exception."""


class Ingester:
    """Takes in one task of one attempt. `look`, `collect` and `resume` are called by one thread at a time, the rest by any."""

    def __init__(
        self,
        reader: JournalReader,
        blobs: BlobStore,
        transfers: CheckpointTransfers,
        *,
        rename: Callable[[str], str] | None = None,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """`rename`: gives the names of checkpoint files in the blobs. `arrived`: called by any thread when a transfer is
        done."""
        self.reader = reader
        self._blobs = blobs
        self._transfers = transfers
        self._rename = rename
        self._arrived = arrived
        self._lock = threading.Lock()
        self._queue: deque[Transfer] = deque()
        """In the order of the journal. Finished transfers stay until they are collected."""
        self._working = False
        self._hurried = False

    def resume(self, known: Sequence[TransferRow]) -> None:
        """Continue the transfers of this task that an earlier server recorded. `known`: all of the attempt."""
        found = []
        for row in known:
            if (row.task, row.generation) == (self.reader.source, self.reader.generation):
                staged = self.reader.reread(row)
                found.append(
                    Transfer(row, staged, refused="" if staged else "its entry in the journal is gone")
                )
        self._add(found)

    @property
    def directory(self) -> TaskDir:
        return self.reader.directory

    @property
    def untaken(self) -> list[str]:
        """Names of its checkpoints that are being transferred, or have arrived and are not collected yet."""
        with self._lock:
            return [one.row.name for one in self._queue]

    @property
    def has_arrived(self) -> bool:
        """Whether there is a finished transfer to collect."""
        with self._lock:
            return bool(self._queue) and self._queue[0].done

    def look(self, *, final: bool = False) -> Intake:
        """What is new since the last look, and the checkpoints that have arrived. `final`: as in `JournalReader.look`.
        Transfers of new checkpoints begin at once. If one is not recorded, the next server finds it again."""
        self.reader.untaken = len(self._queue)
        found = self.reader.look(final=final)
        ended = found.status is not None and found.status.phase == "ended"
        self._hurried = final or ended or found.ending is not None
        with self._lock:
            if found.rejected and self._queue:
                # Report it after the checkpoints that its launcher wrote before.
                self._queue[-1].rejected += found.rejected
                found.rejected = []
        self._collect(found)
        self._add(found.seen)
        found.untaken = self.untaken
        return found

    def collect(self) -> Intake:
        """Only the checkpoints that have arrived; for a task that has ended."""
        self._hurried = True
        found = Intake(generation=self.reader.generation)
        self._collect(found)
        found.untaken = self.untaken
        return found

    def _collect(self, found: Intake) -> None:
        reader = self.reader
        while self.has_arrived:
            with self._lock:
                one = self._queue.popleft()
            row = one.row
            found.changes.append(DropTransfer(row))
            if one.kept is None:
                reader.refuse(row.name, one.refused, found)
            elif reader.alone:
                kept = checkpoint_rows.checkpoint_row(row, *one.kept)
                found.checkpoints.append(kept)
                found.changes += [AddCheckpoint(kept), reader.kept(kept.name, kept.step, kept.id)]
            else:
                found.parts.append(checkpoint_rows.part_row(row, reader.task, *one.kept))
            found.rejected += one.rejected
            found.visible = True

    def _add(self, transfers: Sequence[Transfer]) -> None:
        with self._lock:
            self._queue += transfers
            if self._working or all(one.done for one in self._queue):
                return
            self._working = True
        self._transfers.add(self.reader.run, self._carry_next)

    # -- in a thread of the transfers ------------------------------------------------------------------------------

    def _carry_next(self) -> bool:
        one = self._next()
        if one is None:
            return False
        try:
            self._carry(one)
        except Abandoned:
            raise
        except Exception as exc:
            # Unexpected. It is retried a few times only, because the end of the task waits for it.
            log.exception("run %s: checkpoint %s cannot be moved", self.reader.run, one.row.name)
            one.faults += 1
            if one.faults < MOST_FAULTS:
                self._transfers.wait(TRY_AGAIN)
            else:
                one.refused = f"it cannot be moved: {exc!r}"
        if one.done:
            self._arrived()
        with self._lock:
            self._working = any(not other.done for other in self._queue)
            return self._working

    def _next(self) -> Transfer | None:
        with self._lock:
            return next((one for one in self._queue if not one.done), None)

    def _carry(self, one: Transfer) -> None:
        assert one.staged is not None
        try:
            one.kept = self._transfers.carry(
                self.directory,
                one.staged,
                self._blobs,
                size=one.row.size,
                hurried=lambda: self._is_hurried(one),
                rename=self._rename,
            )
        except (OSError, StokerError) as exc:
            if isinstance(exc, StoreError) or getattr(exc, "errno", None) in OURS:
                log.warning(
                    "run %s: checkpoint %s of %s cannot be moved: %s; trying again",
                    self.reader.run, one.row.name, self.reader.task, exc,
                )  # fmt: skip
                self._transfers.wait(TRY_AGAIN)
                return
            # The staged copy differs from what the launcher recorded: damaged or changed by user code.
            one.refused = str(exc) or type(exc).__name__

    def _is_hurried(self, one: Transfer) -> bool:
        """Whether something waits for it: the end of the task, or another checkpoint. Without a step, the part of several
        tasks counts only while none of them writes, so it is urgent too."""
        return self._hurried or self._queue[-1] is not one or (not self.reader.alone and one.row.step is None)
