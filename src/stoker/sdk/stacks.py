"""So that a process that hangs can be asked what it is doing, without a debugger and without ending it."""

from __future__ import annotations

import faulthandler
import os
import signal

from stoker.task import layout

_file = None


def arm() -> None:
    """Write the stacks of all threads on SIGUSR2, where the launcher has said where to. A handler of the script's own
    is left alone."""
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
        # No room, or a thread that may not: then nobody is asked.
        pass
