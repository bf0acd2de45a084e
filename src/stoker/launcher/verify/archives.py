"""Checks archives by their directory or end mark: zip, tar."""

from __future__ import annotations

import os
import struct
import tarfile
import zipfile
import zlib
from typing import BinaryIO

from stoker.launcher.verify.verdict import Verdict

try:
    from lzma import LZMAError
except ImportError:  # then zipfile raises another error for such members
    LZMAError = zipfile.BadZipFile  # type: ignore[misc, assignment]

_CHUNK = 1 << 20
_BLOCK = 512
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, OverflowError)


def check_zip(file: BinaryIO, size: int, named: bool) -> Verdict:
    """torch.save, numpy.savez, .keras, Lightning: every member is read and its CRC checked."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                _read_member(archive, info)
            end = _end_of_zip(archive)
    except (NotImplementedError, RuntimeError) as exc:
        return Verdict(None, "zip", f"it cannot be read here: {exc}")
    except (*_DAMAGE, LZMAError) as exc:
        if "verlap" in str(exc):
            return Verdict(None, "zip", f"it cannot be read here: {exc}")
        return Verdict(False, "zip", f"the zip archive is damaged or unfinished: {exc}")
    if end > size:
        return Verdict(False, "zip", f"the zip archive needs {end} bytes and {size} are there")
    if end < size:
        return Verdict(None, "zip", f"something follows the zip archive, which ends at byte {end} of {size}")
    return Verdict(True, "zip")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Read a member. torch writes the CRC 0 where checksums are switched off; then only the length is checked."""
    try:
        with archive.open(info) as member:
            while member.read(_CHUNK):
                pass
    except zipfile.BadZipFile as exc:
        if info.CRC or not str(exc).startswith("Bad CRC-32"):
            raise


def _end_of_zip(archive: zipfile.ZipFile) -> int:
    """Offset of the end of the archive: after the end record and its comment."""
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


def check_tar(file: BinaryIO, size: int, named: bool) -> Verdict:
    """Headers have checksums, and a complete archive ends with two blocks of zeros."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for _ in archive:
                end = archive.offset
    except (tarfile.TarError, EOFError, OSError, ValueError) as exc:
        known = end or size < _BLOCK or not str(exc).startswith(("invalid header", "bad checksum"))
        return Verdict(False if known else None, "tar", f"the tar archive is damaged or unfinished: {exc}")
    if size < end + 2 * _BLOCK:
        return Verdict(False, "tar", "the tar archive has no end")
    file.seek(end)
    if file.read(2 * _BLOCK).strip(b"\0"):
        return Verdict(False, "tar", "there is no end mark after the last complete member")
    while True:
        block = file.read(_CHUNK)
        if not block:
            # A file of zeros is an empty archive, or one that was never written to.
            return Verdict(True if end else None, "tar", "" if end else "it is empty")
        if block.strip(b"\0"):
            return Verdict(None, "tar", "something follows the end of the tar archive")
