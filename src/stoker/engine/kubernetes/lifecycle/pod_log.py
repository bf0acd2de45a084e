"""The log of a container without a launcher: read from the API, stored as framed segments like any other task's log.

The API puts a timestamp on every line. Each new stream asks for everything since the last line's second. Lines that are
already stored are skipped: by their time, and by the number of lines stored with that same time. So no line is doubled
or missing, and the same lines give the same bytes, however often reading restarts.
"""

from __future__ import annotations

import calendar
import json
import os
import re
import time
from collections import deque
from pathlib import Path

from stoker.linux.descriptors import Closing
from stoker.task import formats, layout
from stoker.task.formats import LogLine

LAST_LINES = 20
_LINE = 2000
LONGEST = 1 << 20
"""The most bytes of one line; a longer one is split."""
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|[+-]\d\d:\d\d) ?")
_STATE = "plain.json"


class PodLog:
    """Segments in `root`/log within a budget: the first half of it and the newest segments stay. One writer.

    `feed` takes the API's data in pieces of any size; call `begin` before each new stream.
    """

    def __init__(self, root: Path, *, budget: int, segment: int) -> None:
        self._root = root
        self._budget, self._segment = budget, max(4096, min(segment, budget // 4))
        self.last_time = ""
        """Time of the newest line, as the API writes it."""
        self._same = 0
        """How many stored lines have that time."""
        self._sizes: dict[int, int] = {}
        self.dropped = self.dropped_lines = self.written = 0
        self.tail: deque[str] = deque(maxlen=LAST_LINES)
        self._rest = b""
        self._skip = 0
        self._open()

    @property
    def number(self) -> int:
        return max(self._sizes, default=0)

    def begin(self) -> str:
        """The time from which to request a new stream; empty: from the beginning."""
        self._rest, self._skip = b"", self._same
        return f"{self.last_time[:19]}Z" if self.last_time else ""

    def feed(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LONGEST:
            lines.append(self._rest)
            self._rest = b""
        self._take(lines)

    def end(self) -> None:
        """The stream has ended: a last line without a line end is a line too."""
        if self._rest:
            self._take([self._rest])
            self._rest = b""

    def save(self) -> None:
        """Save the position. After a crash, lines after it are read and written again."""
        state = {
            "time": self.last_time,
            "same": self._same,
            "sizes": {str(number): size for number, size in self._sizes.items()},
            "dropped": self.dropped,
            "dropped_lines": self.dropped_lines,
            "written": self.written,
            "tail": list(self.tail),
        }
        formats.write_json(str(self._root / _STATE), state, mode=0o600)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            state = json.loads((self._root / _STATE).read_bytes())
            self.last_time, self._same = str(state["time"]), int(state["same"])
            self._sizes = {int(number): int(size) for number, size in state["sizes"].items()}
            self.dropped, self.dropped_lines = int(state["dropped"]), int(state["dropped_lines"])
            self.written = int(state["written"])
            self.tail.extend(str(line) for line in state["tail"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        for name in os.listdir(self._root / layout.LOG):
            path = self._root / layout.LOG / name
            size = self._sizes.get(int(name[:6]) if name[:6].isdigit() else -1)
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def _take(self, lines: list[bytes]) -> None:
        framed = []
        for line in lines:
            stamp, text = _split(line)
            if stamp is None:
                stamp = self.last_time  # the rest of a line that was split
            elif stamp < self.last_time:
                continue
            elif stamp == self.last_time and self._skip:
                self._skip -= 1
                continue
            self._same = self._same + 1 if stamp == self.last_time else 1
            self.last_time, self._skip = stamp, 0
            framed.append(LogLine("o", _milliseconds(stamp), text).encode())
            self.tail.append(text[:_LINE].decode("utf-8", "replace"))
        if framed:
            self._write(framed)

    def _write(self, framed: list[bytes]) -> None:
        """A segment ends with the line that fills it, so that its end depends only on the lines."""
        while framed:
            if not self._sizes or self._sizes[self.number] >= self._segment:
                self._sizes[self.number + 1] = 0
                self._drop()
            number = self.number
            room, count = self._segment - self._sizes[number], 0
            while count < len(framed) and room > 0:
                room -= len(framed[count])
                count += 1
            data = b"".join(framed[:count])
            framed = framed[count:]
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            with Closing(os.open(self._root / layout.segment(number), flags, 0o600)) as fd:
                formats.write_all(fd, data)
            self._sizes[number] += len(data)
            self.written += len(data)

    def _drop(self) -> None:
        """Delete the oldest segments after the first half while the budget is exceeded."""
        first = max(1, self._budget // 2 // self._segment)
        while sum(self._sizes.values()) + self._segment > self._budget:
            victim = next((n for n in sorted(self._sizes) if n > first and n != self.number), None)
            if victim is None:
                return
            path = self._root / layout.segment(victim)
            self.dropped_lines += path.read_bytes().count(b"\n")
            self.dropped += self._sizes.pop(victim)
            path.unlink()


def _split(line: bytes) -> tuple[str | None, bytes]:
    """The time of a line, in a form that sorts by time, and its text."""
    found = _TIME.match(line)
    if found is None:
        return None, line
    fraction = (found[2] or b"").ljust(9, b"0")
    return f"{found[1].decode()}.{fraction.decode()}Z", line[found.end() :]


def _milliseconds(stamp: str) -> int:
    if not stamp:
        return 0
    seconds = calendar.timegm(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S"))
    return seconds * 1000 + int(stamp[20:23])
