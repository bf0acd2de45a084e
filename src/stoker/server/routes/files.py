"""What a run left behind: outputs, files of its working folder, checkpoints, logs.

A path is looked up among the existing names, never joined to a directory. Files are sent as attachments of unknown
type, so that no browser executes them.
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

from stoker.blobs import Listing
from stoker.errors import BlobDamaged, NotFound, SpecError, TooLarge
from stoker.linux.descriptors import Closing
from stoker.server.requests import Digests
from stoker.server.responses import JsonAnswer, error
from stoker.server.routes import run_of, services_of
from stoker.server.services import Services
from stoker.spec import refusals
from stoker.spec.tree import check_path
from stoker.store.rows import RunRow

router = APIRouter(prefix="/api/v1/runs/{run}/files")

What = Literal["outputs", "files", "checkpoints", "logs"]
_CHUNK = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


CONTENTS_BYTES = 256 << 20
"""Bytes of one answer with many files. A client that needs more sends more requests."""


@dataclass(frozen=True)
class Stored:
    """One file of a run."""

    path: str
    size: int
    sha256: str | None
    where: Path


@router.get("")
def files(request: Request, run: str, what: What = "outputs", checkpoint: str | None = None) -> JsonAnswer:
    services, row = services_of(request), run_of(request, run)
    if what == "logs":
        return JsonAnswer(
            {"files": [_shown(name, _size(path), None) for name, path in services.archive.files(row.id)]}
        )
    listing = _listing(services, row, what, checkpoint)
    found = listing.files.values() if listing else ()
    return JsonAnswer({"files": [_shown(file.path, file.size, file.sha256) for file in found]})


@router.get("/content")
def content(
    request: Request, run: str, path: str, what: What = "outputs", checkpoint: str | None = None
) -> Response:
    try:
        check_path(path)
    except SpecError as exc:
        return error(exc, 400)
    file = _stored(services_of(request), run_of(request, run), what, checkpoint, path)
    if file is None:
        raise NotFound(f"no file {path[:200]!r} among the {what} of {run!r}")
    try:
        fd = os.open(file.where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as exc:
        raise NotFound(f"the content of {path[:200]!r} is no longer stored") from exc
    return _send(request, file, fd)


@router.post("/contents")
def contents(
    request: Request, run: str, body: Digests, what: What = "outputs", checkpoint: str | None = None
) -> Response:
    """Many files in one answer, each named by its hash. A hash that is not among this run's files is reported as
    missing, even if another run has it."""
    services, row = services_of(request), run_of(request, run)
    listing = _listing(services, row, what, checkpoint)
    sizes = listing.sizes if listing else {}
    wanted = [(digest, sizes.get(digest)) for digest in dict.fromkeys(body.digests)]
    total = sum(size or 0 for _, size in wanted)
    if total > CONTENTS_BYTES:
        raise TooLarge(
            f"the requested files hold {total} bytes, over the cap of {CONTENTS_BYTES} for one answer",
            hint="Ask for fewer at a time.",
        )
    return StreamingResponse(
        services.blobs.framed(wanted),
        headers={"Content-Disposition": "attachment"},
        media_type="application/octet-stream",
    )


def _shown(path: str, size: int, sha256: str | None) -> dict[str, Any]:
    return {"path": path, "size": size, "sha256": sha256}


def _stored(services: Services, run: RunRow, what: What, checkpoint: str | None, path: str) -> Stored | None:
    if what == "logs":
        where = services.archive.file(run.id, path)
        return Stored(path, _size(where), None, where) if where else None
    listing = _listing(services, run, what, checkpoint)
    file = listing.files.get(path) if listing else None
    return Stored(path, file.size, file.sha256, services.blobs.where(file.sha256)) if file else None


def _listing(services: Services, run: RunRow, what: What, checkpoint: str | None) -> Listing | None:
    """The requested tree; None for logs, and for outputs and files of a run without any."""
    if what == "logs":
        return None
    if what == "checkpoints":
        return services.listings.get(_checkpoint(services, run, checkpoint))
    kept = run.outputs if what == "outputs" else run.folder
    return services.listings.get(kept["digest"]) if kept and kept.get("digest") else None


def _checkpoint(services: Services, run: RunRow, checkpoint: str | None) -> str:
    """The tree of one checkpoint of this run. Another run's checkpoint is not found, whatever its id."""
    kept = [row for row in services.store.checkpoints(run.id) if row.kept]
    if not checkpoint:
        if not kept:
            refused = refusals.read(run.warnings)
            reason = f": {refused.summary}" if refused.summary else ""
            raise NotFound(
                f"{run.id} has no stored checkpoint{reason}", hint=refused.hint if refused.summary else None
            )
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
    with Closing(fd):
        while start < end:
            data = await run_in_threadpool(os.pread, fd, min(_CHUNK, end - start), start)
            if not data:
                return
            start += len(data)
            yield data


def byte_range(header: str | None, size: int) -> tuple[int, int, bool]:
    """Start, end (exclusive) and whether it is a part. Raises ValueError for a range outside the file. Anything but
    one plain range is answered with the whole file, as HTTP allows."""
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
    """An attachment under the file's own name. Everything but letters and digits is escaped, so that a name cannot add
    a header, end the quotes or choose a directory."""
    return f"attachment; filename*=UTF-8''{quote(path.rpartition('/')[2], safe='')}"
