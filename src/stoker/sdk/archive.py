"""The archive format of torch: zip files without compression. Their layout is known before their content.

`torch.save` writes one with a record per storage. The position of each record depends only on the sizes. So the layout can
be decided first, and the bytes can be written by a process that does not import torch.

>>> import io
>>> file = io.BytesIO()
>>> records = [("archive/data.pkl", 0, 3), ("archive/data/0", 64, 5)]
>>> write(file, records, memoryview(b"abc" + bytes(61) + b"fghij")) == size(records) == len(file.getvalue())
True
>>> import zipfile
>>> zipfile.ZipFile(file).read("archive/data/0")
b'fghij'
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, List, Protocol, Sequence, Tuple

Record = Tuple[str, int, int]
"""Name in the archive, and where its bytes are in the memory: offset and size."""


class Sink(Protocol):
    """A file whose `write` always writes everything."""

    def write(self, data: Any, /) -> int: ...


ALIGNMENT = 64
"""Alignment of the bytes of a record, as in torch's own archives, so that they can be mapped."""
_CHUNK = 4 << 20
_LARGE = 0xFFFFFFFF
_LOCAL = struct.Struct("<4sHHHHHLLLHH")
_CENTRAL = struct.Struct("<4sBBHHHHHLLLHHHHHLL")
_END = struct.Struct("<4sHHHHLLH")
_END64 = struct.Struct("<4sQHHLLQQQQ")
_LOCATOR = struct.Struct("<4sLQL")
_DATE = 0x21
"""1980-01-01, the earliest date in a zip: the same state gives the same bytes."""


def size(records: Sequence[Record]) -> int:
    """Size of the archive that `write` makes of these records."""
    at = 0
    central = 0
    for name, _, length in records:
        central += len(_entry(name, length, 0, at))
        at += len(_header(name, length, 0, at)) + length
    return at + central + len(_tail(len(records), central, at))


def write(file: Sink, records: Sequence[Record], memory: memoryview) -> int:
    """Write an archive sequentially; returns its size."""
    at = 0
    central: List[bytes] = []
    for name, offset, length in records:
        # The checksum stands before the bytes. Reading them twice is cheaper than seeking back to write it.
        crc = checksum(memory, offset, length)
        header = _header(name, length, crc, at)
        file.write(header)
        copy(file, memory, offset, length)
        central.append(_entry(name, length, crc, at))
        at += len(header) + length
    directory = b"".join(central)
    tail = _tail(len(records), len(directory), at)
    file.write(directory + tail)
    return at + len(directory) + len(tail)


def checksum(memory: memoryview, offset: int, length: int) -> int:
    """The CRC-32 of a range of the memory."""
    crc = 0
    for begin in range(offset, offset + length, _CHUNK):
        crc = zlib.crc32(memory[begin : min(begin + _CHUNK, offset + length)], crc)
    return crc


def copy(file: Sink, memory: memoryview, offset: int, length: int) -> None:
    """Write a range of the memory."""
    for begin in range(offset, offset + length, _CHUNK):
        file.write(memory[begin : min(begin + _CHUNK, offset + length)])


def _header(name: str, length: int, crc: int, at: int) -> bytes:
    encoded = name.encode()
    wide = struct.pack("<HHQQ", 1, 16, length, length) if length >= _LARGE else b""
    shown = _LARGE if wide else length
    taken = at + _LOCAL.size + len(encoded) + len(wide) + 4
    padding = -taken % ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    fixed = _LOCAL.pack(
        b"PK\3\4", 45 if wide else 20, 0x800, 0, 0, _DATE, crc, shown, shown, len(encoded), len(extra)
    )
    return fixed + encoded + extra


def _entry(name: str, length: int, crc: int, at: int) -> bytes:
    encoded = name.encode()
    wide = b""
    if length >= _LARGE:
        wide += struct.pack("<QQ", length, length)
    if at >= _LARGE:
        wide += struct.pack("<Q", at)
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    shown = min(length, _LARGE)
    version = 45 if wide else 20
    fixed = _CENTRAL.pack(
        b"PK\1\2", version, 0, version, 0x800, 0, 0, _DATE, crc, shown, shown,
        len(encoded), len(extra), 0, 0, 0, 0, min(at, _LARGE),
    )  # fmt: skip
    return fixed + encoded + extra


def _tail(count: int, length: int, at: int) -> bytes:
    wide = b""
    if count >= 0xFFFF or length >= _LARGE or at >= _LARGE:
        wide = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, length, at)
        wide += _LOCATOR.pack(b"PK\6\7", 0, at + length, 1)
    few = min(count, 0xFFFF)
    return wide + _END.pack(b"PK\5\6", 0, 0, few, few, min(length, _LARGE), min(at, _LARGE), 0)
