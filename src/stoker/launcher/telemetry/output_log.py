"""The log of a task: reads pipes and writes framed segments within a budget.

The log never delays or ends the training. When the disk is full, the pipes are read all the same, the output is dropped and
counted, and the log says so as soon as it can be written again.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from typing import Dict, List, Optional, Tuple

from stoker.launcher.telemetry.framing import PrefixedStream, Stream
from stoker.task import layout
from stoker.task.formats import LogLine

BATCH = 256 << 10
PIPE_SIZES = (1 << 20, 256 << 10)
REST = 0.005
"""Seconds for which the pipes are left to fill after a small read. So a body that prints line by line causes a few hundred
wake-ups a second, not one per line."""
TAIL = 64 << 10
"""Bytes of framed log kept in memory for the last lines."""
LAST_LINES = 20
LINE_LENGTH = 2000
"""Characters of one line among the last lines."""
SMALLEST_SEGMENT = 4 << 10
RETRY = 1.0
"""Seconds between two tries to write the log."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def pipe() -> Tuple[int, int]:
    """A pipe with a large buffer, so that a body can print while the launcher is busy."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    resize = getattr(fcntl, "F_SETPIPE_SZ", 1031)
    for size in PIPE_SIZES:
        try:
            fcntl.fcntl(writer, resize, size)
            break
        except OSError:
            # Over the user's limit of pipe memory, or not Linux: try the next smaller size, and keep the default at last.
            continue
    return reader, writer


def clean(text: bytes) -> str:
    """Text for a message, without escape sequences and control characters."""
    return _CONTROL.sub("", _ESCAPES.sub("", text.decode("utf-8", "replace")))


class Segments:
    """Numbered files of about equal size. When the budget is used up, segments after the first are deleted, oldest first.

    Never raises: output that cannot be written is counted in `dropped`.
    """

    def __init__(self, directory: str, budget: int, segment: int) -> None:
        self.directory = directory
        self.budget = budget
        self.segment = max(SMALLEST_SEGMENT, min(segment, budget // 4))
        self.sizes: Dict[int, int] = {}
        self._lines: Dict[int, int] = {}
        self.written = 0
        self.dropped = 0
        self.dropped_lines = 0
        self.failed_at: Optional[float] = None
        self.lost = 0
        """Bytes that could not be written since the last good write."""
        self.reason = ""
        self._fd: Optional[int] = None
        self._find()

    @property
    def number(self) -> int:
        return max(self.sizes, default=0)

    def write(self, data: bytes) -> None:
        self.written += len(data)
        if self.failed_at is not None:
            if time.monotonic() - self.failed_at < RETRY:
                self._count_dropped(data)
                return
            note = LogLine(
                "s", now_ms(), f"{self.lost} bytes of output were lost: {self.reason}".encode()
            ).encode()
            if not self._put(note):
                self._count_dropped(data)
                return
            self.written += len(note)
            self.failed_at, self.lost = None, 0
        self._put(data)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _find(self) -> None:
        """Find the segments of an earlier launcher, to continue after them."""
        for name in os.listdir(os.path.join(self.directory, layout.LOG)):
            stem = name[:-4]
            if name.endswith(".log") and stem.isdigit():
                path = os.path.join(self.directory, layout.LOG, name)
                self.sizes[int(stem)] = os.lstat(path).st_size
        self.written = sum(self.sizes.values())

    def _put(self, data: bytes) -> bool:
        while data:
            size = self.sizes.get(self.number, 0)
            room = self.segment - size
            if self._fd is None or room <= 0:
                if not self._next():
                    self._count_dropped(data)
                    return False
                size, room = 0, self.segment
            piece = data
            if len(data) > room:
                end = data.rfind(b"\n", 0, room) + 1 or data.find(b"\n") + 1
                if end > room and size > 0:
                    self.close()
                    continue
                piece = data[:end]
            if not self._append(piece, size):
                self._count_dropped(data)
                return False
            data = data[len(piece) :]
        return True

    def _append(self, piece: bytes, size: int) -> bool:
        assert self._fd is not None
        done = 0
        try:
            while done < len(piece):
                done += os.write(self._fd, piece[done:] if done else piece)
        except OSError as exc:
            self._failed(exc)
            try:
                os.ftruncate(self._fd, size)
            except OSError:
                # The torn record remains; readers show it unchanged.
                size += done
            self.sizes[self.number] = size
            return False
        self.sizes[self.number] = size + len(piece)
        self._lines[self.number] = self._lines.get(self.number, 0) + piece.count(b"\n")
        return True

    def _next(self) -> bool:
        self.close()
        self._make_room()
        number = self.number + 1
        path = os.path.join(self.directory, layout.segment(number))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o644)
        except OSError as exc:
            self._failed(exc)
            return False
        self.sizes[number] = 0
        return True

    def _make_room(self) -> None:
        kept = sorted(self.sizes)
        while len(kept) > 2 and sum(self.sizes.values()) + self.segment > self.budget:
            number = kept.pop(1)
            try:
                os.unlink(os.path.join(self.directory, layout.segment(number)))
            except FileNotFoundError:
                pass
            except OSError:
                # It cannot be removed now: it counts as kept, and is tried again with the next segment.
                return
            self.dropped += self.sizes.pop(number)
            self.dropped_lines += self._lines.pop(number, 0)

    def _failed(self, exc: OSError) -> None:
        self.failed_at = time.monotonic()
        self.reason = exc.strerror or str(exc)

    def _count_dropped(self, data: bytes) -> None:
        self.lost += len(data)
        self.dropped += len(data)
        self.dropped_lines += data.count(b"\n")


class OutputLog:
    """The pipes that are read and the segments that they are written to. Used from one thread."""

    def __init__(self, directory: str, budget: int, segment: int) -> None:
        self.segments = Segments(directory, budget, segment)
        self.streams: Dict[int, Stream] = {}
        self.throttled_until = 0.0
        """The pipes need not be read before this time."""
        self.received = 0
        """Bytes of output of the body."""
        self._tail = b""
        self._tails: Dict[str, bytes] = {}
        """The tail of each of several processes, by its prefix: one that prints much does not push out the others."""

    def attach(self, fd: int, stream: Stream) -> None:
        """Read this descriptor from now on; it is closed at the end of the stream."""
        self.streams[fd] = stream

    def drain(self, fd: int) -> bool:
        """Read one batch. False at the end of the stream."""
        try:
            data = os.read(fd, BATCH)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self.detach(fd)
            return False
        now = time.monotonic()
        stream = self.streams[fd]
        if stream.letter != b"s":
            self.received += len(data)
        self._write(stream.feed(data, now_ms(), now), stream)
        if len(data) < BATCH // 4:
            self.throttled_until = now + REST
        return True

    def detach(self, fd: int) -> None:
        stream = self.streams.pop(fd)
        os.close(fd)
        self._write(stream.close(now_ms()), stream)

    def say(self, text: str) -> None:
        """Write a line of Stoker itself."""
        self._write(LogLine("s", now_ms(), text.encode("utf-8", "replace")).encode())

    def due(self) -> Optional[float]:
        times = [time_ for time_ in (stream.due() for stream in self.streams.values()) if time_ is not None]
        return min(times, default=None)

    def flush(self, now: float) -> None:
        for stream in self.streams.values():
            self._write(stream.flush(now_ms(), now), stream)

    def last_lines(self, mark: Optional[str] = None) -> List[str]:
        """The last lines of the processes, cleaned, with partial records joined. `mark`: only of the process with this prefix,
        and without it."""
        lines: List[str] = []
        unfinished: Dict[str, bytes] = {}
        tail = self._tail if mark is None else self._tails.get(mark, b"")
        for raw in tail.split(b"\n"):
            record = LogLine.decode(raw)
            if record.stream == "s":
                continue
            if mark is not None:
                record.text = record.text[len(mark.encode()) :]
            text = (unfinished.pop(record.stream, b"") + record.text)[-4 * LINE_LENGTH :]
            if record.partial:
                unfinished[record.stream] = text
            else:
                lines.append(clean(text)[:LINE_LENGTH])
        lines.extend(clean(text)[:LINE_LENGTH] for text in unfinished.values())
        return lines[-LAST_LINES:]

    def forget(self) -> None:
        """Forget the last lines, when a new body starts."""
        self._tail = b""
        self._tails = {}

    def close(self) -> None:
        for fd in list(self.streams):
            self.detach(fd)
        self.segments.close()

    def _write(self, data: bytes, stream: Optional[Stream] = None) -> None:
        if not data:
            return
        self.segments.write(data)
        self._tail = _last(self._tail, data)
        if isinstance(stream, PrefixedStream):
            mark = stream.mark.decode()
            self._tails[mark] = _last(self._tails.get(mark, b""), data)


def _last(tail: bytes, data: bytes) -> bytes:
    return data[-TAIL:] if len(data) >= TAIL else (tail + data)[-TAIL:]


def now_ms() -> int:
    return int(time.time() * 1000)
