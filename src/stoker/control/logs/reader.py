"""Reads the archived logs that `writer` keeps."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from stoker.control.logs.lines import (
    BLOCK,
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
from stoker.settings import Home

_TAIL_EXACT = 5000
"""Up to this many lines per task, the last lines of several tasks are selected by time. Beyond it, the requested number
is shown of each task."""


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
