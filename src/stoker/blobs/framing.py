"""Many blobs as one stream: for each a line `SHA256 SIZE` and that many bytes.

A blob that cannot be sent has a word in place of the size; the others follow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from stoker.blobs.files import CHUNK
from stoker.blobs.place import OpenBlob
from stoker.errors import BlobDamaged, NotFound
from stoker.linux.descriptors import Closing

MISSING = "missing"
DAMAGED = "damaged"
"""It is stored with another size. The receiver checks the hashes."""


def framed(wanted: Iterable[tuple[str, int | None]], open_blob: OpenBlob) -> Iterator[bytes]:
    """Yields pieces of about CHUNK. `wanted`: digests with their sizes; None: not available. One blob is open at a
    time. Raises BlobDamaged where a blob becomes shorter while it is read: the stream cannot continue then."""
    gathered = bytearray()
    for digest, size in wanted:
        for piece in _frame(digest, size, open_blob):
            gathered += piece
            if len(gathered) >= CHUNK:
                yield bytes(gathered)
                gathered.clear()
    if gathered:
        yield bytes(gathered)


def _frame(digest: str, size: int | None, open_blob: OpenBlob) -> Iterator[bytes]:
    if size is None:
        yield _word(digest, MISSING)
        return
    try:
        fd = open_blob(digest)
    except NotFound:
        yield _word(digest, MISSING)
        return
    with Closing(fd):
        if os.fstat(fd).st_size != size:
            yield _word(digest, DAMAGED)
            return
        yield _word(digest, str(size))
        done = 0
        while done < size:
            data = os.pread(fd, min(CHUNK, size - done), done)
            if not data:
                raise BlobDamaged(f"the blob {digest} became shorter while it was read")
            done += len(data)
            yield data


def _word(digest: str, word: str) -> bytes:
    return f"{digest} {word}\n".encode("ascii")
