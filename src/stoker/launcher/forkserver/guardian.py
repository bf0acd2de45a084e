"""The guardian: for machines that do not allow PID namespaces, it ends the task with its launcher.

It is the launcher's parent and a subreaper. When the launcher is gone, everything that the launcher had
beneath it has become the guardian's, and is killed.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Mapping, Optional

from stoker.launcher.process import process_tree
from stoker.linux import syscalls


def guard(launcher: int, cgroup: Optional[Mapping[str, Any]] = None) -> None:
    """Wait for the launcher to end, then end whatever it left. Returns when nothing is left."""
    syscalls.set_name("stoker-guardian")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            pid, _ = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if pid == launcher:
            break
    while not _none_left():
        process_tree.thaw(cgroup)
        process_tree.kill_beneath(os.getpid(), cgroup)
        time.sleep(0.01)


def _none_left() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return True
    return False
