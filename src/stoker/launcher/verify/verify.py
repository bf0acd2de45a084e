"""Does a file's own format prove that it was written to the end?

Needed after a violent death, when nothing else tells a finished checkpoint from a torn one, and used on every
copy, so that a damaged one is never offered. Nothing is ever loaded or executed: lengths, offsets and checksums
are read, no more. Memory use is bounded whatever the file says about itself.

    ok=True     proven complete (as far as the format can tell: sizes always, checksums where it has them)
    ok=False    certainly damaged or unfinished
    ok=None     the format is unknown, or cannot tell

What cannot be proven damaged is not damaged. A file is held to a format if it claims it: by its name, as long as its
first bytes do not say otherwise, or by first bytes that nothing else has.
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
"""What follows the first four bytes of bzip2: text begins like those too."""


class Format(NamedTuple):
    check: Check
    suffixes: Tuple[str, ...]
    """Names that promise it. `.pt`, `.ckpt` and `.bin` promise nothing."""
    magic: Tuple[Tuple[int, bytes], ...] = ()
    """Offset and bytes, one of which such a file has."""
    proves: bool = True
    """Whether it can prove a file complete, or only unfinished."""


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
"""Not pickles: those of the first protocols, and those that something compressed, begin like text or like anything."""
_BY_MAGIC = (_ZIP, _HDF5, _NPY, _GZIP, _BZ2, _XZ, _ZSTD, _TAR, _PICKLE, _SAFETENSORS)


def _like_safetensors(head: bytes) -> bool:
    """A brace in the ninth byte is not much of a sign: the length before it must be small."""
    return head[4:8] == b"\0\0\0\0"


def _like_gzip(head: bytes) -> bool:
    """Three bytes are not either: flags, the kind of compression and the system must be ones that there are."""
    return head[3:4] < b"\x20" and head[8:9] in (b"", b"\0", b"\2", b"\4") and head[9:10] not in _NO_SYSTEM


_NO_SYSTEM = tuple(bytes([number]) for number in range(14, 255))
_LIKELY: Dict[Format, Callable[[bytes], bool]] = {_SAFETENSORS: _like_safetensors, _GZIP: _like_gzip}
"""What a head must look like besides the magic, where no name claims the format."""


def verify(path: str) -> Verdict:
    """A file, a directory, or the stem of a group of siblings."""
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
    """The files (relative to `root`) of one checkpoint. One bad member condemns it. `pause`: as in `direct.open_file`."""
    if not files:
        return Verdict(False, "empty", "there is nothing in it")
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
    """One regular file, by its first bytes and its name."""
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
            return Verdict(None, verdict.format, "its name promises a format that its first bytes are not of")
        return verdict


def recognised(path: str) -> bool:
    """Whether this regular file is of a format that could prove that it is complete."""
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
    # Of text whose name says nothing, JSON that is whole can be told; whatever else begins like it proves nothing.
    if "." not in name and head[:1] in (b"{", b"[") and _is_text(head):
        return _JSON
    return None


def _may_begin(known: Format, head: bytes) -> bool:
    """Whether a file of this format may have begun so far like this: there is nothing yet where its magic goes, a part of
    it, or the zeros of what is written last. HDF5, which may begin further down, and JSON know better."""
    if known is _HDF5 or not known.magic:
        return True
    for offset, magic in known.magic:
        part = head[offset : offset + len(magic)]
        if magic.startswith(part) or not part.strip(b"\0"):
            return True
    return False


def _is_text(head: bytes) -> bool:
    """The last character may be cut off."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(char < " " and char not in "\t\r\n" for char in text)
