"""Upload of a tree to a courier: only the content it lacks, in ranges, several small contents together."""

from __future__ import annotations

import hashlib
import io
import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from stoker.engine.kubernetes.courier_client.blocking_calls import BlockingCalls, Pauses, Pending
from stoker.engine.kubernetes.courier_client.client import CourierLost, Incomplete
from stoker.errors import BlobDamaged
from stoker.task import courier_protocol

AT_ONCE = 2
"""Messages in flight: one is read and signed here while the courier verifies another."""
DIGESTS = 5000
"""The most contents that one message asks about or sends."""
TRIES = 3

Batch = tuple[list[list[Any]], bytes]
"""Pieces as the courier expects them (digest, size, offset, length), and their bytes."""


class Uploader:
    """The upload of one tree to one path. Used once, in one thread."""

    def __init__(
        self,
        calls: BlockingCalls,
        manifest: bytes,
        path: str,
        blob: Callable[[str], BinaryIO],
        *,
        replace: bool,
    ) -> None:
        self._calls = calls
        self._manifest = manifest
        self._name = hashlib.sha256(manifest).hexdigest()
        self._target = {"path": path, "manifest": self._name, "replace": replace}
        self._blob = blob
        self._pauses = Pauses(calls.patience)

    def run(self) -> None:
        """Raises CourierLost when there is no more progress, BlobDamaged when content does not match its hash, and
        the courier's own errors (OSError)."""
        contents = _contents(self._manifest)
        contents[self._name] = len(self._manifest)
        tries = 0
        while True:
            try:
                missing = self._missing(contents)
                if missing is None:
                    return
                self._send(missing)
                self._calls.job(courier_protocol.PLACE, self._target)
                return
            except Incomplete as exc:
                tries += 1
                if tries >= TRIES:
                    raise BlobDamaged(f"{self._target['path']} cannot be assembled: {exc}") from exc
            except CourierLost:
                if not self._pauses.pause():
                    raise

    def _missing(self, contents: dict[str, int]) -> dict[str, tuple[int, int]] | None:
        """digest -> size, and how much of it the courier has. None: the tree is already in place."""
        names = list(contents)
        missing: dict[str, tuple[int, int]] = {}
        for at in range(0, len(names), DIGESTS):
            asked = names[at : at + DIGESTS]
            answer, _ = self._calls.call(courier_protocol.MISSING, {**self._target, "digests": asked})
            if answer.get("settled") is True:
                return None
            complete, begun = answer.get("complete"), answer.get("begun")
            if not isinstance(complete, list) or not isinstance(begun, dict):
                raise CourierLost("it does not list what it has")
            there = set(map(str, complete))
            for name in asked:
                if name not in there:
                    known = begun.get(name, 0)
                    begin = min(known, contents[name]) if type(known) is int and known > 0 else 0
                    missing[name] = contents[name], begin
        return missing

    def _send(self, missing: dict[str, tuple[int, int]]) -> None:
        on_their_way: deque[Pending] = deque()
        unverified: dict[str, int] = {}
        try:
            for pieces, data in self._batches(missing):
                if len(on_their_way) >= AT_ONCE:
                    self._arrived(on_their_way.popleft(), missing, unverified)
                on_their_way.append(
                    self._calls.start(courier_protocol.BLOB, {**self._target, "pieces": pieces}, data)
                )
            while on_their_way:
                self._arrived(on_their_way.popleft(), missing, unverified)
        finally:
            for pending in on_their_way:
                pending.cancel()
        for name, size in unverified.items():
            self._calls.job(courier_protocol.BLOB, {**self._target, "verify": name, "size": size})
            self._pauses.progress()

    def _arrived(
        self, pending: Pending, missing: dict[str, tuple[int, int]], unverified: dict[str, int]
    ) -> None:
        answer, _ = pending.result()
        self._pauses.progress()
        begun = answer.get("begun")
        for name, size in (begun if isinstance(begun, dict) else {}).items():
            if name in missing and size == missing[name][0]:
                unverified[name] = missing[name][0]

    def _batches(self, missing: dict[str, tuple[int, int]]) -> Iterator[Batch]:
        pieces: list[list[Any]] = []
        gathered: list[bytes] = []
        room = courier_protocol.RANGE
        for name, (size, begun) in missing.items():
            for offset, data in self._ranges(name, size, begun):
                if pieces and (len(data) > room or len(pieces) >= DIGESTS):
                    yield pieces, b"".join(gathered)
                    pieces, gathered, room = [], [], courier_protocol.RANGE
                pieces.append([name, size, offset, len(data)])
                gathered.append(data)
                room -= len(data)
        if pieces:
            yield pieces, b"".join(gathered) if len(gathered) > 1 else gathered[0]

    def _ranges(self, name: str, size: int, begun: int) -> Iterator[tuple[int, bytes]]:
        """Content from the offset up to which the courier has it; at least one range, even if empty."""
        source = io.BytesIO(self._manifest) if name == self._name else self._blob(name)
        with source:
            source.seek(begun)
            offset = begun
            while True:
                data = source.read(min(courier_protocol.RANGE, size - offset))
                if not data and offset < size:
                    raise BlobDamaged(f"the stored content {name} has {offset} bytes instead of {size}")
                yield offset, data
                offset += len(data)
                if offset >= size:
                    return


def _contents(manifest: bytes) -> dict[str, int]:
    """The contents of a tree: digest -> size."""
    return {entry["sha256"]: entry["size"] for entry in json.loads(manifest)["files"] if "link" not in entry}
