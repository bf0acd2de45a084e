"""Finds a few small files in a tar stream with constant memory, whatever the archive claims.

Made for untrusted layers: nothing is unpacked, extension headers are skipped unread, and names are only compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.errors import ImageError

_BLOCK = 512
_FILES = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_EXTENSIONS = (b"x", b"g", b"L", b"K")


@dataclass(frozen=True)
class TarMember:
    name: str
    """Without a leading `./` or `/`."""
    text: str = ""
    """Content of a wanted file."""


def members(stream: Iterator[bytes], wanted: set[str], largest: int) -> Iterator[TarMember]:
    """Every member with an ordinary name. Content only of wanted regular files of at most `largest` bytes."""
    source = _Source(stream)
    while header := source.header():
        name, size, kind = _name(header), _number(header[124:136]), header[156:157]
        padded = -(-size // _BLOCK) * _BLOCK
        if name in wanted and kind in _FILES:
            if size > largest:
                raise ImageError(f"{name} of the image has {size} bytes, more than {largest}")
            yield TarMember(name, source.read(padded)[:size].decode(errors="replace"))
            continue
        source.skip(0 if kind in _WITHOUT_DATA else padded)
        if kind not in _EXTENSIONS:
            yield TarMember(name)


class _Source:
    def __init__(self, stream: Iterator[bytes]) -> None:
        self._stream = (data for data in stream if data)
        self._have = b""

    def header(self) -> bytes | None:
        """The next header; None at the end of the archive."""
        data = self._some(_BLOCK)
        if len(data) < _BLOCK or not data.strip(b"\0"):
            return None
        if _number(data[148:156]) != sum(data[:148]) + sum(data[156:]) + 8 * 32:
            raise ImageError("a layer of the image is not a tar archive")
        return data

    def read(self, size: int) -> bytes:
        data = self._some(size)
        if len(data) < size:
            raise ImageError("a layer of the image ends in the middle of a file")
        return data

    def skip(self, size: int) -> None:
        while size > len(self._have):
            size -= len(self._have)
            self._have = next(self._stream, b"")
            if not self._have:
                raise ImageError("a layer of the image ends in the middle of a file")
        self._have = self._have[size:]

    def _some(self, size: int) -> bytes:
        pieces, length = [self._have], len(self._have)
        while length < size:
            data = next(self._stream, None)
            if data is None:
                break
            pieces.append(data)
            length += len(data)
        whole = b"".join(pieces)
        self._have = whole[size:]
        return whole[:size]


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:262] == b"ustar" and header[262:263] == b"\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    text = name.decode(errors="replace")
    while text.startswith(("./", "/")):
        text = text.partition("/")[2]
    return text.rstrip("/")


def _number(field: bytes) -> int:
    """Octal digits, or base 256 for larger numbers."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        raise ImageError("a layer of the image is not a tar archive") from None
