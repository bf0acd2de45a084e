"""Uploading the code of runs: what is missing, contents, trees."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator

import anyio.from_thread
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from stoker.blobs import BlobStore
from stoker.errors import BlobDamaged, Conflict, SpecError, TooLarge
from stoker.server.requests import Digests
from stoker.server.responses import JsonAnswer, error
from stoker.server.routes import services_of
from stoker.spec.tree import CODE_BYTES, Tree, check_digest

router = APIRouter(prefix="/api/v1/code")

BLOBS_BODY = CODE_BYTES + (64 << 20)
TREE_BODY = 128 << 20
MAX_BLOBS = 20_000
"""Blobs in one request."""
CAPS = {"/api/v1/code/blobs": BLOBS_BODY, "/api/v1/code/trees": TREE_BODY}
_PULL = 512 << 10
_HEAD = 64 + 1 + 12


@router.post("/missing")
def missing(request: Request, body: Digests) -> JsonAnswer:
    return JsonAnswer({"missing": services_of(request).blobs.missing(body.digests)})


@router.post("/blobs")
async def blobs(request: Request) -> JsonAnswer:
    """One thread reads and writes the body, a piece at a time, so memory stays small whatever is sent."""
    source = _gathered(request)

    async def pull() -> bytes:
        return await anext(source, b"")

    def work() -> int:
        return store_blobs(BodyReader(lambda: anyio.from_thread.run(pull)), services_of(request).blobs)

    try:
        return JsonAnswer({"stored": await run_in_threadpool(work)})
    except BlobDamaged as exc:
        # The sent blob is damaged, not the stored one.
        return error(exc, 422)


@router.post("/trees")
async def trees(request: Request) -> JsonAnswer:
    data = await request.body()
    return JsonAnswer({"digest": await run_in_threadpool(_store_tree, data, services_of(request).blobs)})


class BodyReader:
    """Reads a request's body from within a thread."""

    def __init__(self, pull: Callable[[], bytes]) -> None:
        self._pull = pull
        self._rest = b""

    def line(self) -> bytes:
        """The text up to the next newline, without it; empty at the end of the body."""
        while b"\n" not in self._rest:
            if len(self._rest) > _HEAD:
                raise SpecError("the body is not a sequence of `SHA256 SIZE` lines and contents")
            more = self._pull()
            if not more:
                if self._rest:
                    raise SpecError("the body ends in the middle of a line")
                return b""
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def take(self, size: int) -> Iterator[bytes]:
        """Exactly `size` bytes, or less at the end of the body."""
        while size > 0:
            data = self._rest or self._pull()
            if not data:
                return
            self._rest = data[size:]
            yield data[:size]
            size -= min(size, len(data))


def store_blobs(body: BodyReader, blobs: BlobStore) -> int:
    """Stores every blob of a body after checking it. Returns how many."""
    stored = 0
    while line := body.line():
        digest, size = _head(line)
        if stored >= MAX_BLOBS:
            raise TooLarge(f"more than {MAX_BLOBS} blobs in one request")
        blobs.put_stream(body.take(size), digest=digest, size=size, durable=False)
        stored += 1
    return stored


def _head(line: bytes) -> tuple[str, int]:
    digest, _, size = line.decode("latin-1").partition(" ")
    check_digest(digest)
    if not (size.isascii() and size.isdigit()) or len(size) > 12:
        raise SpecError(f"not a size: {size[:20]!r}")
    if int(size) > CODE_BYTES:
        raise TooLarge(f"a file of {size} bytes is over the cap of {CODE_BYTES}")
    return digest, int(size)


def _store_tree(data: bytes, blobs: BlobStore) -> str:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise SpecError("a tree manifest must be JSON") from exc
    tree = Tree.from_json(raw).validate()
    wanted = tree.blobs()
    missing = blobs.missing(wanted)
    if missing:
        raise Conflict("the tree names blobs that are not here", details={"missing": missing[:10_000]})
    for digest, size in wanted.items():
        if blobs.size(digest) != size:
            raise SpecError(f"the blob {digest} does not have the {size} bytes the tree gives it")
    # A tree promises that its contents are safe: they reach the disk first.
    blobs.sync()
    return blobs.put_tree(tree)


async def _gathered(request: Request) -> AsyncIterator[bytes]:
    """The body in larger pieces: every piece costs a change of threads."""
    gathered = bytearray()
    try:
        async for data in request.stream():
            gathered += data
            if len(gathered) >= _PULL:
                yield bytes(gathered)
                gathered.clear()
    except ClientDisconnect as exc:
        raise SpecError("the client went away in the middle of an upload") from exc
    if gathered:
        yield bytes(gathered)
