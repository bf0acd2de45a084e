"""The local copy of a remote task directory.

Sizes are offsets: the length of a file here says how much of it has arrived. A server that is killed at any point
continues from there. Nothing is synced to the disk. After a reboot of this machine a file may be longer than what was
written, so the whole mirror is dropped then. Records are replaced in one step.

The pod is not trusted. Only files from a fixed list are accepted and sizes are counted; what exceeds the limits is no
longer requested.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.linux.descriptors import Closing
from stoker.task import courier_protocol, formats, layout
from stoker.task.courier_protocol import Malformed

LARGEST_FILE = 1 << 30
MOST_FILES = 3000
"""More than twice what a courier offers at a time."""
_MARKER = ".mirror"


@dataclass
class _Held:
    size: int
    tail: bytes


class Mirror:
    """The growing files of one remote task directory, on this machine. A cache: dropped when it may be wrong.

    May be used from any thread. Only one process at a time: the server.
    """

    def __init__(self, root: Path, *, source: str, boot_id: str, limit: int = 4 << 30) -> None:
        """`source`: the directory that is mirrored (the pod's UID). With another source, or after a reboot of this
        machine, the existing content is dropped. `limit`: bytes it may take."""
        self._root = root
        self._limit = limit
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._taken = 0
        """Bytes of all files except the journal."""
        self._refused: set[str] = set()
        self.synced = False
        """Everything has arrived at least once since this object was made."""
        self.problem = ""
        """Why a file is not mirrored completely."""
        self._open({"source": source, "boot_id": boot_id})

    @property
    def root(self) -> Path:
        return self._root

    def drop(self) -> None:
        """Delete it. The object must not be used afterwards."""
        with self._lock:
            shutil.rmtree(self._root, ignore_errors=True)

    # -- requests --------------------------------------------------------------------------------------------

    def request(self, *, wait: float, final: bool = False, mark: Any = None) -> dict[str, Any]:
        """The header of a sync request."""
        with self._lock:
            have: dict[str, list[Any]] = {
                path: [held.size, courier_protocol.tag(held.tail)] for path, held in self._held.items()
            }
            have.update({path: [-1, ""] for path in self._refused})
        records = {}
        for path in courier_protocol.RECORDS:
            with contextlib.suppress(OSError):
                records[path] = courier_protocol.tag((self._root / path).read_bytes())
        return {"have": have, "records": records, "wait": wait, "final": final, "mark": mark}

    # -- answers ---------------------------------------------------------------------------------------------

    def apply(self, header: Mapping[str, Any], data: memoryview) -> bool:
        """Take in an answer; whether anything is new. Raises Malformed, before anything is written, for an answer that
        no courier sends, and OSError when the disk is full.

        Other files are written before the journal's entries about them, and the status comes last.
        """
        answer = _parse(header, data)
        with self._lock:
            for path in answer.resets:
                self._truncate(path)
            for path, offset, piece in sorted(answer.deltas, key=lambda delta: delta[0] == layout.JOURNAL):
                self._append(path, offset, piece)
            for path, piece in answer.records:
                self._replace(path, bytes(piece))
            for path in answer.gone:
                self._forget(path)
        if answer.whole:
            self.synced = True
        return bool(answer.resets or answer.deltas or answer.records or answer.gone)

    def record(self, path: str, data: bytes) -> None:
        """Replace a record that the server wrote: the courier has it already."""
        with self._lock:
            self._replace(path, data)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _open(self, identity: dict[str, str]) -> None:
        marker = self._root / _MARKER
        try:
            known = json.loads(marker.read_bytes())
        except (OSError, ValueError):
            known = None
        if known != identity:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root.mkdir(parents=True, mode=0o700)
            formats.write_json(str(marker), identity, mode=0o600)
        for folder in (layout.LOG, layout.METRICS):
            (self._root / folder).mkdir(exist_ok=True, mode=0o700)
        found = [*courier_protocol.GROWING]
        for folder in (layout.LOG, layout.METRICS):
            found += [f"{folder}/{name}" for name in os.listdir(self._root / folder)]
        for path in found:
            if courier_protocol.grows(path):
                self._load(path)

    def _load(self, path: str) -> None:
        """Read the size and the last bytes of a file."""
        self._hold(path, None)
        try:
            fd = os.open(self._root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with Closing(fd):
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode) and info.st_size:
                begin = max(0, info.st_size - courier_protocol.TAIL)
                self._hold(path, _Held(info.st_size, os.pread(fd, courier_protocol.TAIL, begin)))

    def _append(self, path: str, offset: int, piece: memoryview) -> None:
        held = self._held.get(path) or _Held(0, b"")
        if path in self._refused or offset > held.size or offset + len(piece) <= held.size:
            return  # refused, or an answer to an older request, which the next one corrects
        piece = piece[held.size - offset :]
        if not self._has_room(path, held.size, len(piece)):
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._root / path, flags, 0o600)
        try:
            at = held.size
            rest = piece
            while rest:
                count = os.pwrite(fd, rest, at)
                at, rest = at + count, rest[count:]
        except OSError:
            self._load(path)
            raise
        finally:
            os.close(fd)
        tail = held.tail + bytes(piece[-courier_protocol.TAIL :])
        self._hold(path, _Held(at, tail[-courier_protocol.TAIL :]))

    def _hold(self, path: str, held: _Held | None) -> None:
        before = self._held.pop(path, None)
        if held is not None:
            self._held[path] = held
        if path != layout.JOURNAL:
            self._taken += (held.size if held else 0) - (before.size if before else 0)

    def _has_room(self, path: str, size: int, more: int) -> bool:
        full = path != layout.JOURNAL and (
            self._taken + more > self._limit or (path not in self._held and len(self._held) >= MOST_FILES)
        )
        if full or size + more > LARGEST_FILE:
            self._refused.add(path)
            self.problem = f"{path} is not mirrored beyond {size} bytes: it exceeds the limits"
            return False
        return True

    def _truncate(self, path: str) -> None:
        self._hold(path, None)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._root / path, 0)

    def _replace(self, path: str, data: bytes) -> None:
        temporary = self._root / f"{path}.tmp"
        with Closing(formats.create(str(temporary), 0o600)) as fd:
            formats.write_all(fd, data)
        temporary.replace(self._root / path)

    def _forget(self, path: str) -> None:
        self._hold(path, None)
        self._refused.discard(path)
        (self._root / path).unlink(missing_ok=True)


@dataclass
class _SyncAnswer:
    resets: list[str]
    deltas: list[tuple[str, int, memoryview]]
    records: list[tuple[str, memoryview]]
    gone: list[str]
    whole: bool


def _parse(header: Mapping[str, Any], data: memoryview) -> _SyncAnswer:
    resets = courier_protocol.strings(header.get("resets"), MOST_FILES)
    gone = courier_protocol.strings(header.get("gone"), MOST_FILES)
    deltas: list[tuple[str, int, memoryview]] = []
    records: list[tuple[str, memoryview]] = []
    at = 0
    for path, offset, length in _triples(header.get("deltas")):
        size = courier_protocol.number(length, len(data))
        deltas.append(
            (courier_protocol.text(path), courier_protocol.number(offset, LARGEST_FILE), data[at : at + size])
        )
        at += size
    for path, _, length in _triples(header.get("records")):
        size = courier_protocol.number(length, courier_protocol.LARGEST_RECORD)
        records.append((courier_protocol.text(path), data[at : at + size]))
        at += size
    if at != len(data):
        raise Malformed("an answer whose parts are not as long as its bytes")
    growing = [*resets, *(path for path, _, _ in deltas)]
    if not all(courier_protocol.grows(path) for path in growing) or not all(
        path in courier_protocol.RECORDS for path, _ in records
    ):
        raise Malformed("an answer with files that are not mirrored")
    if not all(courier_protocol.grows(path) or path in courier_protocol.RECORDS for path in gone):
        raise Malformed("an answer about files that are not mirrored")
    return _SyncAnswer(resets, deltas, records, gone, header.get("mark") is None)


def _triples(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_FILES:
        raise Malformed("not a list, or too long")
    if not all(isinstance(item, list) and len(item) == 3 for item in value):
        raise Malformed("a list with other entries than triples")
    return value
