"""The journal: what the launcher did, so that nothing is done twice.

`starting` is on the disk before a body is forked. A later reader (this launcher after a restart, `collect` after its death)
finds in it which orders were acted on.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from typing import Any, Dict, Iterator, Mapping, Optional

from stoker.task import formats, layout

LARGEST = 1 << 30
LONGEST = 64 << 20
"""Bytes of a journal and of one line in it. User code can write to the file too."""
PIECE = 1 << 20


class Journal:
    """One writer at a time: the process that holds `launcher.lock`, from any of its threads.

    An entry is complete or not there at all: a failed append removes what it wrote, and a line torn by a power cut is ended
    when the journal is opened.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, layout.JOURNAL)
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.fd = os.open(self.path, flags, 0o644)
        info = os.fstat(self.fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > LARGEST:
            os.close(self.fd)
            raise OSError(errno.EFBIG, "not a journal that a launcher wrote", self.path)
        self.used = 0
        """The largest seq acted on."""
        self.started: Optional[Dict[str, Any]] = None
        """The newest `starting`."""
        self.ended: Optional[Dict[str, Any]] = None
        """The newest `ended`."""
        for entry in self._read():
            self._note(entry)

    @property
    def unfinished(self) -> Optional[Dict[str, Any]]:
        """The `starting` that has no `ended`."""
        if self.started is None:
            return None
        if self.ended is not None and self.ended["seq"] >= self.started["seq"]:
            return None
        return self.started

    def append(self, entry: Mapping[str, Any], *, durable: bool = True) -> None:
        """Raises OSError, with nothing written, when the disk is full."""
        data = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            before = os.fstat(self.fd).st_size
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self.fd, view) :]
                if durable:
                    os.fsync(self.fd)
                    if before == 0:
                        formats.sync_directory(os.path.dirname(self.path))
            except OSError:
                os.ftruncate(self.fd, before)
                raise
            self._note(entry)

    def close(self) -> None:
        os.close(self.fd)

    def _read(self) -> Iterator[Dict[str, Any]]:
        """The entries. The file is read in pieces, because it may be large."""
        size = os.fstat(self.fd).st_size
        rest = b""
        at = 0
        while at < size:
            part = os.pread(self.fd, PIECE, at)
            if not part:
                break
            at += len(part)
            lines = (rest + part).split(b"\n")
            rest = lines.pop()
            yield from formats.parse_lines(lines)
            if len(rest) > LONGEST:
                rest = b""
        if rest:
            os.write(self.fd, b"\n")
            yield from formats.parse_lines([rest])

    def _note(self, entry: Mapping[str, Any]) -> None:
        kind, seq = entry.get("k"), entry.get("seq")
        if kind not in ("starting", "ended") or not isinstance(seq, int):
            return
        self.used = max(self.used, seq)
        if kind == "starting" and (self.started is None or seq >= self.started["seq"]):
            self.started = dict(entry)
        if kind == "ended" and (self.ended is None or seq >= self.ended["seq"]):
            self.ended = dict(entry)
