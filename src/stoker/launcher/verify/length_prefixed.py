"""Checks formats whose values have a length each, by walking over them: ONNX, msgpack, UBJSON, Zstandard.

Only their names claim these formats, except Zstandard. A file that ends in the middle of a value is unfinished. A file with an
invalid value is of another format.
"""

from __future__ import annotations

from typing import BinaryIO, Callable, Dict, List, Optional

from stoker.launcher.verify.verdict import Verdict

_MOST = 5_000_000
"""Largest number of values that are walked, in about five seconds; a longer file is not judged."""


class _Truncated(Exception):
    """The file ends in the middle of a value."""


class _Invalid(Exception):
    """The file has another format, or a newer version."""


class _Reader:
    """Reads sequentially; long values are skipped without reading them."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.at = 0
        self._left = _MOST

    @property
    def ended(self) -> bool:
        return self.at >= self._size

    def take(self, count: int) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise _Invalid("it has too many values to be checked")
        data = self._file.read(count)
        self.at += len(data)
        if len(data) < count:
            raise _Truncated
        return data

    def peek(self) -> bytes:
        data = self._file.read(1)
        if not data:
            raise _Truncated
        self._file.seek(-1, 1)
        return data

    def number(self, count: int, order: str = "big", signed: bool = False) -> int:
        return int.from_bytes(self.take(count), order, signed=signed)  # type: ignore[arg-type]

    def skip(self, count: int) -> None:
        if count < 0:
            raise _Invalid("a length is negative")
        if count > self._size - self.at:
            raise _Truncated
        if count < 4096:
            self._file.read(count)
        else:
            self._file.seek(count, 1)
        self.at += count


def _walk(file: BinaryIO, size: int, name: str, walk: Callable[[_Reader], Verdict]) -> Verdict:
    reader = _Reader(file, size)
    try:
        return walk(reader)
    except _Truncated:
        return Verdict(False, name, f"it ends at byte {size}, in the middle of a value")
    except _Invalid as exc:
        return Verdict(None, name, str(exc))


def check_onnx(file: BinaryIO, size: int, named: bool) -> Verdict:
    """A `ModelProto`. It has no number of fields: at the end of one, another may be missing."""
    return _walk(file, size, "onnx", _onnx)


def _onnx(reader: _Reader) -> Verdict:
    first = True
    while first or not reader.ended:
        tag = _varint(reader)
        field, kind = tag >> 3, tag & 7
        if not 1 <= field <= 64 or (first and tag != 8):
            raise _Invalid("it is not a model of ONNX as it is known here")
        if kind == 0:
            _varint(reader)
        elif kind == 2:
            reader.skip(_varint(reader))
        elif kind in (1, 5):
            reader.skip(8 if kind == 1 else 4)
        else:
            raise _Invalid("it is not a model of ONNX as it is known here")
        first = False
    return Verdict(None, "onnx", "fields may still follow")


def check_zstd(file: BinaryIO, size: int, named: bool) -> Verdict:
    """Frames of blocks, each with its length. Their checksums are not checked: the standard library cannot compute them."""
    return _walk(file, size, "zstd", _zstd)


def _zstd(reader: _Reader) -> Verdict:
    first = True
    while first or not reader.ended:
        magic = reader.number(4, "little")
        if magic >> 4 == 0x184D2A5:
            reader.skip(reader.number(4, "little"))
        elif magic == 0xFD2FB528:
            _zstd_frame(reader)
        else:
            raise _Invalid("it has data that is not a zstd frame")
        first = False
    return Verdict(True, "zstd")


def _zstd_frame(reader: _Reader) -> None:
    flags = reader.number(1)
    single = bool(flags & 0x20)
    contents = (int(single), 2, 4, 8)[flags >> 6]
    reader.skip((not single) + (0, 1, 2, 4)[flags & 3] + contents)
    last = False
    while not last:
        block = reader.number(3, "little")
        last, kind = bool(block & 1), block >> 1 & 3
        if kind == 3:
            raise _Invalid("it has blocks of an unknown type")
        reader.skip(1 if kind == 1 else block >> 3)
    reader.skip(4 if flags & 4 else 0)


def _varint(reader: _Reader) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = reader.number(1)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise _Invalid("a number is too long")


_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
          0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip
_LONG = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD9: (1, 0), 0xDA: (2, 0),
         0xDB: (4, 0)}  # fmt: skip
"""Bytes of the length, and additional bytes of the value."""
_MANY = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the number of entries, and values of each entry."""


