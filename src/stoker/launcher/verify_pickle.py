"""Pickles are walked, opcode by opcode, never loaded: loading one runs whatever its writer put in."""

from __future__ import annotations

import io
import pickletools
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple

from stoker.launcher.verify_verdict import Verdict

MAX_OPCODES = 20_000_000
"""About ten seconds of walking; what is longer is not judged."""

_LENGTH = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_LENGTH[pickletools.TAKEN_FROM_ARGUMENT4U] = 4
_LENGTH[pickletools.TAKEN_FROM_ARGUMENT8U] = 8
_TORCH_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class _Torn(Exception):
    """The pickle ends early or holds what no pickle holds."""


class _Endless(Exception):
    """Too many opcodes to be walked."""


def _arguments() -> Dict[int, int]:
    """By opcode: bytes of its argument, or -1 a line, -2 two lines, -11/-14/-18 a length of 1, 4, 8 bytes and so much."""
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


def check_pickle(file: BinaryIO, size: int) -> Verdict:
    """One pickle, or several one after the other, up to the last byte."""
    start = file.tell()
    torch_legacy = file.read(len(_TORCH_LEGACY)) == _TORCH_LEGACY
    file.seek(start)
    if torch_legacy:
        return Verdict(None, "torch (legacy)", "the old torch format does not say where it ends")
    try:
        while file.tell() < size:
            if file.tell() > start and file.read(1) != b"\x80":
                return Verdict(None, "pickle", "something other than a pickle follows the pickle")
            file.seek(-1 if file.tell() > start else 0, 1)
            _walk(file, size)
    except _Endless:
        return Verdict(None, "pickle", "too long to be walked through")
    except _Torn as exc:
        return (
            Verdict(None, "joblib", "arrays follow")
            if _is_joblib(file, start)
            else Verdict(False, "pickle", str(exc))
        )
    return Verdict(True, "pickle")


def _walk(file: BinaryIO, size: int) -> None:
    """Leave the file just after the STOP of the pickle that begins here."""
    arguments, read, seek, tell = _ARGUMENTS, file.read, file.seek, file.tell
    for _ in range(MAX_OPCODES):
        code = read(1)
        if not code:
            raise _Torn("the pickle is unfinished")
        if code == b".":
            return
        width = arguments.get(code[0])
        if width is None:
            raise _Torn(f"the pickle holds an unknown opcode at byte {tell() - 1}")
        if width == 0:
            continue
        if width in (-1, -2):
            for _ in range(-width):
                if not file.readline(1 << 20).endswith(b"\n"):
                    raise _Torn("the pickle is unfinished")
            continue
        if width < 0:
            raw = read(-width - 10)
            if len(raw) < -width - 10:
                raise _Torn("the pickle is unfinished")
            width = int.from_bytes(raw, "little")
        if tell() + width > size:
            raise _Torn("the pickle is unfinished")
        seek(width, 1)
    raise _Endless


def _is_joblib(file: BinaryIO, start: int) -> bool:
    """joblib puts raw arrays between the opcodes."""
    file.seek(start)
    return b"joblib.numpy_pickle" in file.read(1 << 16)


def strings_and_numbers(data: bytes) -> Iterator[Any]:
    """The strings and integers of a pickle in the order in which they are used, memo resolved; nothing is built."""
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
    """From the `.metadata` of a torch distributed checkpoint: each file, and how long it must be."""
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
