"""Checks compressed streams by their end mark and checksum: gzip, bzip2, xz."""

from __future__ import annotations

import zlib
from typing import Any, BinaryIO, Callable, Type

from stoker.launcher.verify.verdict import Verdict

_CHUNK = 1 << 20
_MEMORY = 512 << 20
"""Largest amount of memory (bytes) for an xz stream: the file itself names what it needs."""


def check_gzip(file: BinaryIO, size: int, named: bool) -> Verdict:
    return _read_through(file, "gzip", b"\x1f\x8b", lambda: zlib.decompressobj(31), zlib.error)


def check_bz2(file: BinaryIO, size: int, named: bool) -> Verdict:
    try:
        import bz2
    except ImportError:
        return Verdict(None, "bzip2", "this Python cannot read it")
    return _read_through(file, "bzip2", b"BZh", bz2.BZ2Decompressor, OSError)


def check_xz(file: BinaryIO, size: int, named: bool) -> Verdict:
    try:
        import lzma
    except ImportError:
        return Verdict(None, "xz", "this Python cannot read it")
    return _read_through(
        file,
        "xz",
        b"\xfd7zXZ\x00",
        lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY),
        lzma.LZMAError,
    )


def _read_through(
    file: BinaryIO, name: str, magic: bytes, new: Callable[[], Any], error: Type[Exception]
) -> Verdict:
    """One stream, or several in sequence with zeros between them."""
    whole, data = 0, b""
    while True:
        if whole:
            data = data.lstrip(b"\0")
        while len(data) < len(magic):
            more = file.read(_CHUNK)
            if not more:
                break
            data = (data + more).lstrip(b"\0") if whole else data + more
        if not data and whole:
            return Verdict(True, name)
        if whole and not data.startswith(magic) and not magic.startswith(data):
            return Verdict(None, name, f"something else follows the {name} stream")
        stream = new()
        try:
            data = _stream(file, stream, data)
        except EOFError:
            return Verdict(False, name, f"the {name} stream is unfinished")
        except (error, ValueError) as exc:
            # A stream that the library does not support, or that needs too much memory, is not damaged.
            unknown = any(word in str(exc) for word in ("nsupported", "emory"))
            return Verdict(None if unknown else False, name, f"the {name} stream cannot be read: {exc}")
        whole += 1


def _stream(file: BinaryIO, stream: Any, data: bytes) -> bytes:
    """Read to the end of one stream; the bytes after it. EOFError if it has no end."""
    while not stream.eof:
        if not data:
            data = file.read(_CHUNK)
            if not data:
                raise EOFError
        data = _feed(stream, data)
    return bytes(stream.unused_data)


def _feed(stream: Any, data: bytes) -> bytes:
    """Decompress the data, with at most `_CHUNK` bytes of output at a time; the bytes that are left. zlib returns the input it
    has not used, the others keep it."""
    keeps = hasattr(stream, "needs_input")
    while not stream.eof:
        out = stream.decompress(data, _CHUNK)
        data = b"" if keeps else stream.unconsumed_tail
        if (stream.needs_input) if keeps else (not data and len(out) < _CHUNK):
            break
    return data
