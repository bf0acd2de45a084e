"""A task directory with a scanner on a fake clock, for tests of the scanner."""

from __future__ import annotations

import hashlib
import io
import json
import os
import select
import time
import zipfile
from pathlib import Path
from typing import Any

from stoker.launcher.checkpoints.scanner import Scanner
from stoker.task import layout


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Task:
    """The launcher's side of a task directory: real journals, and a scanner driven by a fake clock."""

    def __init__(self, root: Path, generation: int = 1, quiet: float = 3.0, *, blind: bool = False) -> None:
        self.root = root
        self.blind = blind
        self.generation = generation
        self.quiet = quiet
        self.clock = Clock()
        self.dir = root / "checkpoints" / str(generation)
        for name in (self.dir, root / "staged", root / "sdk"):
            name.mkdir(parents=True, exist_ok=True)
        self.scanner = self.open()

    def open(self) -> Scanner:
        return Scanner(str(self.root), self.journal, clock=self.clock, quiet=self.quiet)

    @property
    def copies(self) -> list[str]:
        """Staged copies, complete or partial."""
        return sorted(name for name in os.listdir(self.root / layout.STAGED) if name != "scan.jsonl")

    def journal(self, entry: dict[str, Any]) -> None:
        with open(self.root / "journal.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def begin(self) -> Task:
        """Retries: a user has few inotify instances, and other tests may hold all of them for a while."""
        deadline = time.monotonic() + 120
        self.scanner.begin(self.generation)
        while self.scanner._watch is not None and not self.scanner._watch.active and not self.blind:
            assert time.monotonic() < deadline, "no inotify instance has become free"
            time.sleep(0.2)
            (self.root / layout.SCAN).unlink(missing_ok=True)
            self.scanner.begin(self.generation)
        return self

    def poll(self, after: float = 0.0) -> float | None:
        """Advance the clock and call the scanner until it has nothing left to do at this time."""
        self.clock.now += after
        while True:
            due = self.scanner.poll(self.clock.now)
            if self.scanner._stager.waiting:
                select.select([self.scanner.fileno()], [], [], 10)
            elif due is None or due > self.clock.now:
                return due

    def pass_time(self, seconds: float, step: float = 0.5) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.poll(min(step, end - self.clock.now))

    def restart(self) -> None:
        """The launcher was killed without any cleanup; a new one scans the directory."""
        self.scanner.close()
        self.scanner = self.open()
        self.scanner.begin(self.generation)

    def close(self) -> None:
        self.scanner.close()

    def entries(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = (self.root / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [entry for entry in map(json.loads, lines) if entry["k"] == kind]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Announced checkpoints; each is checked against its staged bytes."""
        found = self.entries("checkpoint")
        numbers = [record["number"] for record in found]
        assert len(set(numbers)) == len(numbers), "a number was used twice"
        for record in found:
            for file in record["files"]:
                data = self.staged(record, file["path"])
                assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])
        return found

    @property
    def names(self) -> list[str]:
        return [record["name"] for record in self.offered]

    @property
    def hows(self) -> dict[str, str]:
        return {record["name"]: record["how"] for record in self.offered}

    def staged(self, record: dict[str, Any], path: str) -> bytes:
        return (self.root / "staged" / f"{record['number']:06d}" / path).read_bytes()

    def write(self, name: str, data: bytes) -> Path:
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def rename(self, name: str, data: bytes) -> Path:
        path = self.dir / name
        temporary = self.write(name + ".tmp", data)
        os.replace(temporary, path)
        return path

    def say(self, name: str, step: int | None = None, **metrics: float) -> None:
        line = json.dumps({"name": name, "step": step, "metrics": metrics, "generation": self.generation})
        with open(self.root / "sdk" / "commits.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")


def archive(text: str = "weights") -> bytes:
    """A zip archive as written by torch.save."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), text * 100)  # no time: the same bytes again
    return buffer.getvalue()
