"""Checks pickles by walking over the opcodes. They are never loaded: loading a pickle executes code in it."""

from __future__ import annotations

import io
import pickletools
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple

from stoker.launcher.verify.verdict import Verdict

MAX_OPCODES = 20_000_000
"""Walked in about ten seconds; a longer pickle is not judged."""

_LENGTH = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_LENGTH[pickletools.TAKEN_FROM_ARGUMENT4U] = 4
_LENGTH[pickletools.TAKEN_FROM_ARGUMENT8U] = 8
_FRAME = b"\x95"
_TORCH_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


_JOBLIB = b"joblib.numpy_pickle"
_PROTOCOLS = b"\x02\x03\x04\x05"
_CERTAIN = 16
"""After this many valid opcodes it is a pickle: three in four byte values are no opcode."""


class _Truncated(Exception):
    """The pickle ends early."""


class _Invalid(Exception):
    """An unknown opcode: it is no pickle, or other data is between its opcodes."""


class _TooLong(Exception):
    """Too many opcodes to be walked."""


class _WalkResult:
    """What a walk has found, however it ended."""

    def __init__(self) -> None:
        self.certain = False
        """Whether it is certainly a pickle: it has a frame, or many valid opcodes."""
        self.joblib = False
        """Whether joblib wrote it, which puts the bytes of arrays between the opcodes."""


def _arguments() -> Dict[int, int]:
    """By opcode: size of its argument in bytes; -1 a line, -2 two lines; -11, -14, -18 a length of 1, 4, 8 bytes and that many
    bytes."""
    table: Dict[int, int] = {}
    for op in pickletools.opcodes:
        if op.arg is None:
            width = 0
        elif op.arg.name == "stringnl_noescape_pair":
            width = -2
        elif op.arg.n == pickletools.UP_TO_NEWLINE:
            width = -1
        elif op.arg.n in _LENGTH:
            width = -10 - _LENGTH[op.arg.n]
        else:
            width = op.arg.n
        table[ord(op.code)] = width
    return table


_ARGUMENTS = _arguments()


def check_pickle(file: BinaryIO, size: int, named: bool) -> Verdict:
    """One pickle, or several in sequence, up to the last byte. A pickle starts with only two fixed bytes, which other files may
    have too: if the name does not claim it (`named`), only a file that is certainly a pickle can be unfinished."""
    start = file.tell()
    if file.read(len(_TORCH_LEGACY)) == _TORCH_LEGACY:
        return Verdict(None, "torch (legacy)", "the old torch format has no end mark")
    file.seek(start)
    first, result = b"", _WalkResult()
    try:
        while file.tell() < size or not first:
            head = file.read(2)
            file.seek(-len(head), 1)
            if first and (head[:1] != b"\x80" or head[1:] not in _PROTOCOLS):
                return Verdict(None, "pickle", "data that is not a pickle follows the pickle")
            named = named or head == first
            first = first or head
            _walk(file, size, result)
    except _TooLong:
        return Verdict(None, "pickle", "it has too many opcodes to be checked")
    except _Invalid as exc:
        return Verdict(None, "joblib" if result.joblib else "pickle", str(exc))
    except _Truncated as exc:
        if result.joblib:
            return Verdict(None, "joblib", "arrays follow")
        return Verdict(False if named or result.certain else None, "pickle", str(exc))
    return Verdict(True, "pickle")


def _walk(file: BinaryIO, size: int, result: _WalkResult) -> None:
    """Read to the STOP of the pickle that starts here."""
    arguments, read, seek, tell = _ARGUMENTS, file.read, file.seek, file.tell
    result.certain, count, joblib, frame = False, 0, len(_JOBLIB), _FRAME
    try:
        for count in range(MAX_OPCODES):
            code = read(1)
            if not code:
                raise _Truncated("the pickle is unfinished")
            if code == b".":
                return
            width = arguments.get(code[0])
            if width is None:
                raise _Invalid(f"the pickle has an unknown opcode at byte {tell() - 1}")
            if width == 0:
                continue
            if width in (-1, -2):
                _pass_lines(file, -width, result)
                continue
            if width < 0:
                raw = read(-width - 10)
                if len(raw) < -width - 10:
                    raise _Truncated("the pickle is unfinished")
                width = int.from_bytes(raw, "little")
            if tell() + width > size:
                raise _Truncated("the pickle is unfinished")
            if width == joblib:
                result.joblib = read(width) == _JOBLIB or result.joblib
            elif count == 1 and code == frame:
                # The first of protocol 4 and later. No frame has terabytes.
                result.certain = read(width)[5:] == b"\0\0\0"
            else:
                seek(width, 1)
        raise _TooLong
    finally:
        result.certain = result.certain or count >= _CERTAIN


def _pass_lines(file: BinaryIO, lines: int, result: _WalkResult) -> None:
    for _ in range(lines):
        line = file.readline(1 << 20)
        if not line.endswith(b"\n"):
            raise _Truncated("the pickle is unfinished")
        result.joblib = result.joblib or line[:-1] == _JOBLIB


def strings_and_numbers(data: bytes) -> Iterator[Any]:
    """The strings and integers of a pickle in the order of their use, with the memo resolved; no object is built."""
    memo: Dict[int, Any] = {}
    last: Any = None
    for op, argument, _ in pickletools.genops(io.BytesIO(data)):
        if op.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if op.name == "MEMOIZE" else int(argument or 0)] = last
        elif op.name in ("BINGET", "LONG_BINGET", "GET"):
            last = memo.get(int(argument or 0))
            if isinstance(last, (str, int)):
                yield last
        else:
            last = (
                argument
                if isinstance(argument, (str, int)) and op.name not in ("PROTO", "FRAME", "GLOBAL")
                else None
            )
            if last is not None:
                yield last


def storage_extents(data: bytes) -> Optional[Dict[str, int]]:
    """The files in the `.metadata` of a torch distributed checkpoint, with their sizes."""
    extents: Dict[str, int] = {}
    recent: List[Any] = []
    try:
        for value in strings_and_numbers(data):
            recent = (recent + [value])[-6:]
            found = _storage_info(recent)
            if found is not None:
                extents[found[0]] = max(extents.get(found[0], 0), found[1])
    except (ValueError, IndexError, KeyError, OverflowError):
        return None
    return extents or None


def _storage_info(recent: List[Any]) -> Optional[Tuple[str, int]]:
    if len(recent) < 6 or recent[0] != "relative_path" or recent[2] != "offset" or recent[4] != "length":
        return None
    path, offset, length = recent[1], recent[3], recent[5]
    if isinstance(path, str) and isinstance(offset, int) and isinstance(length, int):
        return path, offset + length
    return None
