from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """False also for a process that has ended and was not reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
