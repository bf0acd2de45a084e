"""Lines of archived logs: of one task in the order of writing, of several tasks ordered by time."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.task.formats import LogLine

Position = dict[str, list[int]]
"""`ATTEMPT/TASK` -> [segment, offset]: where the next read begins."""
DROPPED = "dropped"
"""File with the number of bytes that were dropped."""
LARGEST_FRAME = 1 << 16
BLOCK = 1 << 20
_STEP = 1 << 16
_SEGMENT = re.compile(r"[0-9]{6,12}\.log")
_NEWLINE = re.compile(b"\n")


@dataclass(frozen=True)
class Source:
    key: str
    attempt: int
    task: str
    directory: Path


class Reading:
    """The next lines of one source, one at a time, with the position after each."""

    def __init__(self, source: Source, place: Position, budget: int) -> None:
        self.source = source
        self.used = 0
        self.cut = False
        """The budget ended the reading; there is more."""
        segments = segments_of(names_in(source.directory))
        self.at = list(place.get(source.key, [segments[0] if segments else 0, 0]))
        self._lines: list[tuple[bytes | None, list[int]]] = []
        """(raw line or None for a gap, position after it), in reverse order."""
        self._latest = 0
        self._fill(segments, budget)
        self._lines.reverse()

    def _fill(self, segments: list[int], budget: int) -> None:
        current, offset = self.at
        previous = current
        for number in [number for number in segments if number >= current]:
            if number > previous + 1 or (number > current and previous not in segments):
                self._lines.append((None, [number, 0]))
            if number != current:
                current, offset = number, 0
            room = max(0, budget - self.used)
            data = pread(self.source.directory / f"{number:06d}.log", offset, room)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) >= LARGEST_FRAME:
                whole = data  # frames are far smaller: user code wrote this, pass it on unchanged
            self.used += len(whole)
            for raw in _split(whole):
                offset += len(raw)
                self._lines.append((raw, [current, offset]))
            previous = number
            if len(data) >= room:
                self.cut = True
                return

    @property
    def empty(self) -> bool:
        return not self._lines

    @property
    def ms(self) -> int:
        """When the next line was written. Never earlier than the line before it: lines of one task keep their order."""
        raw = self._lines[-1][0]
        if raw is not None:
            self._latest = max(self._latest, LogLine.decode(raw).ms)
        return self._latest

    def take(self, stream: str | None, since: float | None) -> dict[str, Any] | None:
        raw, self.at = self._lines.pop()
        if raw is None:
            return gap(self.source)
        return next(records_of(raw, self.source, stream, since), None)


def in_order(readings: Sequence[Reading]) -> Iterator[Reading]:
    """The readings in the order of their next lines. Ends when a reading is empty but its source has more."""
    waiting = [(reading.ms, number) for number, reading in enumerate(readings) if not reading.empty]
    if any(reading.empty and reading.cut for reading in readings):
        return
    heapq.heapify(waiting)
    while waiting:
        _, number = heapq.heappop(waiting)
        yield readings[number]
        if not readings[number].empty:
            heapq.heappush(waiting, (readings[number].ms, number))
        elif readings[number].cut:
            return


def tail_of(source: Source, wanted: int, stream: str | None) -> tuple[list[int], int]:
    """Position of the last `wanted` lines of a source, and how many there are."""
    segments = segments_of(names_in(source.directory))
    at = [segments[-1] if segments else 0, 0]
    if segments and wanted <= 0:
        return [segments[-1], (source.directory / f"{segments[-1]:06d}.log").stat().st_size], 0
    found = 0
    for number in reversed(segments):
        offset, lines = _seek_back(source.directory / f"{number:06d}.log", wanted - found, stream)
        at = [number, offset]
        found += lines
        if found >= wanted:
            break
    return at, found


def leave_out(sources: list[Source], place: Position, count: int, stream: str | None) -> None:
    """Move `place` past the oldest `count` lines of several tasks."""
    while count > 0:
        readings = [Reading(source, place, BLOCK) for source in sources]
        for reading in in_order(readings):
            if reading.take(stream, None) is not None:
                count -= 1
            place[reading.source.key] = reading.at
            if count <= 0:
                return
        if not any(reading.cut for reading in readings):
            return


def gap(source: Source) -> dict[str, Any]:
    return {"dropped": _dropped(source.directory), "task": source.task, "attempt": source.attempt}


def _split(data: bytes) -> list[bytes]:
    """Splits at line feeds only. Bytes after the last one are a line too."""
    *lines, rest = data.split(b"\n")
    return [line + b"\n" for line in lines] + ([rest] if rest else [])


def records_of(
    data: bytes, source: Source, stream: str | None, since: float | None
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
    """Offset of the last `count` lines of a segment, and how many there are (at most `count`)."""
    wanted = None if stream is None else {"stdout": b"o", "stderr": b"e", "stoker": b"s"}.get(stream)
    end, found, after = path.stat().st_size, 0, b""
    while end > 0:
        begin = max(0, end - _STEP)
        # The byte after the block is the first of a line that begins there.
        data = pread(path, begin, end - begin) + after
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
        return int((directory / DROPPED).read_text())
    except (OSError, ValueError):
        return 0


def pread(path: Path, offset: int, limit: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)


def names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def segments_of(names: list[str]) -> list[int]:
    return sorted(int(name[:-4]) for name in names if _SEGMENT.fullmatch(name))
