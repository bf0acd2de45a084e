"""Transfers of checkpoints that proceed on request of a test."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from stoker.blobs import BlobStore
from stoker.control.ingest.checkpoint_transfer import CheckpointTransfers, Work
from stoker.control.ingest.ingester import Ingester
from stoker.control.ingest.journal_reader import Intake, JournalReader
from stoker.settings import Home
from stoker.task import layout
from stoker.task.formats import Status, write_json
from stoker.task.local_directory import LocalTaskDir
from support.control import driven


class TaskFiles:
    """A task directory, written to as a launcher writes to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in layout.DIRECTORIES:
            (root / name).mkdir(parents=True)

    def phase(self, phase: str) -> None:
        write_json(str(self.root / layout.STATUS), Status(phase, generation=1).to_json())

    def journal(self, *entries: Any) -> None:
        for entry in entries:
            driven.journal(self.root, entry)


class HeldTransfers(CheckpointTransfers):
    """Transfers run in the test's own thread."""

    def __init__(self) -> None:
        super().__init__()
        self.works: deque[Work] = deque()
        self.waits: list[float] = []
        self.fault: Exception | None = None
        """Every transfer fails with this."""
        self.asked: list[dict[str, Any]] = []

    def add(self, run: str, work: Work) -> None:
        self.works.append(work)

    def carry(self, *args: Any, **named: Any) -> tuple[str, int]:
        self.asked.append(named)
        if self.fault is not None:
            raise self.fault
        return super().carry(*args, **named)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def work(self, index: int = 0) -> None:
        """Do one transfer: of the task that has waited longest, or of another."""
        self.works.rotate(-index)
        work = self.works.popleft()
        self.works.rotate(index)
        if work():
            self.works.append(work)

    def finish(self) -> None:
        while self.works:
            self.work()


class InlineTransfers(HeldTransfers):
    """Each transfer is done as soon as it is requested."""

    def add(self, run: str, work: Work) -> None:
        super().add(run, work)
        while self.works and not self.waits:
            self.work()


def ingester(
    home: Home, root: Path, transfers: CheckpointTransfers, *, run: str = "digits-1", **more: Any
) -> Ingester:
    """An ingester of a task directory on this machine."""
    named = {"attempt": 1, "task": "worker-0", "generation": 1, "cursors": {}, "latest": {}, **more}
    reader = JournalReader(home, LocalTaskDir(str(root)), run=run, **named)
    return Ingester(reader, BlobStore(home.blobs), transfers)


def take_in(ingester: Ingester, *, final: bool = False) -> Intake:
    """Ingest once, and take in the checkpoints whose transfers have finished."""
    found = ingester.look(final=final)
    more = found.more
    found.join(ingester.collect())
    found.more = more
    return found
