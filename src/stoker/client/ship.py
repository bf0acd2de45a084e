"""Sends the working directory: only what the server does not have yet.

A usual submit sends only a digest: `submit_with_code` submits first and uploads when the server answers that the
code is missing. The server hashes what arrives. A file that changed since the scan
starts the scan again. So a run gets the old or the new version of every file, never a mixture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stoker.client.api import Client
from stoker.client.tree import Changed, Scan, scan
from stoker.errors import BlobDamaged, Conflict, Refused
from stoker.linux.descriptors import Closing
from stoker.spec.folder_extras import FolderExtras

BATCH = 64 << 20
"""Bytes per request: a broken connection repeats at most this much."""
ASK = 10_000
"""Digests per request."""
_CHUNK = 1 << 20
_TRIES = 3


class Progress(Protocol):
    """Receives the progress of an upload; the command line shows it."""

    def __call__(self, sent: int, total: int) -> None:
        """`sent` of `total` bytes."""
        ...


def ship(client: Client, workdir: Path, cache: Path, progress: Progress | None = None) -> str:
    """Uploads the working directory in its present state and returns the digest of its tree."""
    return _ship(client, workdir, cache, progress)[0]


def _ship(client: Client, workdir: Path, cache: Path, progress: Progress | None) -> tuple[str, FolderExtras]:
    changed = ""
    for _ in range(_TRIES):
        seen = scan(workdir, cache)
        try:
            return upload(client, seen, progress), seen.extras
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
    send: Callable[[str, FolderExtras], dict[str, Any]],
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """`send(digest, extras)` submits. When the server does not have the code, uploads it and sends again."""
    seen = scan(workdir, cache)
    for text in seen.warnings:
        if warn is not None:
            warn(text)
    try:
        return send(seen.digest, seen.extras)
    except Conflict as exc:
        if exc.details.get("missing") != "code":
            raise
    try:
        return send(upload(client, seen, progress), seen.extras)
    except Changed:
        return send(*_ship(client, workdir, cache, progress))


def upload(client: Client, seen: Scan, progress: Progress | None = None) -> str:
    """Uploads what is missing of a scanned tree. Raises Changed when the directory differs from the scan."""
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
    """The body of one upload. Small files are joined, so that thousands of them are not thousands of packets."""
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
    """The bytes of one file, which must not change meanwhile. The server hashes again and refuses what this check
    misses."""
    with Closing(seen.open(digest)) as fd:
        left = size
        while left:
            data = os.read(fd, min(left, _CHUNK))
            left -= len(data)
            if not data or (not left and not seen.same(digest, fd)):
                raise Changed(seen.sources[digest])
            yield data
