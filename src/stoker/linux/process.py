"""Identity of a process: tells it from a later one with the same pid."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Changes with every start of the machine; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when it is gone or a zombie, 0 where the system cannot tell."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _without_proc(pid)
    except OSError:
        return None
    # The name in brackets may contain anything, brackets and spaces included.
    fields = raw.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _without_proc(pid: int) -> int | None:
    import os

    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