def check_msgpack(file: BinaryIO, size: int, named: bool) -> Verdict:
    """One map or list, as flax writes it. Data after it is not judged."""
    return _walk(file, size, "msgpack", _msgpack)


def _msgpack(reader: _Reader) -> Verdict:
    wanted, first = 1, True
    while wanted:
        byte = reader.number(1)
        wanted -= 1
        many = 0
        if byte >= 0xE0 or byte < 0x80 or 0xA0 <= byte <= 0xBF or byte in _FIXED or byte in _LONG:
            if first:
                raise _Invalid("it does not start with a map or a list")
            if 0xA0 <= byte <= 0xBF:
                reader.skip(byte & 31)
            elif byte in _FIXED:
                reader.skip(_FIXED[byte])
            elif byte in _LONG:
                width, more = _LONG[byte]
                reader.skip(reader.number(width) + more)
        elif byte < 0x90:
            many = 2 * (byte & 15)
        elif byte < 0xA0:
            many = byte & 15
        elif byte in _MANY:
            width, each = _MANY[byte]
            many = each * reader.number(width)
        else:
            raise _Invalid("it has a byte that msgpack does not define")
        wanted += many
        first = False
    return Verdict(True, "msgpack") if reader.ended else Verdict(None, "msgpack", "something else follows")


_NUMBERS: Dict[bytes, int] = {b"i": 1, b"U": 1, b"I": 2, b"l": 4, b"L": 8}
_SIZES: Dict[bytes, int] = {**_NUMBERS, b"Z": 0, b"N": 0, b"T": 0, b"F": 0, b"C": 1, b"d": 4, b"D": 8}


def check_ubjson(file: BinaryIO, size: int, named: bool) -> Verdict:
    """One object, as xgboost writes it."""
    return _walk(file, size, "ubjson", _ubjson)


def _ubjson(reader: _Reader) -> Verdict:
    if reader.take(1) != b"{":
        raise _Invalid("it does not start with an object")
    stack: List[List[Optional[int]]] = []
    """For each open list (0) or object (1): its kind, and the number of entries still to come, if it has one."""
    _open(reader, 1, stack)
    while stack:
        kind, left = stack[-1]
        if left == 0:
            stack.pop()
            continue
        mark = reader.take(1)
        if left is None and mark == (b"}" if kind else b"]"):
            stack.pop()
            continue
        if left is not None:
            stack[-1][1] = left - 1
        if kind:
            reader.skip(_count(reader, mark))
            mark = reader.take(1)
        if mark in (b"[", b"{"):
            _open(reader, int(mark == b"{"), stack)
        elif mark in (b"S", b"H"):
            reader.skip(_count(reader, reader.take(1)))
        elif mark in _SIZES:
            reader.skip(_SIZES[mark])
        else:
            raise _Invalid("it holds what UBJSON has no meaning for")
    return Verdict(True, "ubjson") if reader.ended else Verdict(None, "ubjson", "something else follows")


def _open(reader: _Reader, kind: int, stack: List[List[Optional[int]]]) -> None:
    """Read the type and the number of entries that can follow the bracket. Numbers of one type are skipped at once."""
    mark = reader.peek()
    if mark == b"$":
        reader.take(1)
        each = reader.take(1)
        if kind or reader.take(1) != b"#" or each not in _SIZES:
            raise _Invalid("it holds what UBJSON has no meaning for")
        reader.skip(_SIZES[each] * _count(reader, reader.take(1)))
    elif mark == b"#":
        reader.take(1)
        stack.append([kind, _count(reader, reader.take(1))])
    else:
        stack.append([kind, None])


def _count(reader: _Reader, mark: bytes) -> int:
    if mark not in _NUMBERS:
        raise _Invalid("it holds what UBJSON has no meaning for")
    count = reader.number(_NUMBERS[mark], signed=mark != b"U")
    if count < 0:
        raise _Invalid("a length is negative")
    return count
