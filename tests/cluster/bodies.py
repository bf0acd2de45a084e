"""Training processes in pods, seen from the machine that all nodes of the test cluster share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Body:
    task: str
    generation: int
    pid: int
    """The process id on this machine."""
    started: int
    """Ticks since boot; together with `pid` it identifies the process."""

    @property
    def workdir(self) -> Path:
        return Path(f"/proc/{self.pid}/cwd")


def bodies(run: str) -> list[Body]:
    """The processes of the run's bodies, without their child processes."""
    found = [_body(entry, run) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    there = [one for one in found if one is not None]
    return [body for body, parent in there if parent not in {other.pid for other, _ in there}]


def hurry(run: str) -> None:
    """Tell the training of `worlds` to finish now. Must be repeated while tasks may still be replaced."""
    for body in bodies(run):
        with contextlib.suppress(OSError):  # it has just ended
            (body.workdir / "hurry").touch()


def _body(entry: Path, run: str) -> tuple[Body, int] | None:
    """The process and its parent's id; None unless it belongs to the run."""
    try:
        words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None  # it has ended meanwhile
    env = dict(word.split("=", 1) for word in words if "=" in word)
    if env.get("STOKER_RUN") != run or "STOKER_GENERATION" not in env:
        return None
    task = f"{env['STOKER_ROLE']}-{env['STOKER_TASK_INDEX']}"
    return Body(task, int(env["STOKER_GENERATION"]), int(entry.name), int(fields[19])), int(fields[1])
