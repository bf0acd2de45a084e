"""Checks by its format whether a checkpoint is complete.

Needed after a violent death, when no other sign tells a finished checkpoint from a torn one. Every copy is checked too, so that a
damaged one is never offered. Nothing is loaded or executed: only lengths, offsets and checksums are read. The use of memory is
limited, whatever the file contains.

    ok=True     proven complete (as far as the format allows: sizes always, checksums where it has them)
    ok=False    proven damaged or unfinished
    ok=None     the format is unknown, or proves neither

A file counts as damaged only if that is proven. It is checked against a format if it claims that format: by its name, unless its
first bytes contradict it, or by first bytes that no other format has.
"""

from __future__ import annotations

import codecs
import os
import stat
from typing import BinaryIO, Callable, Dict, List, NamedTuple, Optional, Tuple

from stoker.launcher.checkpoints import snapshot
from stoker.launcher.verify import (
    archives,
    arrays,
    compressed,
    json_text,
    length_prefixed,
    multi_file,
    pickles,
)
from stoker.launcher.verify.verdict import Verdict
from stoker.linux import direct_io, idle_throttle
from stoker.task import checkpoint_names

__all__ = ["Verdict", "recognised", "verify", "verify_file", "verify_unit"]

Check = Callable[[BinaryIO, int, bool], Verdict]
"""The file, its size, and whether its name claims the format."""


_BZ2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""Bytes 5 to 10 of a bzip2 file. Its first four bytes alone can also be text."""


class Format(NamedTuple):
    check: Check
    suffixes: Tuple[str, ...]
    """Suffixes that claim the format. `.pt`, `.ckpt` and `.bin` claim none."""
    magic: Tuple[Tuple[int, bytes], ...] = ()
    """Offsets and bytes; such a file has one of them."""
    proves: bool = True
    """Whether the format can prove a file complete, or only unfinished."""


_ZIP = Format(archives.check_zip, (".npz", ".zip", ".keras"), ((0, b"PK\x03\x04"), (0, b"PK\x05\x06")))
_HDF5 = Format(arrays.check_hdf5, (".h5", ".hdf5"), ((0, b"\x89HDF\r\n\x1a\n"),))
_NPY = Format(arrays.check_npy, (".npy",), ((0, b"\x93NUMPY"),))
_GZIP = Format(compressed.check_gzip, (".gz", ".tgz"), ((0, b"\x1f\x8b\x08"),))
_BZ2 = Format(
    compressed.check_bz2,
    (".bz2",),
    tuple((0, b"BZh%d%b" % (level, block)) for level in range(1, 10) for block in _BZ2_BLOCKS),
)
_XZ = Format(compressed.check_xz, (".xz",), ((0, b"\xfd7zXZ\x00"),))
_TAR = Format(archives.check_tar, (".tar",), ((257, b"ustar"),))
_SAFETENSORS = Format(arrays.check_safetensors, (".safetensors",), ((8, b"{"),))
_JSON = Format(json_text.check_json, (".json",))
_PICKLE = Format(
    pickles.check_pickle,
    (".pkl", ".pickle"),
    ((0, b"\x80\x02"), (0, b"\x80\x03"), (0, b"\x80\x04"), (0, b"\x80\x05")),
)
_ZSTD = Format(length_prefixed.check_zstd, (".zst",), ((0, b"\x28\xb5\x2f\xfd"),))
_ONNX = Format(length_prefixed.check_onnx, (".onnx",), proves=False)
_MSGPACK = Format(length_prefixed.check_msgpack, (".msgpack",))
_UBJSON = Format(length_prefixed.check_ubjson, (".ubj",))
_BY_NAME = (
    _SAFETENSORS, _ZIP, _NPY, _HDF5, _JSON, _GZIP, _BZ2, _XZ, _ZSTD, _TAR, _ONNX, _MSGPACK, _UBJSON,
)  # fmt: skip
"""Without pickles: old protocols start like text, and compressed ones with any bytes."""
_BY_MAGIC = (_ZIP, _HDF5, _NPY, _GZIP, _BZ2, _XZ, _ZSTD, _TAR, _PICKLE, _SAFETENSORS)


def _like_safetensors(head: bytes) -> bool:
    """A brace as the ninth byte is a weak sign: the length before it must be small."""
    return head[4:8] == b"\0\0\0\0"


def _like_gzip(head: bytes) -> bool:
    """Three bytes are a weak sign too: the flags, the compression level and the system must be valid."""
    return head[3:4] < b"\x20" and head[8:9] in (b"", b"\0", b"\2", b"\4") and head[9:10] not in _NO_SYSTEM


_NO_SYSTEM = tuple(bytes([number]) for number in range(14, 255))
_LIKELY: Dict[Format, Callable[[bytes], bool]] = {_SAFETENSORS: _like_safetensors, _GZIP: _like_gzip}
"""More conditions for the first bytes, where no name claims the format."""


def verify(path: str) -> Verdict:
    """Check a file, a directory, or a group of siblings by its stem."""
    parent, name = os.path.split(os.path.abspath(path))
    members = checkpoint_names.group(snapshot.entries(parent)).get(name, [])
    if os.path.lexists(path):
        members = [name]
    if not members:
        return Verdict(False, "absent", f"{name} does not exist")
    files = [member.path for member in snapshot.snapshot(parent, members)]
    return verify_unit(parent, name, files)


def verify_unit(
    root: str, name: str, files: List[str], pause: idle_throttle.Pause = idle_throttle.none
) -> Verdict:
    """Check the files (relative to `root`) of one checkpoint; one damaged file is enough. `pause`: see `direct_io.open_file`."""
    if not files:
        return Verdict(False, "empty", "it is empty")
    if files == [name]:
        return verify_file(os.path.join(root, name), pause)
    parts = []
    for file in files:
        verdict = verify_file(os.path.join(root, file), pause)
        if verdict.ok is False:
            return Verdict(False, verdict.format, f"{file}: {verdict.reason}")
        parts.append((file, verdict))
    return multi_file.check_tree(root, name, parts)


def verify_file(path: str, pause: idle_throttle.Pause = idle_throttle.none) -> Verdict:
    """Check one regular file, by its first bytes and its name."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(fd)
    with direct_io.open_file(fd, info.st_size, pause) as file:
        if not stat.S_ISREG(info.st_mode):
            return Verdict(False, "special", "not a regular file")
        head = file.read(512)
        name = os.path.basename(path).lower()
        found = _format_of(name, head)
        if found is None:
            return Verdict(None, "unknown", "its format is not known")
        file.seek(0)
        named = name.endswith(found.suffixes)
        verdict = found.check(file, info.st_size, named)
        if verdict.ok is False and named and not _may_begin(found, head):
            return Verdict(None, verdict.format, "its first bytes are not of the format that its name claims")
        return verdict


