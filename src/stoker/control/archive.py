"""The logs that are kept for good: runs/RUN/logs/ATTEMPT/TASK/NNNNNN.log, the framed segments of the task.

How far a segment has been carried is the size of its copy, so a crash in the middle of carrying loses and
doubles nothing. What the launcher dropped to stay within its budget is dropped here too, and said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.settings import Home, LogSettings
from stoker.task import layout
from stoker.task.access import TaskDir
from stoker.task.formats import LogLine

_BLOCK = 1 << 20
LOOK = 64 << 20
"""Bytes taken over at a time: a log that grows as fast as it is read must not hold up everything else."""
_SLACK = 32 << 20
_SEGMENT = re.compile(r"[0-9]{6,12}\.log")
_STEP = 1 << 16
_NEWLINE = re.compile(b"\n")
_DROPPED = "dropped"

Position = dict[str, list[int]]
"""`ATTEMPT/TASK` -> [segment, offset]: where a reader goes on."""


def source_name(task: str, incarnation: int) -> str:
    """What is read of a task that was replaced is read from another directory: it is kept apart."""
    return task if incarnation == 1 else f"{task}.{incarnation}"


class LogWriter:
    """Carries the log of one task. Called by the control loop only."""

    def __init__(
        self, home: Home, run: str, attempt: int, task: str, kept_to: LogSettings = LogSettings()
    ) -> None:
        """`kept_to`: what the launcher keeps to. User code can write to its log too, so twice that, and no more,
        is taken over."""
        self.directory = home.runs / run / "logs" / str(attempt) / task
        self._segment = -1
        self._offset = 0
        self._left = 2 * kept_to.budget + _SLACK
        self._largest = 2 * kept_to.segment + _SLACK

    def carry(self, source: TaskDir, *, final: bool = False) -> int:
        """Take over what is new, up to LOOK bytes at a time; bytes taken. Only whole lines until `final`."""
        if self._segment < 0:
            self._find_end()
        taken = 0
        for number in self._pending(source):
            if taken >= LOOK:
                break
            if number != self._segment:
                self._segment, self._offset = number, 0
            taken += self._copy(source, number, LOOK - taken, whole_lines=not final)
        if final and self._segment >= 0:
            self._sync()
        return taken

    def drop(self, source: TaskDir, dropped: int) -> None:
        """Mirror the launcher's dropping: what it let go of to stay within the budget goes here too."""
        there = set(_segments(source.list(layout.LOG)))
        for number in _segments(_names(self.directory)):
            if number not in there and number != self._segment:
                path = self.directory / f"{number:06d}.log"
                self._left += path.stat().st_size
                path.unlink(missing_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.directory / f"{_DROPPED}.tmp"
        temporary.write_text(str(dropped))
        temporary.replace(self.directory / _DROPPED)

    def _find_end(self) -> None:
        have = _segments(_names(self.directory))
        if have:
            self._left -= sum((self.directory / f"{number:06d}.log").stat().st_size for number in have)
            self._segment = have[-1]
            self._offset = (self.directory / f"{self._segment:06d}.log").stat().st_size
        else:
            self._segment = 0

    def _pending(self, source: TaskDir) -> list[int]:
        if self._offset == 0 and self._segment == 0:
            return _segments(source.list(layout.LOG))
        newer = [number for number in _segments(source.list(layout.LOG)) if number > self._segment]
        return [self._segment, *newer]

    def _copy(self, source: TaskDir, number: int, most: int, *, whole_lines: bool) -> int:
        taken = 0
        target: int | None = None
        try:
            while taken < most:
                data = source.read(layout.segment(number), self._offset, self._room())
                if whole_lines and (len(data) < _BLOCK or b"\n" in data):
                    data = data[: data.rfind(b"\n") + 1]
                if not data:
                    break
                if target is None:
                    target = self._open(number)
                os.pwrite(target, data, self._offset)
                self._offset += len(data)
                self._left -= len(data)
                taken += len(data)
            return taken
        finally:
            if target is not None:
                os.close(target)

    def _room(self) -> int:
        """How much may be read of a segment at once."""
        return max(0, min(_BLOCK, self._left, self._largest - self._offset))

    def _open(self, number: int) -> int:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(self.directory / f"{number:06d}.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _sync(self) -> None:
        path = self.directory / f"{self._segment:06d}.log"
        if path.exists():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


@dataclass(frozen=True)
class _Source:
    key: str
    attempt: int
    task: str
    directory: Path


class LogArchive:
    """Reads what `LogWriter` kept. Any thread; holds nothing between calls; memory bounded by `limit_bytes`."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def read(
        self,
        run: str,
        position: Position | None,
        *,
        task: str | None = None,
        attempt: int | None = None,
        stream: str | None = None,
        since: float | None = None,
        tail: int | None = None,
        limit_bytes: int = _BLOCK,
    ) -> tuple[list[dict[str, Any]], Position]:
        """Records after `position` (None: from the beginning, or the last `tail` lines) and where to go on. An
        empty list with an unchanged position means: nothing more for now."""
        sources = self._sources(run, task, attempt)
        place: Position = dict(position or {})
        if position is None and tail is not None:
            place = self._tail(sources, tail, stream)
        records: list[dict[str, Any]] = []
        budget = limit_bytes
        for source in sources:
            budget -= self._read_source(source, place, records, stream, since, budget)
            if budget <= 0:
                break
        return records, place

    def files(self, run: str) -> list[tuple[str, Path]]:
        """(name for people, path) of every segment: what `pull --what logs` brings."""
        return [
            (f"{source.key}/{number:06d}.log", source.directory / f"{number:06d}.log")
            for source in self._sources(run, None, None)
            for number in _segments(_names(source.directory))
        ]

    def last_lines(self, run: str, attempt: int, count: int, *, task: str) -> list[str]:
        records, _ = self.read(run, None, task=task, attempt=attempt, tail=count)
        return [record["text"] for record in records if "text" in record]

    def newest(self, run: str, attempt: int) -> dict[str, float]:
        """When something of each task's output last arrived."""
        found: dict[str, float] = {}
        for source in self._sources(run, None, attempt):
            for number in _segments(_names(source.directory))[-1:]:
                try:
                    at = (source.directory / f"{number:06d}.log").stat().st_mtime
                except FileNotFoundError:
                    continue  # gone since: others are newer
                found[source.task] = max(at, found.get(source.task, 0.0))
        return found

    def _sources(self, run: str, task: str | None, attempt: int | None) -> list[_Source]:
        root = self._home.runs / run / "logs"
        found = []
        for number in sorted(int(name) for name in _names(root) if name.isdigit()):
            if attempt is not None and number != attempt:
                continue
            for name in sorted(_names(root / str(number))):
                whose = name.partition(".")[0]
                if task is None or whose == task:
                    found.append(_Source(f"{number}/{name}", number, whose, root / str(number) / name))
        return found

    def _read_source(
        self,
        source: _Source,
        place: Position,
        records: list[dict[str, Any]],
        stream: str | None,
        since: float | None,
        budget: int,
    ) -> int:
        segments = _segments(_names(source.directory))
        current, offset = place.get(source.key, [segments[0] if segments else 0, 0])
        used = 0
        previous = current
        for number in [number for number in segments if number >= current]:
            if number > previous + 1 or (number > current and previous not in segments):
                records.append(
                    {"dropped": _dropped(source.directory), "task": source.task, "attempt": source.attempt}
                )
            if number != current:
                current, offset = number, 0
            room = max(0, budget - used)
            data = _pread(source.directory / f"{number:06d}.log", offset, room)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) >= 1 << 16:
                whole = data  # a frame is far smaller: this is not ours, pass it on as it is
            used += len(whole)
            offset += len(whole)
            place[source.key] = [current, offset]
            previous = number
            records.extend(_records(whole, source, stream, since))
            if len(data) >= room:
                return budget  # cut short by the limit: the rest of this segment comes before the next one
        return used

    def _tail(self, sources: list[_Source], count: int, stream: str | None) -> Position:
        place: Position = {}
        wanted = count
        for source in reversed(sources):
            segments = _segments(_names(source.directory))
            place[source.key] = [segments[-1] if segments else 0, 0]
            if segments and wanted <= 0:
                path = source.directory / f"{segments[-1]:06d}.log"
                place[source.key] = [segments[-1], path.stat().st_size]
                continue
            for number in reversed(segments):
                path = source.directory / f"{number:06d}.log"
                offset, found = _seek_back(path, wanted, stream)
                place[source.key] = [number, offset]
                wanted -= found
                if wanted <= 0:
                    break
        return place


def _records(
    data: bytes, source: _Source, stream: str | None, since: float | None
) -> Iterator[dict[str, Any]]:
    names = {"o": "stdout", "e": "stderr", "s": "stoker"}
    for raw in data.removesuffix(b"\n").split(b"\n") if data else ():
        line = LogLine.decode(raw)
        name = names[line.stream]
        if stream is not None and name != stream:
            continue
        if since is not None and line.ms / 1000 < since:
            continue
        yield {
            "task": source.task,
            "attempt": source.attempt,
            "stream": name,
            "t": line.ms / 1000,
            "text": line.text.decode("utf-8", "replace"),
            "partial": line.partial,
        }


def _seek_back(path: Path, count: int, stream: str | None) -> tuple[int, int]:
    """Where the last `count` lines of a segment begin, and how many there are (at most `count`)."""
    wanted = None if stream is None else {"stdout": b"o", "stderr": b"e", "stoker": b"s"}.get(stream)
    end, found, after = path.stat().st_size, 0, b""
    while end > 0:
        begin = max(0, end - _STEP)
        # The byte behind the block is the first one of a line that begins there.
        data = _pread(path, begin, end - begin) + after
        starts = [0] if begin == 0 else []
        starts += [match.end() for match in _NEWLINE.finditer(data, 0, len(data) - 1)]
        if wanted is not None:
            starts = [at for at in starts if data[at : at + 1].lower() == wanted]
        if found + len(starts) >= count:
            return begin + starts[found - count], count
        end, found, after = begin, found + len(starts), data[:1]
    return 0, found


def _dropped(directory: Path) -> int:
    try:
        return int((directory / _DROPPED).read_text())
    except (OSError, ValueError):
        return 0


def _pread(path: Path, offset: int, limit: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _segments(names: list[str]) -> list[int]:
    return sorted(int(name[:-4]) for name in names if _SEGMENT.fullmatch(name))
