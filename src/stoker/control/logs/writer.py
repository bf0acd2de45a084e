"""Copies the logs of tasks into the archive: runs/RUN/logs/ATTEMPT/TASK/NNNNNN.log, the framed segments of the task.

The size of a copy says how far its segment was read, so a crash while copying neither loses nor doubles lines.
Segments that the launcher dropped to stay within its budget are dropped here too, and the gap is shown.
"""

from __future__ import annotations

import os

from stoker.control.logs.lines import BLOCK, DROPPED, names_in, segments_of
from stoker.settings import Home, LogSettings
from stoker.task import layout
from stoker.task.directory import TaskDir

LOOK = 64 << 20
"""Bytes copied at a time: a log that grows as fast as it is read must not block everything else."""
_SLACK = 32 << 20


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
