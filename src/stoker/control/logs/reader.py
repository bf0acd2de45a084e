"""The archived logs: runs/RUN/logs/ATTEMPT/TASK/NNNNNN.log, the framed segments of the task.

The size of a copy says how far its segment was read, so a crash while copying neither loses nor doubles lines.
Segments that the launcher dropped to stay within its budget are dropped here too, and the gap is shown.
"""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path
from typing import Any

from stoker.control.logs.lines import (
    BLOCK,
    DROPPED,
    LARGEST_FRAME,
    Position,
    Reading,
    Source,
    gap,
    in_order,
    leave_out,
    names_in,
    pread,
    records_of,
    segments_of,
    tail_of,
)
from stoker.settings import Home, LogSettings
from stoker.task import layout
from stoker.task.directory import TaskDir

LOOK = 64 << 20
"""Bytes copied at a time: a log that grows as fast as it is read must not block everything else."""
_SLACK = 32 << 20
_TAIL_EXACT = 5000
"""Up to this many lines per task, the last lines of several tasks are selected by time. Beyond it, the requested number
is shown of each task."""


def source_name(task: str, incarnation: int) -> str:
    """Name of the log and the cursors of one incarnation. A replaced task has another directory, so another name."""
    return task if incarnation == 1 else f"{task}.{incarnation}"


