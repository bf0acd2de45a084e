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


class StillHeld(RuntimeError):
    """A launcher holds the directory: it is not dead."""


def collect(directory: str, generation: int) -> None:
    """Journal the checkpoints that were complete, and `lost` for a body that has no ending.

    Idempotent, and safe to be killed at any point. Raises StillHeld when a launcher lives after all.
    """
    lock = take_lock(directory)
    if lock is None:
        raise StillHeld(f"a launcher works on {directory}")
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
