"""Settles the directory of a dead launcher, so that its completed checkpoints count.

collect   for a directory whose launcher and processes are proven gone
salvage   for a task's part of a shared volume, where the machine with the rest of the directory is lost
"""

from __future__ import annotations

import os
import time
from typing import Iterable

from stoker.launcher.checkpoints.scan_state import CARRIED
from stoker.launcher.checkpoints.scanner import Scanner
from stoker.launcher.folder.guard import FolderGuard, folder_of
from stoker.launcher.journal import Journal
from stoker.launcher.process import exit_reason
from stoker.launcher.task_files import read_json, take_lock
from stoker.linux.descriptors import Closing
from stoker.task import layout
from stoker.task.directory import StillHeld
from stoker.task.formats import TaskInfo

SALVAGE_NUMBERS = 500_000_000
"""Copies made by `salvage` have larger numbers. A task that was given up, but still runs, may use smaller ones meanwhile."""
PATIENCE = 10.0
"""Seconds that the guardian has to end the processes of a dead launcher."""


def collect(directory: str, generation: int, *, patience: float = PATIENCE) -> None:
    """Journal the complete checkpoints, put torn files of the working folder back, and journal `lost` for a body without an
    ending.

    Idempotent; it may be killed at any point. Raises StillHeld when a launcher is alive after all.
    """
    deadline = time.monotonic() + patience
    lock = take_lock(directory)
    while lock is None:
        if time.monotonic() >= deadline:
            raise StillHeld(f"a launcher works on {directory}")
        time.sleep(0.02)
        lock = take_lock(directory)
    with Closing(lock):
        journal = Journal(directory)
        try:
            _scan(directory, journal, generation)
            _repair(directory, journal)
            unfinished = journal.unfinished
            if unfinished is not None:
                journal.append({"k": "ended", **exit_reason.lost(unfinished, time.time()).to_json()})
        finally:
            journal.close()


def salvage(directory: str, generation: int, carried: Iterable[int]) -> None:
    """Journal, in the part itself, the checkpoints that are complete there and were not transferred.

    The part may have the journal of an earlier call, never one of its task. `carried`: the numbers of the copies that were
    transferred. A task that was given up may still run and write here. It can damage a checkpoint, but not change it
    unnoticed, because the transfer verifies the hashes in the journal. Idempotent.
    """
    journal = Journal(directory)
    try:
        for number in sorted({*carried, SALVAGE_NUMBERS}):
            journal.append({"k": CARRIED, "number": number}, durable=False)
        _scan(directory, journal, generation)
    finally:
        journal.close()


def _repair(directory: str, journal: Journal) -> None:
    """Put torn files of the working folder back, where the launcher would have done so."""
    raw = read_json(os.path.join(directory, layout.TASK))
    try:
        folder = folder_of(os.path.abspath(directory), TaskInfo.from_json(raw)) if raw else None
    except TypeError:  # user code has changed it
        return
    if folder is None:
        return
    guard = FolderGuard(directory, folder, journal.append)
    try:
        guard.recover()
    finally:
        guard.close()


def _scan(directory: str, journal: Journal, generation: int) -> None:
    scanner = Scanner(directory, journal.append)
    try:
        scanner.begin(generation)
        scanner.finish(True)
    finally:
        scanner.close()
