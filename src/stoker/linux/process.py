"""The identity of processes: a pid alone is reused, a pid with its boot id and start time is not."""

from __future__ import annotations

import functools
import os


@functools.lru_cache(maxsize=None)
def boot_id() -> str:
    """Changes with every boot of the machine; empty where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot. None: it has ended or is a zombie. 0: not known on this system."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else _without_proc(pid)
    except OSError:
        return None
    # The name in brackets may contain anything, including brackets and spaces.
    fields = raw.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _without_proc(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
