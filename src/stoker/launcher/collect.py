"""After a launcher's death: settle what it left, so that what was completed counts.

Called by the server, in its own process, on a directory whose launcher and processes are proven gone.
"""

from __future__ import annotations

import os
import time

from stoker.launcher import endings
from stoker.launcher.checkpoints import Scanner
from stoker.launcher.files import take_lock
from stoker.launcher.journal import Journal

PATIENCE = 10.0
"""Seconds that a guardian has to end what its launcher left."""


class StillHeld(RuntimeError):
    """A launcher or its guardian holds the directory: it is not dead."""


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
            scanner = Scanner(directory, journal.append)
            try:
                scanner.begin(generation)
                scanner.finish(True)
            finally:
                scanner.close()
            unfinished = journal.unfinished
            if unfinished is not None:
                journal.append({"k": "ended", **endings.lost(unfinished, time.time()).to_json()})
        finally:
            journal.close()
    finally:
        os.close(lock)
