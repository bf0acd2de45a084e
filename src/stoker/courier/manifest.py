"""Reads a manifest, the canonical JSON of a tree, entry by entry and of any size.

The rules are those of stoker.spec.tree, which the server has checked. They are checked again because paths become
files here. The file system itself refuses entries below a file or a link.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from typing import Any, Iterator, NamedTuple, Optional

from stoker.task.courier_protocol import Malformed

BEGIN = '{"files":['
LONGEST = 256 << 10
"""The most characters of one entry."""
_BLOCK = 64 << 10
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MODES = (0o644, 0o755)


class Entry(NamedTuple):
    path: str
    sha256: str = ""
    size: int = 0
    mode: int = 0o644
    link: Optional[str] = None


def entries(fd: int) -> Iterator[Entry]:
    """The entries of the manifest in this file, in order. Raises Malformed."""
    reader = _Reader(fd)
    reader.expect(BEGIN)
    previous = ""
    if reader.peek() == "]":
        reader.expect("]}")
        return
    while True:
        entry = _entry(reader.value())
        if previous and entry.path <= previous:
            raise Malformed(f"the manifest is not sorted: {entry.path!r} comes after {previous!r}")
        previous = entry.path
        yield entry
        if reader.peek() == "]":
            reader.expect("]}")
            return
        reader.expect(",")


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def plain(path: str) -> bool:
    """A relative path of plain names."""
    return "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def inside(path: str, target: str) -> bool:
    """Whether a link at `path` to `target` stays inside the tree, whatever other links it has (see stoker.spec.tree)."""
    parts = target.split("/")
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return (
        bool(target)
        and "\0" not in target
        and not target.startswith("/")
        and up <= path.count("/")
        and ".." not in parts[up:]
    )


def _entry(raw: Any) -> Entry:
    if not isinstance(raw, dict) or not isinstance(raw.get("path"), str) or not plain(raw["path"]):
        raise Malformed("the manifest has an entry without a plain path")
    path = raw["path"]
    if "link" in raw:
        if not isinstance(raw["link"], str) or not inside(path, raw["link"]):
            raise Malformed(f"the link {path!r} leads outside the tree")
        return Entry(path, link=raw["link"])
    digest, size, mode = raw.get("sha256"), raw.get("size"), raw.get("mode")
    if not isinstance(digest, str) or not is_digest(digest) or mode not in _MODES:
        raise Malformed(f"the manifest has no valid hash or mode for {path!r}")
    if type(size) is not int or size < 0:
        raise Malformed(f"the manifest has no valid size for {path!r}")
    return Entry(path, digest, size, mode)


class _Reader:
    """Reads the text of a file block by block and parses JSON values from it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._offset = 0
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._end = False

    def peek(self) -> str:
        while self._at >= len(self._text) and not self._end:
            self._more()
        return self._text[self._at : self._at + 1]

    def expect(self, what: str) -> None:
        while len(self._text) - self._at < len(what) and not self._end:
            self._more()
        if not self._text.startswith(what, self._at):
            raise Malformed("not the manifest of a tree")
        self._at += len(what)

    def value(self) -> Any:
        while True:
            try:
                found, self._at = self._json.raw_decode(self._text, self._at)
                return found
            except (ValueError, RecursionError) as exc:
                if self._end or len(self._text) - self._at > LONGEST:
                    raise Malformed("not the manifest of a tree") from exc
                self._more()

    def _more(self) -> None:
        data = os.pread(self._fd, _BLOCK, self._offset)
        self._offset += len(data)
        self._end = not data
        try:
            decoded = self._decode.decode(data, self._end)
        except UnicodeDecodeError as exc:
            raise Malformed("the manifest is not UTF-8") from exc
        self._text = self._text[self._at :] + decoded
        self._at = 0
