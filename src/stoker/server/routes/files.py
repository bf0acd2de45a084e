"""What a run left behind: outputs, checkpoints, logs.

A path is looked up among the names that exist, never joined to a directory; what is sent is an attachment of
unknown type, so that no browser runs it.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from stoker.errors import BlobDamaged, NotFound, SpecError
from stoker.server.answers import JsonAnswer, error
from stoker.server.routes import run_of, services_of
from stoker.server.services import Services
from stoker.spec.tree import check_path
from stoker.store.rows import RunRow

router = APIRouter(prefix="/api/v1/runs/{run}/files")

What = Literal["outputs", "checkpoints", "logs"]
_CHUNK = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True)
class Stored:
    """One file a run left."""

    path: str
    size: int
    sha256: str | None
    where: Path

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


@router.get("")
def files(request: Request, run: str, what: What = "outputs", checkpoint: str | None = None) -> JsonAnswer:
    found = _stored(services_of(request), run_of(request, run), what, checkpoint)
    return JsonAnswer({"files": [file.to_json() for file in found]})


@router.get("/content")
def content(
    request: Request, run: str, path: str, what: What = "outputs", checkpoint: str | None = None
) -> Response:
    try:
        check_path(path)
    except SpecError as exc:
        return error(exc, 400)
    found = {
        file.path: file for file in _stored(services_of(request), run_of(request, run), what, checkpoint)
    }
    file = found.get(path)
    if file is None:
        raise NotFound(f"no file {path[:200]!r} among the {what} of {run!r}")
    try:
        fd = os.open(file.where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as exc:
        raise NotFound(f"the content of {path[:200]!r} is no longer stored") from exc
    return _send(request, file, fd)


def _stored(services: Services, run: RunRow, what: What, checkpoint: str | None) -> list[Stored]:
    if what == "logs":
        return [Stored(name, _size(path), None, path) for name, path in services.archive.files(run.id)]
    digest = _checkpoint(services, run, checkpoint) if what == "checkpoints" else _outputs(run)
    if digest is None:
        return []
    blobs = services.blobs
    return [
        Stored(file.path, file.size, file.sha256, blobs.where(file.sha256))
        for file in blobs.tree(digest).files
        if file.link is None
    ]


def _outputs(run: RunRow) -> str | None:
    return run.outputs.get("digest") if run.outputs else None


def _checkpoint(services: Services, run: RunRow, checkpoint: str | None) -> str:
    """The tree of one checkpoint of this run: another run's is not found, whatever its id."""
    kept = [row for row in services.store.checkpoints(run.id) if row.kept]
    if not checkpoint:
        if not kept:
            raise NotFound(f"{run.id} has no stored checkpoint")
        return kept[-1].digest
    for row in kept:
        if row.id == checkpoint:
            return row.digest
    raise NotFound(
        f"{run.id} has no stored checkpoint {checkpoint[:100]!r}",
        hint=f"It has: {', '.join(row.id for row in kept[-10:])}." if kept else None,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _send(request: Request, file: Stored, fd: int) -> Response:
    size = os.fstat(fd).st_size
    if file.sha256 is not None and size != file.size:
        os.close(fd)
        raise BlobDamaged(f"the stored content of {file.path!r} has {size} bytes instead of {file.size}")
    headers = {"Content-Disposition": disposition(file.path), "Accept-Ranges": "bytes"}
    if file.sha256 is not None:
        headers["ETag"] = f'"{file.sha256}"'
    try:
        start, end, partial = byte_range(request.headers.get("range"), size)
    except ValueError:
        os.close(fd)
        answer = error(SpecError(f"the range is outside the {size} bytes of the file"), 416)
        answer.headers["Content-Range"] = f"bytes */{size}"
        return answer
    headers["Content-Length"] = str(end - start)
    if partial:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(
        _pieces(fd, start, end), 206 if partial else 200, headers, media_type="application/octet-stream"
    )


async def _pieces(fd: int, start: int, end: int) -> AsyncIterator[bytes]:
    try:
        while start < end:
            data = await run_in_threadpool(os.pread, fd, min(_CHUNK, end - start), start)
            if not data:
                return
            start += len(data)
            yield data
    finally:
        os.close(fd)


def byte_range(header: str | None, size: int) -> tuple[int, int, bool]:
    """Start, end (exclusive) and whether it is a part. ValueError when nothing of it is in the file. What is
    not one plain range is answered with the whole, as HTTP allows."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.group() == "bytes=-":
        return 0, size, False
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= end or start >= size:
        raise ValueError(header)
    return start, end, True


def disposition(path: str) -> str:
    """An attachment under the file's own name. Everything but letters and digits is escaped: a name cannot add
    a header, end the quotes or choose a directory."""
    return f"attachment; filename*=UTF-8''{quote(path.rpartition('/')[2], safe='')}"
