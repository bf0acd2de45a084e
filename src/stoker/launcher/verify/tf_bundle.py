"""Checks TensorFlow's checkpoint bundle: an `.index` table of tensors and `.data-*` shards with their bytes.

The index is written last and lists for each tensor its shard, offset, size and CRC-32C. So a complete index proves whether the
shards are complete.
"""

from __future__ import annotations

import os
import struct
from typing import Dict, Iterator, List, Optional, Tuple

from stoker.launcher.verify.verdict import Verdict

_FOOTER_MAGIC = 0xDB4775248B80FB57
_MAX_INDEX = 64 << 20
_MAX_SUMMED = 2 << 20
"""Largest shard for which CRC-32C is computed: without a library this takes about a second."""
_STRING, _VARIANT = 7, 21
"""Types whose checksum is not computed over the stored bytes."""


class Damaged(Exception):
    """The bundle is damaged, with the reason."""


class Unknown(Exception):
    """The bundle is of a kind that is not checked here, with the reason."""


def check_bundle(index: str, shards: List[str]) -> Verdict:
    """`index` and `shards` are paths; every shard in the index must be complete."""
    try:
        if os.path.getsize(index) > _MAX_INDEX:
            return Verdict(None, "tensorflow", "the index is too large to be read")
        with open(index, "rb") as file:
            tensors = _read_index(file.read())
        _check_shards(tensors, shards)
    except Damaged as exc:
        return Verdict(False, "tensorflow", str(exc))
    except Unknown as exc:
        return Verdict(None, "tensorflow", str(exc))
    except (IndexError, ValueError, struct.error) as exc:
        return Verdict(False, "tensorflow", f"the index is damaged: {exc}")
    return Verdict(True, "tensorflow")


class _Tensor:
    """A `BundleEntryProto`."""

    def __init__(self, message: bytes) -> None:
        numbers = {field: number for field, number, _ in _fields(message)}
        self.dtype, self.shard = numbers.get(1, 0), numbers.get(3, 0)
        self.offset, self.size, self.crc = numbers.get(4, 0), numbers.get(5, 0), numbers.get(6, 0)
        self.elements = 1
        for shape in (part for field, _, part in _fields(message) if field == 2):
            for dimension in (part for field, _, part in _fields(shape) if field == 2):
                self.elements *= next((number for field, number, _ in _fields(dimension) if field == 1), 0)


def _read_index(data: bytes) -> Tuple[int, List[_Tensor]]:
    if len(data) < 48 or int.from_bytes(data[-8:], "little") != _FOOTER_MAGIC:
        raise Damaged("the index has no footer")
    footer = data[-48:]
    meta_offset, at = _varint(footer, 0)
    meta_size, at = _varint(footer, at)
    _block(data, meta_offset, meta_size)
    offset, at = _varint(footer, at)
    size, at = _varint(footer, at)
    if footer[at:-8].strip(b"\0"):
        raise Damaged("the footer of the index is damaged")
    shards, tensors = 0, []
    for _, handle in _entries(_block(data, offset, size)):
        start, at = _varint(handle, 0)
        length, at = _varint(handle, at)
        for key, value in _entries(_block(data, start, length)):
            if key:
                tensors.append(_Tensor(value))
            else:
                shards = next((number for field, number, _ in _fields(value) if field == 1), 1)
    if not shards:
        raise Damaged("the index has no header")
    return shards, tensors


def _check_shards(index: Tuple[int, List[_Tensor]], paths: List[str]) -> None:
    count, tensors = index
    by_number: Dict[int, str] = {}
    for path in paths:
        place, _, of = path.rsplit(".data-", 1)[1].partition("-of-")
        # Shards of a save with another number of processes, under the same name, do not belong to this one.
        if of.isdigit() and int(of) == count:
            by_number[int(place)] = path
    if len(by_number) != count:
        raise Damaged(f"{count} data shards are needed and {len(by_number)} are there")
    for number, path in sorted(by_number.items()):
        mine = [tensor for tensor in tensors if tensor.shard == number]
        need = max((tensor.offset + tensor.size for tensor in mine), default=0)
        size = os.path.getsize(path)
        if size != need:
            raise Damaged(f"data shard {number} needs {need} bytes and has {size}")
        if need <= _MAX_SUMMED:
            _check_sums(path, mine)


def _check_sums(path: str, tensors: List[_Tensor]) -> None:
    with open(path, "rb") as file:
        for tensor in tensors:
            if tensor.dtype == _VARIANT or not tensor.size or not tensor.crc:
                continue
            file.seek(tensor.offset)
            stored = file.read(tensor.size)
            if tensor.dtype == _STRING:
                stored = _summed_strings(stored, tensor.elements)
            if _masked(crc32c(stored)) != tensor.crc:
                raise Damaged(f"the bytes at {tensor.offset} of {os.path.basename(path)} fail their checksum")


def _summed_strings(stored: bytes, elements: int) -> bytes:
    """The bytes of the checksum: it is over lengths of fixed width, while they are stored as varints."""
    lengths, at = b"", 0
    for _ in range(elements):
        length, at = _varint(stored, at)
        lengths += length.to_bytes(4 if length <= 0xFFFFFFFF else 8, "little")
    return lengths + stored[at:]


def _block(data: bytes, offset: int, size: int) -> bytes:
    """One block of the table, without its restart points."""
    stop = offset + size
    if stop + 5 > len(data):
        raise Damaged("a block of the index lies outside it")
    if _masked(crc32c(data[offset : stop + 1])) != int.from_bytes(data[stop + 1 : stop + 5], "little"):
        raise Damaged("a block of the index fails its checksum")
    if data[stop] != 0:
        raise Unknown("the index is compressed, unlike those of TensorFlow")
    restarts = int.from_bytes(data[stop - 4 : stop], "little")
    return data[offset : stop - 4 - 4 * restarts]


def _entries(block: bytes) -> Iterator[Tuple[bytes, bytes]]:
    at, key = 0, b""
    while at < len(block):
        shared, at = _varint(block, at)
        fresh, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + fresh]
        at += fresh
        yield key, block[at : at + length]
        at += length


def _fields(message: bytes) -> Iterator[Tuple[int, int, bytes]]:
    """Number, integer value and bytes of each field of a protocol buffer message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind, value, part = tag & 7, 0, b""
        if kind == 0:
            value, at = _varint(message, at)
        elif kind == 2:
            length, at = _varint(message, at)
            part = message[at : at + length]
            at += length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value = int.from_bytes(message[at : at + width], "little")
            at += width
        else:
            raise ValueError(f"field of unknown kind {kind}")
        yield tag >> 3, value, part


def _varint(data: bytes, at: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


_TABLE: Optional[List[int]] = None


def crc32c(data: bytes) -> int:
    """CRC-32 with Castagnoli's polynomial."""
    global _TABLE
    if _TABLE is None:
        _TABLE = []
        for byte in range(256):
            for _ in range(8):
                byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
            _TABLE.append(byte)
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """The stored form of a checksum: rotated and shifted, because a checksum over data with checksums is weak."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
