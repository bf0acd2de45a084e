"""After a launcher's death: settle what it left, so that what was completed counts.

collect   on a directory whose launcher and processes are proven gone
salvage   on a task's part of a shared volume, all that is left of a directory whose machine is lost
"""

from __future__ import annotations

import os
import time
from typing import Iterable

from stoker.launcher.checkpoints.scan_state import CARRIED
from stoker.launcher.checkpoints.scanner import Scanner
from stoker.launcher.journal import Journal
from stoker.launcher.process import exit_reason
from stoker.launcher.task_files import take_lock
from stoker.task.directory import StillHeld

APART = 500_000_000
"""Beyond it are the numbers of copies made by `salvage`: those before it may be used at the same moment by a task that was
given up and lives."""
PATIENCE = 10.0
"""Seconds that a guardian has to end what its launcher left."""


def collect(directory: str, generation: int, *, patience: float = PATIENCE) -> None:
    """Journal the checkpoints that were complete, and `lost` for a body that has no ending.

    Idempotent, and safe to be killed at any point. Raises StillHeld when a launcher lives after all.
    """
    deadline = time.monotonic() + patience
    lock = take_lock(directory)
    while lock is None:
        if time.monotonic() >= deadline:
            raise StillHeld(f"a launcher works on {directory}")
        time.sleep(0.02)
        lock = take_lock(directory)
    try:
        journal = Journal(directory)
        try:
            _scan(directory, journal, generation)
            unfinished = journal.unfinished
            if unfinished is not None:
                journal.append({"k": "ended", **exit_reason.lost(unfinished, time.time()).to_json()})
        finally:
            journal.close()
    finally:
        os.close(lock)


def salvage(directory: str, generation: int, carried: Iterable[int]) -> None:
    """Journal, in the part itself, the checkpoints that were complete there and have not been carried away.

    The part may have a journal from an earlier try; its task never saw it. `carried`: the numbers of the copies that
    were. A task that was given up may live and write all the same: it can spoil what is found here, never change it
    unnoticed, because whoever carries it away compares it with the hashes in the journal. Idempotent.
    """
    journal = Journal(directory)
    try:
        for number in sorted({*carried, APART}):
            journal.append({"k": CARRIED, "number": number}, durable=False)
        _scan(directory, journal, generation)
    finally:
        journal.close()


def _scan(directory: str, journal: Journal, generation: int) -> None:
    scanner = Scanner(directory, journal.append)
    try:
        scanner.begin(generation)
        scanner.finish(True)
    finally:
        scanner.close()
