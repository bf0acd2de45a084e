"""Formats with checksums or an end of their own: zip, gzip, bzip2, xz, tar, JSON."""

from __future__ import annotations

import json
import os
import tarfile
import zipfile
import zlib
from typing import Any, BinaryIO, Type

from stoker.launcher.verify_verdict import Verdict

_CHUNK = 1 << 20
_MAX_JSON = 64 << 20


def check_zip(file: BinaryIO, size: int) -> Verdict:
    """torch.save, numpy.savez, .keras, Lightning: every member is read against its CRC."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                with archive.open(info) as member:
                    while member.read(_CHUNK):
                        pass
            end = _end_of_zip(archive)
    except (NotImplementedError, RuntimeError) as exc:
        return Verdict(None, "zip", f"it cannot be read here: {exc}")
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, OverflowError) as exc:
        return Verdict(False, "zip", f"the zip archive is damaged or unfinished: {exc}")
    if end != size:
        return Verdict(False, "zip", f"the zip archive ends at byte {end} of {size}")
    return Verdict(True, "zip")


def _end_of_zip(archive: zipfile.ZipFile) -> int:
    """Where the archive ends: the end record and its comment follow the directory."""
    file = archive.fp
    if file is None:
        raise ValueError("the archive is closed")
    file.seek(0, os.SEEK_END)
    size = file.tell()
    window = min(size, 22 + 65535)
    file.seek(size - window)
    tail = file.read(window)
    at = tail.rfind(b"PK\x05\x06")
    comment = int.from_bytes(tail[at + 20 : at + 22], "little")
    return size - window + at + 22 + comment


def check_gzip(file: BinaryIO, size: int) -> Verdict:
    import gzip

    if not size:
        return Verdict(False, "gzip", "the file is empty")
    with gzip.GzipFile(fileobj=file) as stream:
        return _read_through(stream, "gzip", zlib.error)


def check_bz2(file: BinaryIO, size: int) -> Verdict:
    try:
        import bz2
    except ImportError:
        return Verdict(None, "bzip2", "this Python cannot read it")
    with bz2.BZ2File(file) as stream:
        return _read_through(stream, "bzip2", ValueError)


def check_xz(file: BinaryIO, size: int) -> Verdict:
    try:
        import lzma
    except ImportError:
        return Verdict(None, "xz", "this Python cannot read it")
    with lzma.LZMAFile(file) as stream:
        return _read_through(stream, "xz", lzma.LZMAError)


def _read_through(stream: Any, name: str, error: Type[Exception]) -> Verdict:
    try:
        while stream.read(_CHUNK):
            pass
    except (error, EOFError, OSError, ValueError) as exc:
        return Verdict(False, name, f"the {name} stream is damaged or unfinished: {exc}")
    return Verdict(True, name)


def check_tar(file: BinaryIO, size: int) -> Verdict:
    """Headers have checksums, and an archive written to the end ends in two blocks of zeros."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for info in archive:
                end = info.offset_data + (-(-info.size // 512) * 512 if info.isreg() else 0)
    except (tarfile.TarError, EOFError, OSError, ValueError) as exc:
        return Verdict(False, "tar", f"the tar archive is damaged or unfinished: {exc}")
    if size < end + 1024 or size % 512:
        return Verdict(False, "tar", "the tar archive has no end")
    file.seek(end)
    while True:
        block = file.read(_CHUNK)
        if not block:
            return Verdict(True, "tar")
        if block.strip(b"\0"):
            return Verdict(False, "tar", "something other than zeros follows the last member")


def check_json(file: BinaryIO, size: int) -> Verdict:
    """An object or a list says where it ends; a bare number does not (`12` may once become `123`)."""
    if size > _MAX_JSON:
        return Verdict(None, "json", "too large to be read through")
    try:
        value = json.loads(file.read())
    except (ValueError, RecursionError) as exc:
        file.seek(0)
        lines = file.read().splitlines()
        if len(lines) > 1 and _is_json_line(lines[0]) and _is_json_line(lines[-1]):
            return Verdict(None, "json lines", "lines may still follow")
        return Verdict(False, "json", f"not complete JSON: {exc}")
    if isinstance(value, (dict, list)):
        return Verdict(True, "json")
    return Verdict(None, "json", "a single value does not say where it ends")


def _is_json_line(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