def recognised(path: str) -> bool:
    """Whether this regular file is of a format that can prove it complete."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        found = _format_of(os.path.basename(path).lower(), file.read(512))
        return found is not None and found.proves


def _format_of(name: str, head: bytes) -> Optional[Format]:
    for known in _BY_NAME:
        if name.endswith(known.suffixes):
            return known
    for known in _BY_MAGIC:
        likely = _LIKELY[known](head) if known in _LIKELY else True
        if likely and any(head[offset : offset + len(magic)] == magic for offset, magic in known.magic):
            return known
    # Text without a suffix can be proven to be complete JSON, but not to be unfinished JSON.
    if "." not in name and head[:1] in (b"{", b"[") and _is_text(head):
        return _JSON
    return None


def _may_begin(known: Format, head: bytes) -> bool:
    """Whether an unfinished file of this format can start like this: at the place of its magic there is nothing yet, a part
    of it, or zeros. HDF5, which can start at a later offset, and JSON decide by themselves."""
    if known is _HDF5 or not known.magic:
        return True
    for offset, magic in known.magic:
        part = head[offset : offset + len(magic)]
        if magic.startswith(part) or not part.strip(b"\0"):
            return True
    return False


def _is_text(head: bytes) -> bool:
    """Whether this is the start of UTF-8 text; its last character may be incomplete."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(char < " " and char not in "\t\r\n" for char in text)
