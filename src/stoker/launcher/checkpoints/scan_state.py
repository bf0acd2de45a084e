"""The state of a scanner, stored for the next one: `scan.jsonl` beside the staged copies.

That a file was renamed into place, or was quiet while its writer lived, cannot be seen afterwards. When the launcher was killed,
the next scanner of the directory reads it here. The file is beside the copies because they may outlive the rest of the
directory. Only records of copies are synced: after a power cut these count, and everything else has to be verified.
"""

from __future__ import annotations

import hashlib
import os
import re
from itertools import chain
from typing import Any, Dict, Iterator, List, Optional, Set

from stoker.launcher.checkpoints import snapshot, stager
from stoker.linux.process import boot_id
from stoker.task import checkpoint_names, formats, layout

_BEFORE = "scan.jsonl"
"""The path in launchers of earlier versions."""
_NUMBER = re.compile(r"^\d{6,}$")
CARRIED = "carried"
"""Kind of a journal entry that only names a copy that was transferred (see stoker.launcher.recovery)."""


def key_of(signature: snapshot.Signature) -> str:
    """A short key for the state of a checkpoint's files, without their modes."""
    text = "\n".join(f"{m.ino} {m.size} {m.mtime_ns} {m.path}" for m in signature)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class ScanState:
    """What is known of one generation, and the numbers used in this task directory. The scanner is the only writer."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._fd: Optional[int] = None
        self.forget()

    def forget(self) -> None:
        self.generation = -1
        self.resumed = False
        """Whether an earlier scanner has begun this generation."""
        self.rebooted = False
        self.commits_offset = 0
        self.settled: Dict[str, str] = {}
        """By name: the state at the start, or at the last decision."""
        self.contents: Dict[str, str] = {}
        """By name: digest of the last staged content."""
        self.refused: Set[str] = set()
        """Names and contents that were rejected."""
        self.complete: Dict[str, Dict[str, str]] = {"renamed": {}, "quiet": {}}
        """By sign and name: the state with that sign."""
        self.number = 0
        """The largest number used so far."""
        self.unjournaled: List[Dict[str, Any]] = []
        """Staged copies that are not in the journal, oldest first."""

    def load(self, generation: int) -> None:
        """Read what is known of a generation, and remove incomplete copies."""
        self.forget()
        self.generation = generation
        journaled = self._load_journal()
        there = set(self._staged_numbers())
        waiting: Dict[int, Dict[str, Any]] = {}
        for fact in chain(self._lines(_BEFORE), self._lines(layout.SCAN)):
            if fact.get("k") == "staged":
                record = fact.get("record") or {}
                number = int(record.get("number", 0))
                if number not in journaled:
                    if number not in there or not self._whole(record):
                        continue  # Its copy was not renamed or is incomplete: it does not count.
                    waiting[number] = record
            if fact.get("generation") == generation:
                self._learn(fact)
        for number in there - journaled - set(waiting):
            stager.remove(os.path.join(self._directory, layout.staged(number)))
        self.unjournaled = [waiting[number] for number in sorted(waiting)]
        self.number = max([self.number, *there])

    def begin(self, settled: Dict[str, str], commits_offset: int) -> None:
        """Record the files that are there when this generation starts."""
        self.settled.update(settled)
        self.commits_offset = commits_offset
        self._write("begin", settled=settled, commits=commits_offset, boot=boot_id())

    def seen(self, kind: str, name: str, key: str) -> None:
        """Record that a checkpoint was seen complete in this state. `kind`: `renamed` or `quiet`."""
        if self.complete[kind].get(name) != key:
            self.complete[kind][name] = key
            self._write(kind, name=name, key=key)

    def staged(self, record: Dict[str, Any], key: str, content: str) -> None:
        self.settled[record["name"]] = key
        self.contents[record["name"]] = content
        self._write("staged", name=record["name"], key=key, content=content, record=record)

    def refuse(self, name: str, key: str, content: str) -> None:
        self.settled[name] = key
        self.refused.add(f"{name} {content}")
        self._write("refused", name=name, key=key, content=content)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # -- reading ---------------------------------------------------------------------------------------------

    def _learn(self, fact: Dict[str, Any]) -> None:
        kind, name, key = fact.get("k"), str(fact.get("name")), str(fact.get("key"))
        if kind == "begin":
            self.resumed = True
            self.rebooted = self.rebooted or fact.get("boot") != boot_id()
            self.settled.update(fact.get("settled") or {})
            self.commits_offset = int(fact.get("commits") or 0)
        elif kind in self.complete:
            self.complete[kind][name] = key
        elif kind == "staged":
            self.settled[name] = key
            self.contents[name] = str(fact.get("content"))
        elif kind == "refused":
            self.settled[name] = key
            self.refused.add(f"{name} {fact.get('content')}")

    def _load_journal(self) -> Set[int]:
        numbers: Set[int] = set()
        for entry in self._lines(layout.JOURNAL):
            if entry.get("k") not in ("checkpoint", CARRIED) or not isinstance(entry.get("number"), int):
                continue
            numbers.add(entry["number"])
            if entry.get("generation") == self.generation:
                files = entry.get("files") or []
                own = [file for file in files if file.get("path") not in checkpoint_names.POINTERS]
                self.contents[str(entry.get("name"))] = stager.digest(own or files)
        self.number = max(numbers, default=0)
        return numbers

    def _staged_numbers(self) -> List[int]:
        area = os.path.join(self._directory, layout.STAGED)
        os.makedirs(area, exist_ok=True)
        found = []
        for name in os.listdir(area):
            if _NUMBER.match(name):
                found.append(int(name))
            elif not name.startswith(".") and f"{layout.STAGED}/{name}" != layout.SCAN:
                # A copy that was not finished.
                stager.remove(os.path.join(area, name))
        return found

    def _whole(self, record: Dict[str, Any]) -> bool:
        root = os.path.join(self._directory, layout.staged(record["number"]))
        try:
            return all(os.path.getsize(os.path.join(root, f["path"])) == f["size"] for f in record["files"])
        except (OSError, KeyError, TypeError):
            return False

    def _lines(self, name: str) -> Iterator[Dict[str, Any]]:
        try:
            fd = os.open(os.path.join(self._directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(fd, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield from formats.parse_lines([line])

    def _write(self, kind: str, **fact: Any) -> None:
        """Append a record. If the disk is full it is lost; then the checkpoint has to be verified later."""
        try:
            if self._fd is None:
                path = os.path.join(self._directory, layout.SCAN)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(path, flags, 0o600)
            formats.append_line(self._fd, {"k": kind, "generation": self.generation, **fact})
            if kind == "staged":
                os.fsync(self._fd)
        except OSError:
            return
