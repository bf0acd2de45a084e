"""Makes text safe for a terminal and measures its width.

Names, tags, reasons, paths and logs come from users and training code. They may hold escape sequences that retitle
the window, move the cursor, hide text or type answers. Such sequences never reach a terminal: control characters
are shown as text (`\\x1b`), and so are characters that reorder text (bidi overrides). In logs, colours (SGR) pass
on a terminal. Other complete CSI sequences (cursor moves of progress bars) are left out.
"""

from __future__ import annotations

import os
import re
from typing import IO

_UNSAFE = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_CONTROL = re.compile(rf"[{_UNSAFE}]")
_CONTROL_OR_TAB = re.compile(rf"[\t{_UNSAFE}]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CSI = re.compile(r"\x1b\[([0-?]*)([ -/]*)([@-~])")
_SGR = re.compile(r"\x1b\[[0-9;:]*m")

RESET = "\x1b[0m"
STYLES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}


def safe(text: object) -> str:
    """One line of safe text: for names, tags, reasons, paths."""
    raw = text if isinstance(text, str) else str(text)
    if raw.isprintable():
        return raw
    return _CONTROL_OR_TAB.sub(_visible, _SURROGATE.sub("\ufffd", raw))


def safe_lines(text: str) -> list[str]:
    """Several lines of safe text: for paragraphs and evidence."""
    return [safe(line.replace("\t", "    ")) for line in text.split("\n")]


def safe_log(text: str, *, colors: bool) -> str:
    """A log line. `colors`: SGR sequences pass, and are reset at the end of the line."""
    if text.isprintable():
        return text
    text = _SURROGATE.sub("\ufffd", text.rstrip("\r"))
    if "\x1b[" not in text:
        return _CONTROL.sub(_visible, text)
    parts: list[str] = []
    at = 0
    coloured = False
    for match in _CSI.finditer(text):
        parts.append(_CONTROL.sub(_visible, text[at : match.start()]))
        at = match.end()
        if colors and _SGR.fullmatch(match.group()):
            parts.append(match.group())
            coloured = True
    parts.append(_CONTROL.sub(_visible, text[at:]))
    return "".join(parts) + (RESET if coloured else "")


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    short = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    if short:
        return short
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def width(text: str) -> int:
    """Columns that `text` takes on a terminal. The text must be safe already."""
    if text.isascii():
        return len(text)
    import unicodedata  # lazy: most text is ASCII

    total = 0
    for char in text:
        if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
            continue
        total += 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1
    return total


def cut(text: str, columns: int) -> str:
    """`text` in at most `columns` columns, with an ellipsis where it was cut."""
    if width(text) <= columns:
        return text
    if columns <= 1:
        return "…"[:columns]
    kept = ""
    used = 0
    for char in text:
        size = width(char)
        if used + size > columns - 1:
            break
        kept += char
        used += size
    return kept.rstrip() + "…"


def pad(text: str, columns: int, *, right: bool = False) -> str:
    fill = " " * max(0, columns - width(text))
    return fill + text if right else text + fill


def style(text: str, *names: str, on: bool = True) -> str:
    if not on or not names or not text:
        return text
    return f"\x1b[{';'.join(STYLES[name] for name in names)}m{text}{RESET}"


def is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def read_line(stream: IO[str]) -> str:
    """A line that the user types, '' at the end of the input. Ctrl-C always interrupts the wait.

    A plain `readline` can miss a signal that arrives just before the read blocks, or that the kernel gives to another
    thread: its flag is checked only after the read. The signal itself writes the wake-up descriptor."""
    import select  # lazy: only for questions
    import signal
    import socket

    try:
        stream.fileno()
    except (OSError, ValueError):  # not a file: select cannot wait for it
        return stream.readline()
    asleep, awake = socket.socketpair()
    with asleep, awake:
        awake.setblocking(False)
        previous = signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
        try:
            while asleep.fileno() in select.select([stream.fileno(), asleep.fileno()], [], [])[0]:
                asleep.recv(4096)
        finally:
            signal.set_wakeup_fd(previous)
    return stream.readline()


def wants_color(stream: IO[str]) -> bool:
    """auto: a terminal that is not dumb, and NO_COLOR is not set (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def columns(stream: IO[str]) -> int | None:
    """The terminal's width. None: the output is not a terminal, and nothing is cut."""
    if not is_terminal(stream):
        return None
    explicit = os.environ.get("COLUMNS", "")
    if explicit.isdigit() and int(explicit) > 0:
        return max(20, int(explicit))
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return 80


def unicode_ok(stream: IO[str]) -> bool:
    return (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "") in (
        "utf8",
        "utf16",
        "utf32",
    )
