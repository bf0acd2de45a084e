"""Pushes an image: the blobs that are missing, then the manifest that makes them an image."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import replace

from stoker.errors import ImageError, RegistryDenied, RegistryUnreachable
from stoker.images.build import Image
from stoker.images.connection import FileBody, Origin, joined
from stoker.images.manifest import OCI_MANIFEST
from stoker.images.reference import Reference
from stoker.images.session import RepositoryRequest, Session, check
from stoker.images.wire import Answer

CHUNK = 256 << 20
"""Bytes per request. Larger layers are sent in several: proxies in front of registries limit the size."""
_PAUSES = (0.5, 2.0)
_PUSH = "pull,push"


def push(session: Session, image: Image, reference: Reference, mount_from: Sequence[str]) -> Reference:
    if reference.digest and reference.digest != image.digest:
        raise ImageError(f"{reference} names another image than the one to be pushed, {image.digest}")
    for layer in image.layers:
        _send(session, reference, layer.digest, FileBody(layer.path, 0, layer.size), mount_from)
    blob = image.config_blob
    _send(session, reference, blob.digest, image.config, ())
    ask = RepositoryRequest(
        reference,
        "PUT",
        f"manifests/{reference.tag or image.digest}",
        _PUSH,
        {"Content-Type": OCI_MANIFEST},
        image.manifest,
    )
    with session.open(ask) as answer:
        check(answer, reference, 201)
    return replace(reference, digest=image.digest)


def _send(
    session: Session, reference: Reference, digest: str, body: bytes | FileBody, mount_from: Sequence[str]
) -> None:
    """Sends one blob; from its start again when the connection breaks."""
    if _has(session, reference, digest, _PUSH):
        return
    source = next((one for one in mount_from if _readable(session, reference, digest, one)), "")
    for pause in (*_PAUSES, None):
        try:
            where = _start(session, reference, digest, source)
            if where:
                _upload(session, reference, digest, body, where)
        except ImageError as exc:
            passing = isinstance(exc, RegistryUnreachable) or exc.details.get("status", 0) >= 500
            if pause is None or not passing:
                raise
            time.sleep(pause)
        else:
            return


def _has(session: Session, reference: Reference, digest: str, actions: str) -> bool:
    with session.open(RepositoryRequest(reference, "HEAD", f"blobs/{digest}", actions)) as answer:
        check(answer, reference, 200, 404)
        return answer.status == 200


def _readable(session: Session, reference: Reference, digest: str, path: str) -> bool:
    """Whether another repository has the blob and this login may read it."""
    try:
        return path != reference.path and _has(session, replace(reference, path=path), digest, "pull")
    except RegistryDenied:
        return False


def _start(session: Session, reference: Reference, digest: str, source: str) -> str | None:
    """The upload URL; None when the registry could take the blob from `source`."""
    query = f"?{urllib.parse.urlencode({'mount': digest, 'from': source})}" if source else ""
    ask = RepositoryRequest(
        reference, "POST", f"blobs/uploads/{query}", _PUSH, {"Content-Length": "0"}, source=source
    )
    with session.open(ask) as answer:
        check(answer, reference, *((201, 202) if source else (202,)))
        return None if answer.status == 201 else _location(session, reference, answer)


def _upload(session: Session, reference: Reference, digest: str, body: bytes | FileBody, where: str) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    last = body
    if isinstance(body, FileBody) and body.size > CHUNK:
        start = 0
        while body.size - start > CHUNK:
            where = _patch(session, reference, where, FileBody(body.path, start, CHUNK), headers)
            start += CHUNK
        last = FileBody(body.path, start, body.size - start)
    url = f"{where}{'&' if '?' in where else '?'}{urllib.parse.urlencode({'digest': digest})}"
    with session.open(RepositoryRequest(reference, "PUT", url, _PUSH, headers, last)) as answer:
        check(answer, reference, 201)


def _patch(
    session: Session, reference: Reference, where: str, part: FileBody, headers: dict[str, str]
) -> str:
    range_ = {**headers, "Content-Range": f"{part.offset}-{part.offset + part.size - 1}"}
    with session.open(RepositoryRequest(reference, "PATCH", where, _PUSH, range_, part)) as answer:
        check(answer, reference, 202)
        return _location(session, reference, answer)


def _location(session: Session, reference: Reference, answer: Answer) -> str:
    """The URL to continue with. A registry behind a TLS proxy may name itself with http, which is corrected."""
    base = session.base(reference)
    where = joined(answer.url, answer.headers.get("location", ""))
    home, there = Origin.of(base), Origin.of(where)
    if home.scheme == "https" and there == Origin("http", home.host, 80):
        where = base + where[where.index("/", len("http://")) :]
    return where
