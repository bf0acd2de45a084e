"""What a guard has seen, for the next one: `versions/folder.jsonl`.

When the launcher was killed, `stoker.launcher.recovery` comes to the same result as the launcher would have. Only the beginning
of a generation is synced, at the first change of the folder: after a restart of the machine nothing else counts but the formats
of the files.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

from stoker.linux.process import boot_id
from stoker.task import formats, layout

_LARGEST = 1 << 20
"""Bytes after which the file is written anew, without what has been replaced since."""
_MOST_SETTLED = 20_000
"""Units whose settled state is known. Those that settled earliest are forgotten first."""
_MOST = 64 << 20


class GuardState:
    """The guard is the only writer. Records that cannot be written (the disk is full) are lost; then less is known later."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, layout.GUARD)
        self._fd: Optional[int] = None
        self._bytes = 0
        self._synced = True
        self.forget()

    def forget(self) -> None:
        self.generation: Optional[int] = None
        """The generation that has begun and is not finished."""
        self.rebooted = False
        self.since = 0
        """When it began, in nanoseconds by the clock of the file system."""
        self.settled: Dict[str, str] = {}
        """By unit: its state when it last settled in this generation."""
        self.renamed: Dict[str, str] = {}
        """By unit: its state when it was renamed into place, so that it cannot be torn."""
        self.versions: Dict[int, Dict[str, Any]] = {}
        """Records of the versions, by number."""

    def load(self) -> None:
        self.close()
        self.forget()
        for fact in self._read():
            self._learn(fact)

    def begin(self, generation: int) -> None:
        """Record the start of a generation. Raises OSError: then the folder is not guarded."""
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        self.generation, self.rebooted = generation, False
        self.settled, self.renamed = {}, {}
        self.since = self._now()
        self._rewrite()
        self._synced = False

    def sync(self) -> None:
        """Sync the beginning of the generation, unless that was done. A short run that writes nothing does without."""
        if self._synced:
            return
        self._synced = True
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            return

    def settle(self, path: str, key: str, *, renamed: bool = False) -> None:
        """`key`: '' for a unit that has turned out not to be complete."""
        if self.settled.get(path) != key:
            fact = {"k": "settled", "path": path, "key": key, "renamed": renamed}
            self._settled(fact)
            self._append(fact)

    def version(self, record: Dict[str, Any]) -> None:
        self.versions[int(record["number"])] = record
        self._append({"k": "version", **record})

    def dropped(self, number: int) -> None:
        if self.versions.pop(number, None) is not None:
            self._append({"k": "dropped", "number": number})

    def finish(self) -> None:
        generation, self.generation = self.generation, None
        if generation is not None:
            self._append({"k": "finished", "generation": generation})

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _learn(self, fact: Dict[str, Any]) -> None:
        kind = fact.get("k")
        if kind == "begin" and type(fact.get("generation")) is int:
            self.generation = fact["generation"]
            self.since = int(fact.get("since") or 0)
            self.rebooted = fact.get("boot") != boot_id()
            self.settled, self.renamed = {}, {}
        elif kind == "settled":
            self._settled(fact)
        elif kind == "version" and type(fact.get("number")) is int:
            self.versions[fact["number"]] = fact
        elif kind == "dropped":
            self.versions.pop(fact.get("number", -1), None)
        elif kind == "finished":
            self.generation = None

    def _settled(self, fact: Dict[str, Any]) -> None:
        path, key = str(fact.get("path")), str(fact.get("key"))
        for known in (self.settled, self.renamed):
            known.pop(path, None)
        self.settled[path] = key
        if fact.get("renamed"):
            self.renamed[path] = key
        if len(self.settled) > _MOST_SETTLED:
            oldest = next(iter(self.settled))
            del self.settled[oldest]
            self.renamed.pop(oldest, None)

    def _facts(self) -> List[Dict[str, Any]]:
        """All that is known, as few records."""
        facts: List[Dict[str, Any]] = []
        if self.generation is not None:
            facts.append(
                {"k": "begin", "generation": self.generation, "since": self.since, "boot": boot_id()}
            )
        for path, key in self.settled.items():
            facts.append({"k": "settled", "path": path, "key": key, "renamed": path in self.renamed})
        return facts + [{**record, "k": "version"} for record in self.versions.values()]

    def _rewrite(self) -> None:
        self.close()
        temporary = self._path + ".tmp"
        fd = formats.create(temporary, 0o600)
        try:
            for fact in self._facts():
                formats.append_line(fd, fact)
            if self.settled or self.versions:
                os.fsync(fd)
            self._bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
        os.replace(temporary, self._path)

    def _append(self, fact: Dict[str, Any]) -> None:
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
                self._bytes = os.fstat(self._fd).st_size
            if self._bytes > _LARGEST and len(self.settled) + len(self.versions) < self._bytes // 1000:
                self._rewrite()
                return
            formats.append_line(self._fd, fact)
            self._bytes = os.fstat(self._fd).st_size
        except OSError:
            return

    def _now(self) -> int:
        """The present time of the file system, which may be another machine's."""
        temporary = self._path + ".now"
        os.close(formats.create(temporary, 0o600))
        now = os.stat(temporary).st_ctime_ns
        os.unlink(temporary)
        return now

    def _read(self) -> List[Dict[str, Any]]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        with open(fd, "rb") as file:
            lines, _ = formats.split_lines(file.read(_MOST))
        return list(formats.parse_lines(lines))
