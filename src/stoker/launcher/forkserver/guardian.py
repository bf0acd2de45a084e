"""The guardian ends a task's processes when its launcher dies, on machines that do not allow PID namespaces.

It is the launcher's parent and a subreaper. When the launcher dies, the launcher's descendants become the guardian's and are
killed.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Mapping, Optional

from stoker.launcher.process import process_tree
from stoker.linux import syscalls


def guard(launcher: int, cgroup: Optional[Mapping[str, Any]] = None) -> None:
    """Wait for the launcher to end, then kill every process that is left. Returns when none is left."""
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
