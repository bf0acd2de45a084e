"""The user and group ids behind the name in an image's USER.

Kubernetes refuses `USER app` where it must prove that the user is not root: it needs a numeric id. The id is in the
image's /etc/passwd, so the layers are read from the top until one contains that file. Each layer that is used is read
to its end, and its digest is verified.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from stoker.errors import ImageError
from stoker.images.manifest import Blob, ImageConfig
from stoker.images.reference import Reference
from stoker.images.session import RepositoryRequest, Session, check
from stoker.images.tarscan import TarMember, members

BUDGET: Final = 1 << 30
"""Compressed bytes read at most for one image."""
_LARGEST_LAYER = 16 << 30
"""Uncompressed bytes of one layer."""
_LARGEST_FILE = 4 << 20
_PASSWD, _GROUP = "etc/passwd", "etc/group"


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int | None
    """None: the image does not say; then it is the user's own group, or root's."""


@dataclass
class _Search:
    """The files found so far, from the top layer down."""

    wanted: set[str]
    found: dict[str, str] = field(default_factory=dict)

    def see(self, member: TarMember) -> None:
        if member.name in self.wanted:
            self.found[member.name] = member.text
        elif (hidden := _hidden_by(member.name)) is not None:
            for name in self.wanted:
                if name == hidden or name.startswith(hidden + "/"):
                    self.found.setdefault(name, "")

    def done(self) -> bool:
        return self.wanted <= set(self.found)


def find(session: Session, config: ImageConfig) -> Account:
    """Raises ImageError where the ids cannot be found."""
    user, _, group = config.user.partition(":")
    if _is_number(user or "0") and _is_number(group or "0"):
        return Account(int(user or "0"), int(group) if group else (None if user else 0))
    wanted = {_PASSWD} if not _is_number(user or "0") else set()
    wanted |= {_GROUP} if group and not _is_number(group) else set()
    found = _read_files(session, config, wanted)
    uid, gid = (int(user or "0"), None) if _PASSWD not in wanted else _user(found[_PASSWD], user, config)
    if group:
        gid = int(group) if _is_number(group) else _group(found[_GROUP], group, config)
    return Account(uid, gid)


def _read_files(session: Session, config: ImageConfig, wanted: set[str]) -> dict[str, str]:
    search, left = _Search(wanted), BUDGET
    reference = Reference.parse(config.reference)
    for layer in reversed(config.layers):
        if search.done():
            break
        left -= layer.size
        if left < 0:
            raise _unknown(config, f"its layers are larger than {BUDGET >> 20} MiB, the limit for this")
        fresh = _Search(wanted - set(search.found))
        for member in _layer(session, reference, layer, fresh.wanted):
            fresh.see(member)
        search.found.update(fresh.found)
    return {name: search.found.get(name, "") for name in wanted}


def _layer(session: Session, reference: Reference, layer: Blob, wanted: set[str]) -> Iterator[TarMember]:
    with session.open(RepositoryRequest(reference, "GET", f"blobs/{layer.digest}")) as answer:
        check(answer, reference, 200)
        raw = _Hashed(answer.pieces(), layer)
        yield from members(_inflated(raw.pieces(), layer), wanted, _LARGEST_FILE)
        raw.finish()


class _Hashed:
    """Passes on the bytes of a layer while counting and hashing them."""

    def __init__(self, source: Iterator[bytes], layer: Blob) -> None:
        self._source = source
        self._layer = layer
        self._left = layer.size
        self._hash = hashlib.new(layer.digest.partition(":")[0])

    def pieces(self) -> Iterator[bytes]:
        for data in self._source:
            self._left -= len(data)
            if self._left < 0:
                raise ImageError(f"layer {self._layer.digest} is longer than its manifest says")
            self._hash.update(data)
            yield data

    def finish(self) -> None:
        for _ in self.pieces():
            pass
        if self._left or self._hash.hexdigest() != self._layer.digest.partition(":")[2]:
            raise ImageError(
                f"layer {self._layer.digest} does not have this digest",
                hint="The registry, or a proxy before it, is damaged. Nothing of this layer was used.",
            )


def _inflated(pieces: Iterator[bytes], layer: Blob) -> Iterator[bytes]:
    """A layer's tar stream. Gzip layers may have several members, as made by pigz and stargz."""
    first = next(pieces, b"")
    if first.startswith(b"\x28\xb5\x2f\xfd"):
        raise ImageError(
            f"layer {layer.digest} is compressed with zstd, which cannot be read here",
            hint="Give the image a numeric USER.",
        )
    count, packed = 0, first.startswith(b"\x1f\x8b")
    stream = zlib.decompressobj(31)
    for data in _chain(first, pieces):
        rest = data
        while rest:
            if not packed:
                out, rest = rest, b""
            else:
                if stream.eof:
                    stream = zlib.decompressobj(31)
                try:
                    out = stream.decompress(rest, 1 << 20)
                except zlib.error as exc:
                    raise ImageError(f"layer {layer.digest} is damaged: {exc}") from exc
                rest = stream.unconsumed_tail or stream.unused_data
            count += len(out)
            if count > _LARGEST_LAYER:
                raise ImageError(f"layer {layer.digest} unpacks to more than {_LARGEST_LAYER >> 30} GiB")
            yield out


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _hidden_by(name: str) -> str | None:
    """The path that a whiteout removes from the layers below."""
    folder, _, base = name.rpartition("/")
    if base == ".wh..wh..opq":
        return folder
    if base.startswith(".wh."):
        return f"{folder}/{base[4:]}".lstrip("/")
    return None


def _user(passwd: str, name: str, config: ImageConfig) -> tuple[int, int]:
    for line in passwd.splitlines():
        parts = line.split(":")
        if len(parts) >= 4 and parts[0] == name and _is_number(parts[2]) and _is_number(parts[3]):
            return int(parts[2]), int(parts[3])
    raise _unknown(config, f"its /etc/passwd has no {name!r}")


def _group(group: str, name: str, config: ImageConfig) -> int:
    for line in group.splitlines():
        parts = line.split(":")
        if len(parts) >= 3 and parts[0] == name and _is_number(parts[2]):
            return int(parts[2])
    raise _unknown(config, f"its /etc/group has no {name!r}")


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,10}", text)) and int(text) < 1 << 32


def _unknown(config: ImageConfig, why: str) -> ImageError:
    return ImageError(
        f"{config.reference} runs as {config.user!r}, whose numeric id is not known: {why}",
        hint="Give the image a numeric USER, as in `USER 1000`.",
        details={"user": config.user},
    )
