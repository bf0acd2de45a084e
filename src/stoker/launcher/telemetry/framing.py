"""Turns the bytes of a pipe into framed log lines. No I/O, no clock: times are arguments.

A busy body prints millions of lines a second. So the common case handles a whole batch with a few operations on bytes, none of
them per line; all lines of a batch have the same time.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

from stoker.launcher.telemetry.log_redaction import Redactor

MAX_LINE = 16 << 10
"""Longer lines are split into partial records."""
QUIET = 0.5
"""Seconds without output after which an unfinished line (a prompt) is shown."""
BAR_EVERY = 5.0
"""Seconds between two recorded states of a line that overwrites itself (a progress bar)."""


class Stream:
    """One stream of one process. Its methods return framed bytes, ready to be written.

    A `\\r` without `\\n` means that the next text overwrites the line. Of a progress bar the log gets one state every few
    seconds, and the last one. Memory is limited to one batch and one line.
    """

    def __init__(self, letter: str, redact: Optional[Redactor] = None) -> None:
        self.letter = letter.encode()
        self.redact = redact or Redactor()
        self.pending = b""
        self.open = False
        """Whether a partial record was written, so that the next one continues its line."""
        self._fed = 0.0
        self._bar_since: Optional[float] = None
        self._bar_shown = float("-inf")
        self._bar_text: Optional[bytes] = None

    def feed(self, data: bytes, ms: int, now: float) -> bytes:
        self._fed = now
        if self.pending:
            data = self.pending + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
            if b"\r" in data:
                return self._overwriting(data, ms, now)
        return self._plain(data, ms)

    def due(self) -> Optional[float]:
        """When `flush` has to be called."""
        if not self.pending:
            return None
        if self._bar_since is None:
            return self._fed + QUIET
        if _state(self.pending) in (b"", self._bar_text):
            return None
        return max(self._bar_since + QUIET, self._bar_shown + BAR_EVERY)

    def flush(self, ms: int, now: float) -> bytes:
        """The unfinished line after a time of quiet, or the present state of a progress bar."""
        due = self.due()
        if due is None or now < due:
            return b""
        if self._bar_since is None:
            text, self.pending, self.open = self.pending, b"", True
            return self._frame(text, ms, self.letter.upper())
        self._bar_shown, self._bar_text = now, _state(self.pending)
        return self._frame(self._bar_text, ms, self.letter)

    def close(self, ms: int) -> bytes:
        """The last line, when the pipe is closed."""
        text, self.pending = self.pending, b""
        bar = self._bar_since is not None
        if bar:
            text = _state(text)
        if not (text or self.open) or (bar and text == self._bar_text):
            return b""
        self.open = False
        return self._frame(text, ms, self.letter)

    def _plain(self, data: bytes, ms: int) -> bytes:
        self._bar_since = self._bar_text = None
        end = data.rfind(b"\n")
        out = b""
        if end >= 0:
            out = self._lines(data[:end], ms)
            data = data[end + 1 :]
        if len(data) > MAX_LINE:
            head, data = _whole(data)
            out += b"".join(self._frame(part, ms, self.letter.upper()) for part in head)
            self.open = True
        self.pending = data
        return out

    def _overwriting(self, data: bytes, ms: int, now: float) -> bytes:
        end = data.rfind(b"\n")
        first = data.find(b"\n")
        out = b""
        if self.open and b"\r" in (data if first < 0 else data[:first]):
            # The start of this line is in the log already and cannot be overwritten there.
            out = self._frame(b"", ms, self.letter)
            self.open = False
        if end >= 0:
            lines = [_state(line) for line in data[:end].split(b"\n")]
            if self._bar_text is not None and lines[0] == self._bar_text:
                del lines[0]
            if lines:
                out += self._lines(b"\n".join(lines), ms)
            self._bar_since = self._bar_text = None
            data = data[end + 1 :]
        if b"\r" not in data:
            return out + self._plain(data, ms)
        text = _state(data)
        if len(text) > MAX_LINE:
            return out + self._plain(text, ms)
        if self._bar_since is None:
            self._bar_since = now
        self.pending = b"\r" + text + (b"\r" if data.endswith(b"\r") and text else b"")
        return out

    def _lines(self, text: bytes, ms: int) -> bytes:
        self.open = False
        text = self.redact(text)
        prefix = b"%s %d " % (self.letter, ms)
        if not _has_long_line(text):
            return prefix + text.replace(b"\n", b"\n" + prefix) + b"\n"
        out: List[bytes] = []
        for line in text.split(b"\n"):
            head, rest = _whole(line)
            out.extend(b"%s %d %s\n" % (self.letter.upper(), ms, part) for part in head)
            out.append(b"%s%s\n" % (prefix, rest))
        return b"".join(out)

    def _frame(self, text: bytes, ms: int, letter: bytes) -> bytes:
        return b"%s %d %s\n" % (letter, ms, self.redact(text))


class PrefixedStream(Stream):
    """A stream of one of several processes. Their lines are mixed in the log, so each line is complete and has a prefix; a
    line that is too long becomes several."""

    def __init__(self, letter: str, redact: Optional[Redactor], mark: str) -> None:
        super().__init__(letter, redact)
        self.mark = mark.encode()

    def due(self) -> Optional[float]:
        return None if self._bar_since is None else super().due()

    def _plain(self, data: bytes, ms: int) -> bytes:
        out = super()._plain(data, ms)
        self.open = False
        return out

    def _lines(self, text: bytes, ms: int) -> bytes:
        text = self.redact(text)
        prefix = b"%s %d %s" % (self.letter, ms, self.mark)
        if _has_long_line(text):
            lines = text.split(b"\n")
            text = b"\n".join(b"\n".join([*head, rest]) for head, rest in map(_whole, lines))
        return prefix + text.replace(b"\n", b"\n" + prefix) + b"\n"

    def _frame(self, text: bytes, ms: int, letter: bytes) -> bytes:
        return b"%s %d %s%s\n" % (self.letter, ms, self.mark, self.redact(text))


def _state(line: bytes) -> bytes:
    """What a terminal shows of a line that overwrites itself."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def _whole(line: bytes) -> Tuple[List[bytes], bytes]:
    """Full-size pieces of a long line, and the rest (never empty when the line is not)."""
    cut = max(0, len(line) - 1) // MAX_LINE * MAX_LINE
    return [line[at : at + MAX_LINE] for at in range(0, cut, MAX_LINE)], line[cut:]


def _has_long_line(text: bytes) -> bool:
    at, size = 0, len(text)
    while size - at > MAX_LINE:
        found = text.rfind(b"\n", at, at + MAX_LINE + 1)
        if found < 0:
            return True
        at = found + 1
    return False
