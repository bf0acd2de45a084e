"""Sending the working directory: only what the server does not have yet.

The usual submit sends nothing but a digest: `submit_with_code` tries first and uploads only when the server
answers that the code is missing. The server hashes what arrives; a file that changed since the scan makes the
scan start over, so that a run gets either the old or the new version of every file, never a mixture of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stoker.client.api import Client
from stoker.client.tree import Changed, Scan, scan
from stoker.errors import BlobDamaged, Conflict, Refused

BATCH = 64 << 20
"""Bytes per request: a broken connection costs at most this much sending again."""
ASK = 10_000
"""Digests per question."""
_CHUNK = 1 << 20
_TRIES = 3


class Progress(Protocol):
    """Told what is happening; the command line draws it."""

    def __call__(self, sent: int, total: int) -> None:
        """Bytes sent so far, of how many."""
        ...


def ship(client: Client, workdir: Path, cache: Path, progress: Progress | None = None) -> str:
    """Make the server have the working directory as it is now; the digest of its tree."""
    changed = ""
    for _ in range(_TRIES):
        seen = scan(workdir, cache)
        try:
            return upload(client, seen, progress)
        except Changed as exc:
            changed = str(exc)
    raise Refused(
        f"{changed!r} keeps changing while it is sent",
        hint="Wait until it is written, or add it to .stokerignore.",
    )


def submit_with_code(
    client: Client,
    workdir: Path,
    cache: Path,
    send: Callable[[str], dict[str, Any]],
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """`send(digest)` submits; when the server does not know the code, it is uploaded and sent again."""
    seen = scan(workdir, cache)
    for text in seen.warnings:
        if warn is not None:
            warn(text)
    try:
        return send(seen.tree.digest())
    except Conflict as exc:
        if exc.details.get("missing") != "code":
            raise
    try:
        digest = upload(client, seen, progress)
    except Changed:
        digest = ship(client, workdir, cache, progress)
    return send(digest)


def upload(client: Client, seen: Scan, progress: Progress | None = None) -> str:
    """Send what is missing of a scanned tree. Raises Changed when the directory is no longer what was scanned."""
    wanted = seen.tree.blobs()
    digests = list(wanted)
    missing: list[str] = []
    for start in range(0, len(digests), ASK):
        missing += client.code_missing(digests[start : start + ASK])["missing"]
    total = sum(wanted[digest] for digest in missing)
    sent = 0
    try:
        for batch in _batches(missing, wanted):
            client.code_blobs(_body(batch, seen, wanted))
            sent += sum(wanted[digest] for digest in batch)
            if progress is not None:
                progress(sent, total)
    except BlobDamaged as exc:
        raise Changed("a file") from exc
    return str(client.code_tree(seen.tree.canonical())["digest"])


def _batches(digests: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for digest in digests:
        if batch and (size + sizes[digest] > BATCH or len(batch) >= ASK):
            yield batch
            batch, size = [], 0
        batch.append(digest)
        size += sizes[digest]
    if batch:
        yield batch


def _body(batch: Sequence[str], seen: Scan, sizes: Mapping[str, int]) -> Iterator[bytes]:
    """Small files are gathered, so that thousands of them do not become thousands of packets."""
    gathered = bytearray()
    for digest in batch:
        gathered += b"%s %d\n" % (digest.encode(), sizes[digest])
        for data in _content(digest, sizes[digest], seen):
            gathered += data
            if len(gathered) >= _CHUNK:
                yield bytes(gathered)
                gathered.clear()
    yield bytes(gathered)


def _content(digest: str, size: int, seen: Scan) -> Iterator[bytes]:
    """The bytes of one file, which must be the same file before and after. The server takes the hash again, so
    what slips through here is refused there."""
    fd = seen.open(digest)
    try:
        left = size
        while left:
            data = os.read(fd, min(left, _CHUNK))
            left -= len(data)
            if not data or (not left and not seen.same(digest, fd)):
                raise Changed(seen.sources[digest])
            yield data
    finally:
        os.close(fd)