class LogWriter:
    """Copies the log of one task. Called by the control loop only."""

    def __init__(
        self, home: Home, run: str, attempt: int, task: str, kept_to: LogSettings = LogSettings()
    ) -> None:
        """`kept_to`: the launcher's limits. User code can write to the log too, so at most twice that is copied."""
        self.directory = home.runs / run / "logs" / str(attempt) / task
        self._segment = -1
        self._offset = 0
        self._left = 2 * kept_to.budget + _SLACK
        self._largest = 2 * kept_to.segment + _SLACK

    def carry(self, source: TaskDir, *, final: bool = False) -> int:
        """Copy new bytes, up to LOOK at a time; returns their number. Only whole lines until `final`."""
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
        """Remove the segments that the launcher has removed. `dropped`: its count of dropped bytes."""
        there = set(segments_of(source.list(layout.LOG)))
        for number in segments_of(names_in(self.directory)):
            if number not in there and number != self._segment:
                path = self.directory / f"{number:06d}.log"
                self._left += path.stat().st_size
                path.unlink(missing_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.directory / f"{DROPPED}.tmp"
        temporary.write_text(str(dropped))
        temporary.replace(self.directory / DROPPED)

    def _find_end(self) -> None:
        have = segments_of(names_in(self.directory))
        if have:
            self._left -= sum((self.directory / f"{number:06d}.log").stat().st_size for number in have)
            self._segment = have[-1]
            self._offset = (self.directory / f"{self._segment:06d}.log").stat().st_size
        else:
            self._segment = 0

    def _pending(self, source: TaskDir) -> list[int]:
        if self._offset == 0 and self._segment == 0:
            return segments_of(source.list(layout.LOG))
        newer = [number for number in segments_of(source.list(layout.LOG)) if number > self._segment]
        return [self._segment, *newer]

    def _copy(self, source: TaskDir, number: int, most: int, *, whole_lines: bool) -> int:
        taken = 0
        target: int | None = None
        try:
            while taken < most:
                data = source.read(layout.segment(number), self._offset, self._room())
                if whole_lines and (len(data) < BLOCK or b"\n" in data):
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
        """Bytes that may be read at once."""
        return max(0, min(BLOCK, self._left, self._largest - self._offset))

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
        limit_bytes: int = BLOCK,
    ) -> tuple[list[dict[str, Any]], Position]:
        """Records after `position` (None: from the beginning, or the last `tail` lines), and the next position. An empty
        list with an unchanged position means: nothing more for now. Lines of several tasks are ordered by time, as far
        as they have arrived."""
        sources = self._sources(run, task, attempt)
        place: Position = dict(position or {})
        if position is None and tail is not None:
            place = self._tail(sources, tail, stream)
        records: list[dict[str, Any]] = []
        budget = limit_bytes
        for _, several in groupby(sources, lambda source: source.attempt):
            together = list(several)
            if len(together) == 1:
                budget -= self._read_source(together[0], place, records, stream, since, budget)
            else:
                budget -= self._read_several(together, place, records, stream, since, budget)
            if budget <= 0:
                break
        return records, place

    def files(self, run: str) -> list[tuple[str, Path]]:
        """(display name, path) of every segment, for `pull --what logs`."""
        return [
            (f"{source.key}/{number:06d}.log", source.directory / f"{number:06d}.log")
            for source in self._sources(run, None, None)
            for number in segments_of(names_in(source.directory))
        ]

    def file(self, run: str, name: str) -> Path | None:
        """Path of the segment with this display name. Each component must be an existing name, so `..` finds nothing."""
        path = self._home.runs / run / "logs"
        parts = name.split("/")
        if len(parts) != 3 or not parts[0].isdecimal() or not segments_of(parts[2:]):
            return None
        for part in parts:
            if part not in names_in(path):
                return None
            path /= part
        return path

    def last_lines(self, run: str, attempt: int, count: int, *, task: str) -> list[str]:
        records, _ = self.read(run, None, task=task, attempt=attempt, tail=count)
        return [record["text"] for record in records if "text" in record]

    def newest(self, run: str, attempt: int) -> dict[str, float]:
        """By task: when output last arrived."""
        found: dict[str, float] = {}
        for source in self._sources(run, None, attempt):
            for number in segments_of(names_in(source.directory))[-1:]:
                try:
                    at = (source.directory / f"{number:06d}.log").stat().st_mtime
                except FileNotFoundError:
                    continue  # dropped meanwhile: there are newer ones
                found[source.task] = max(at, found.get(source.task, 0.0))
        return found

    def _sources(self, run: str, task: str | None, attempt: int | None) -> list[Source]:
        root = self._home.runs / run / "logs"
        found = []
        for number in sorted(int(name) for name in names_in(root) if name.isdigit()):
            if attempt is not None and number != attempt:
                continue
            for name in sorted(names_in(root / str(number))):
                of_task = name.partition(".")[0]
                if task is None or of_task == task:
                    found.append(Source(f"{number}/{name}", number, of_task, root / str(number) / name))
        return found

    def _read_source(
        self,
        source: Source,
        place: Position,
        records: list[dict[str, Any]],
        stream: str | None,
        since: float | None,
        budget: int,
    ) -> int:
        segments = segments_of(names_in(source.directory))
        current, offset = place.get(source.key, [segments[0] if segments else 0, 0])
        used = 0
        previous = current
        for number in [number for number in segments if number >= current]:
            if number > previous + 1 or (number > current and previous not in segments):
                records.append(gap(source))
            if number != current:
                current, offset = number, 0
            room = max(0, budget - used)
            data = pread(source.directory / f"{number:06d}.log", offset, room)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) >= LARGEST_FRAME:
                whole = data  # frames are far smaller: user code wrote this, pass it on unchanged
            used += len(whole)
            offset += len(whole)
            place[source.key] = [current, offset]
            previous = number
            records.extend(records_of(whole, source, stream, since))
            if len(data) >= room:
                return budget  # cut off by the limit: read the rest of this segment before the next one
        return used

    def _read_several(
        self,
        sources: list[Source],
        place: Position,
        records: list[dict[str, Any]],
        stream: str | None,
        since: float | None,
        budget: int,
    ) -> int:
        each = max(LARGEST_FRAME, budget // len(sources))
        readings = [Reading(source, place, each) for source in sources]
        for reading in in_order(readings):
            record = reading.take(stream, since)
            place[reading.source.key] = reading.at
            if record is not None:
                records.append(record)
        if any(reading.cut for reading in readings):
            return budget
        return sum(reading.used for reading in readings)

    def _tail(self, sources: list[Source], count: int, stream: str | None) -> Position:
        place: Position = {}
        wanted = count
        groups = [list(several) for _, several in groupby(sources, lambda source: source.attempt)]
        for several in reversed(groups):
            found = 0
            for source in several:
                place[source.key], lines = tail_of(source, wanted, stream)
                found += lines
            if len(several) > 1 and wanted < found <= len(several) * _TAIL_EXACT:
                leave_out(several, place, found - wanted, stream)
            wanted -= found
        return place
