"""Checks files of arrays: safetensors, NumPy, HDF5."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, BinaryIO, Dict, Optional

from stoker.launcher.verify import pickles
from stoker.launcher.verify.verdict import Verdict

_MAX_HEADER = 100 << 20
_MAX_NPY_HEADER = 1 << 20
_MAX_USER_BLOCK = 1 << 30
_NUMPY = b"\x93NUMPY"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_SIGNS = (b'"data_offsets"', b'"__metadata__"')
"""Keys that a header of safetensors has and other JSON does not."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def check_safetensors(file: BinaryIO, size: int, named: bool) -> Verdict:
    """The header lists every tensor's bytes, which must fill the file exactly. Other files start with a length and JSON too: if
    the name does not claim the format, the header must have its keys."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8 or length > _MAX_HEADER:
        head = file.read(512)
        known = named or any(sign in head for sign in _SIGNS)
        reason = f"the file has {size} bytes, its header alone should have {length}"
        return Verdict(False if known else None, "safetensors", reason)
    raw = file.read(length)
    try:
        header = json.loads(raw)
        spans = sorted(_span(name, entry) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as exc:
        known = named or b'"data_offsets"' in raw
        return Verdict(False if known else None, "safetensors", f"the header is damaged: {exc}")
    if not spans and not named:
        return Verdict(None, "safetensors", "its header names no tensors")
    end = 0
    for start, stop in spans:
        if start != end or stop < start:
            return Verdict(False, "safetensors", f"the tensors are not contiguous at byte {end}")
        end = stop
    if end != size - 8 - length:
        return Verdict(
            False, "safetensors", f"the tensors need {end} bytes and {size - 8 - length} are there"
        )
    return Verdict(True, "safetensors")


def _span(name: str, entry: Dict[str, Any]) -> "tuple[int, int]":
    start, stop = entry["data_offsets"]
    bits = _BITS.get(entry["dtype"])
    for extent in entry["shape"]:
        bits = None if bits is None else bits * extent
    if not isinstance(start, int) or not isinstance(stop, int):
        raise ValueError(f"the offsets of {name} are not numbers")
    if bits is not None and bits != (stop - start) * 8:
        raise ValueError(f"{name} has {stop - start} bytes, its shape needs {bits // 8}")
    return start, stop


def check_npy(file: BinaryIO, size: int, named: bool) -> Verdict:
    """The header has shape and type, so the size is known. `numpy.save` may write several arrays to one file."""
    at = 0
    while at < size or not at:
        file.seek(at)
        head = file.read(12)
        if at and not head.startswith(_NUMPY[: len(head)]):
            return Verdict(None, "npy", "something else follows the array")
        if len(head) < 12 or head[:6] != _NUMPY:
            return Verdict(False, "npy", "the header is damaged or unfinished")
        if head[6] not in (1, 2, 3):
            return Verdict(None, "npy", f"version {head[6]} is not known")
        start = at + (10 if head[6] == 1 else 12)
        length = int.from_bytes(head[8 : start - at], "little")
        if length > size - start:
            return Verdict(False, "npy", "the header is unfinished")
        if length > _MAX_NPY_HEADER:
            return Verdict(None, "npy", "its header is too long to be read")
        file.seek(start)
        need, why = _needed(file.read(length))
        if why is not None:
            return why
        if need is None:
            return pickles.check_pickle(file, size, True)
        at = start + length + need
        if at > size:
            return Verdict(False, "npy", f"{at} bytes are needed and {size} are there")
    return Verdict(True, "npy")


def _needed(header: bytes) -> "tuple[Optional[int], Optional[Verdict]]":
    """Size of the array in bytes; None: Python objects, which are pickled. Or a verdict, if the size cannot be computed."""
    try:
        # Python 2 wrote long integers with an L.
        fields = ast.literal_eval(re.sub(r"(?<=\d)L(?=[,)])", "", header.decode("latin-1").strip()))
        count = 1
        for extent in fields["shape"]:
            count *= extent
        descr = fields["descr"]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as exc:
        return None, Verdict(False, "npy", f"the header is damaged: {exc}")
    try:
        item = _item_size(descr)
    except (ValueError, TypeError, IndexError, RecursionError) as exc:
        return None, Verdict(None, "npy", f"its type is not known: {exc}")
    if item is None:
        return None, None
    if type(count) is not int or type(item) is not int or count < 0 or item < 0:
        return None, Verdict(False, "npy", "the header is damaged: its shape is not valid")
    return count * item, None


def _item_size(descr: Any) -> Optional[int]:
    """Size of one item in bytes; None: Python objects, which are pickled."""
    if isinstance(descr, list):
        total = 0
        for entry in descr:
            size = _item_size(entry[1])
            if size is None:
                return None
            for extent in (entry[2] if len(entry) > 2 else ()) or ():
                size *= extent
            total += size
        return total
    if isinstance(descr, tuple):
        base = _item_size(descr[0])
        for extent in (descr[1],) if isinstance(descr[1], int) else descr[1]:
            base = None if base is None else base * extent
        return base
    found = re.match(r"^[<>|=]?([a-zA-Z])(\d*)(\[.*\])?$", descr)
    if not found:
        raise ValueError(f"unknown type {descr!r}")
    if found.group(1) == "O":
        return None
    return int(found.group(2) or 1) * (4 if found.group(1) == "U" else 1)


def check_hdf5(file: BinaryIO, size: int, named: bool) -> Verdict:
    """The superblock has the size of the file; it is updated when the file is flushed or closed."""
    start, block = _superblock(file, size)
    if len(block) < 64:
        file.seek(0)
        head = file.read(8)
        begun = bool(block) or _HDF5.startswith(head) or not head.strip(b"\0")
        return Verdict(False if begun else None, "hdf5", "it does not begin with an HDF5 superblock")
    version = block[8]
    if version in (0, 1):
        width, at = block[13], 24 if version == 0 else 28
        # Newer libraries mark an open file here too. With older ones a flushed file looks closed.
        if block[20] & 0x01:
            return Verdict(False, "hdf5", "it was not closed by its writer")
    elif version in (2, 3):
        width, at = block[9], 12
        if block[11] & 0x05:
            return Verdict(False, "hdf5", "it was not closed by its writer")
        end = at + 4 * width
        if _lookup3(block[:end]) != int.from_bytes(block[end : end + 4], "little"):
            return Verdict(False, "hdf5", "the superblock's checksum is wrong")
    else:
        return Verdict(None, "hdf5", f"superblock version {version} is not known")
    if width not in (2, 4, 8):
        return Verdict(False, "hdf5", f"addresses of {width} bytes")
    base = int.from_bytes(block[at : at + width], "little")
    stop = int.from_bytes(block[at + 2 * width : at + 3 * width], "little")
    # With a user block, the size counts from the start of the file or, if the block was added later, from the superblock.
    if stop != size and base + stop != size and start + stop != size:
        return Verdict(False, "hdf5", f"the superblock says {stop} bytes and {size} are there")
    return Verdict(True, "hdf5")


def _superblock(file: BinaryIO, size: int) -> "tuple[int, bytes]":
    """The superblock and its offset: at the start, or after a user block, at 512 bytes or a doubling of that. Empty: none."""
    at = 0
    while at + 8 <= size and at <= _MAX_USER_BLOCK:
        file.seek(at)
        block = file.read(128)
        if block.startswith(_HDF5):
            return at, block
        at = at * 2 or 512
    return 0, b""


def _lookup3(data: bytes) -> int:
    """The hash HDF5 uses for its metadata (Bob Jenkins' lookup3, little-endian)."""
    mask = 0xFFFFFFFF

    def rot(value: int, by: int) -> int:
        return ((value << by) | (value >> (32 - by))) & mask

    a = b = c = (0xDEADBEEF + len(data)) & mask
    offset = 0
    while len(data) - offset > 12:
        a = (a + int.from_bytes(data[offset : offset + 4], "little")) & mask
        b = (b + int.from_bytes(data[offset + 4 : offset + 8], "little")) & mask
        c = (c + int.from_bytes(data[offset + 8 : offset + 12], "little")) & mask
        for by_a, by_b, by_c in ((4, 6, 8), (16, 19, 4)):
            a = ((a - c) & mask) ^ rot(c, by_a)
            c = (c + b) & mask
            b = ((b - a) & mask) ^ rot(a, by_b)
            a = (a + c) & mask
            c = ((c - b) & mask) ^ rot(b, by_c)
            b = (b + a) & mask
        offset += 12
    tail = data[offset:].ljust(12, b"\0")
    if len(data) == offset:
        return c
    a = (a + int.from_bytes(tail[0:4], "little")) & mask
    b = (b + int.from_bytes(tail[4:8], "little")) & mask
    c = (c + int.from_bytes(tail[8:12], "little")) & mask
    c = ((c ^ b) - rot(b, 14)) & mask
    a = ((a ^ c) - rot(c, 11)) & mask
    b = ((b ^ a) - rot(a, 25)) & mask
    c = ((c ^ b) - rot(b, 16)) & mask
    a = ((a ^ c) - rot(c, 4)) & mask
    b = ((b ^ a) - rot(a, 14)) & mask
    return ((c ^ b) - rot(b, 24)) & mask
