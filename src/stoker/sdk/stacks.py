"""Lets the launcher read the stacks of a process that hangs, without a debugger and without ending it."""

from __future__ import annotations

import faulthandler
import os
import signal

from stoker.task import layout

_file = None


def arm() -> None:
    """Write the stacks of all threads on SIGUSR2, into the folder that the launcher has named. A handler of the script
    itself is not replaced."""
    global _file
    folder = os.environ.get("STOKER_STACKS")
    if not folder or _file is not None or not hasattr(faulthandler, "register"):
        return
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return
    try:
        _file = open(  # noqa: SIM115 - stays open: the handler writes to it
            os.path.join(folder, layout.stacks_of(os.getpid())), "w", encoding="utf-8"
        )
        faulthandler.register(signal.SIGUSR2, file=_file, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        # The disk is full, or this is not the main thread: then the stacks of this process are not available.
        pass
