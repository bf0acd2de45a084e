"""A task directory with a guard of its working folder on a clock of its own."""

from __future__ import annotations

import io
import json
import os
import select
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.launcher.folder.guard import FolderGuard
from support.checkpoints.scanning import Clock
from support.waiting import wait


def archive(content: bytes, members: int = 1) -> bytes:
    """A file as torch.save and numpy.savez write it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for number in range(members):
            file.writestr(zipfile.ZipInfo(f"data/{number}"), content)  # no time: the same bytes again
    return buffer.getvalue()


class Guarded:
    """The launcher's side: journals for real, and drives the guard by a fake clock."""

    def __init__(self, root: Path, **how: Any) -> None:
        self.root = root
        self.how = how
        self.dir = root / "code"
        self.dir.mkdir(parents=True)
        self.clock = Clock()
        self.generation = 0
        self.guard = self.open()

    def open(self) -> FolderGuard:
        return FolderGuard(str(self.root), str(self.dir), self.journal, clock=self.clock, **self.how)

    def journal(self, entry: dict[str, Any]) -> None:
        with open(self.root / "journal.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def begin(self) -> Guarded:
        """The number of inotify instances of a user is small; other tests may hold them all for a while."""
        self.generation += 1

        def active() -> bool:
            self.guard.begin(self.generation)
            assert self.guard._watch is not None
            return self.guard._watch.active

        wait(active, what="an inotify instance")
        assert self.guard._watch is not None and not self.guard._watch.blind
        self.newer()
        return self

    def newer(self) -> None:
        """Wait until the file system's clock has moved on: what is written now is newer than what is there."""
        probe = self.root / "probe"
        probe.write_bytes(b"")
        before = probe.stat().st_ctime_ns

        def moved() -> bool:
            probe.write_bytes(b"x")
            return probe.stat().st_ctime_ns > before

        wait(moved, what="the clock of the file system")

    def poll(self, after: float = 0.0) -> float | None:
        """Time passes; the guard is called until it has nothing left to do at this moment."""
        self.clock.now += after
        while True:
            due = self.guard.poll(self.clock.now)
            if self.guard._stager.waiting:
                select.select([self.guard._wake_r], [], [], 10)
            elif due is None or due > self.clock.now:
                return due

    def pass_time(self, seconds: float, step: float = 0.1) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.poll(min(step, end - self.clock.now))

    def write(self, name: str, data: bytes) -> Path:
        """In place, as a training does."""
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.newer()
        path.write_bytes(data)
        return path

    def save(self, name: str, data: bytes, seconds: float = 2.0) -> Path:
        """Write in place, and let it settle."""
        path = self.write(name, data)
        self.pass_time(seconds)
        return path

    def rename(self, name: str, data: bytes) -> Path:
        temporary = self.write(name + ".tmp", data)
        os.replace(temporary, self.dir / name)
        return self.dir / name

    def killed(self) -> dict[str, Any]:
        return self.guard.finish(True) or {}

    def launcher_killed(self) -> dict[str, Any]:
        """The launcher died with the body; another guard finds the directory."""
        self.guard.close()
        self.guard = self.open()
        return self.guard.recover() or {}

    def entries(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = (self.root / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [entry for entry in map(json.loads, lines) if entry["k"] == kind]

    @property
    def versions(self) -> list[str]:
        """The files of all versions."""
        area = self.root / "versions"
        return sorted(
            str(path.relative_to(area)) for path in area.rglob("*") if path.is_file() and path.parent != area
        )

    def close(self) -> None:
        self.guard.close()


Ends = Callable[[Guarded], dict[str, Any]]
ENDS: tuple[Ends, ...] = (Guarded.killed, Guarded.launcher_killed)
