"""The processes of this machine, as the tests look for them."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def of_task(directory: Path) -> list[int]:
    """The processes of a task's body, by the task directory in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"STOKER_TASK_DIR={directory}\0".encode() in environ:
                found.append(int(entry.name))
    return found
