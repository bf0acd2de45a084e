"""Does a file's own format prove that it was written to the end?

Needed after a violent death, when nothing else tells a finished checkpoint from a torn one, and used on every
copy, so that a damaged one is never offered. Nothing is ever loaded or executed: lengths, offsets and checksums
are read, no more. Memory use is bounded whatever the file says about itself.

    ok=True     proven complete (as far as the format can tell: sizes always, checksums where it has them)
    ok=False    certainly damaged or unfinished
    ok=None     the format is unknown, or cannot tell
"""

from __future__ import annotations

import codecs
import os
import stat
from typing import BinaryIO, Callable, List, Optional, Tuple

from stoker.launcher import scan, verify_archives, verify_arrays, verify_pickle, verify_trees
from stoker.launcher.verify_verdict import Verdict
from stoker.task import direct, spare

__all__ = ["Verdict", "recognised", "verify", "verify_file", "verify_unit"]

Check = Callable[[BinaryIO, int], Verdict]

_MAGIC: Tuple[Tuple[int, bytes, Check], ...] = (
    (0, b"PK\x03\x04", verify_archives.check_zip),
    (0, b"PK\x05\x06", verify_archives.check_zip),
    (0, b"\x89HDF\r\n\x1a\n", verify_arrays.check_hdf5),
    (0, b"\x93NUMPY", verify_arrays.check_npy),
    (0, b"\x1f\x8b", verify_archives.check_gzip),
    (0, b"BZh", verify_archives.check_bz2),
    (0, b"\xfd7zXZ\x00", verify_archives.check_xz),
    (257, b"ustar", verify_archives.check_tar),
    (0, b"\x80\x02", verify_pickle.check_pickle),
    (0, b"\x80\x03", verify_pickle.check_pickle),
    (0, b"\x80\x04", verify_pickle.check_pickle),
    (0, b"\x80\x05", verify_pickle.check_pickle),
    (8, b"{", verify_arrays.check_safetensors),
    (0, b"{", verify_archives.check_json),
    (0, b"[", verify_archives.check_json),
)

_SUFFIX: Tuple[Tuple[str, Check], ...] = (
    (".safetensors", verify_arrays.check_safetensors),
    (".npz", verify_archives.check_zip),
    (".zip", verify_archives.check_zip),
    (".keras", verify_archives.check_zip),
    (".npy", verify_arrays.check_npy),
    (".h5", verify_arrays.check_hdf5),
    (".hdf5", verify_arrays.check_hdf5),
    (".json", verify_archives.check_json),
    (".gz", verify_archives.check_gzip),
    (".tgz", verify_archives.check_gzip),
    (".bz2", verify_archives.check_bz2),
    (".xz", verify_archives.check_xz),
    (".tar", verify_archives.check_tar),
)
"""A name that promises a format is held to it. `.pt`, `.ckpt`, `.bin` and `.pkl` promise nothing."""


def verify(path: str) -> Verdict:
    """A file, a directory, or the stem of a group of siblings."""
    parent, name = os.path.split(os.path.abspath(path))
    members = scan.group(scan.entries(parent)).get(name, [])
    if os.path.lexists(path):
        members = [name]
    if not members:
        return Verdict(False, "absent", f"{name} does not exist")
    files = [member.path for member in scan.snapshot(parent, members)]
    return verify_unit(parent, name, files)


def verify_unit(root: str, name: str, files: List[str], pause: spare.Pause = spare.none) -> Verdict:
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
    return verify_trees.check_tree(root, name, parts)


def verify_file(path: str, pause: spare.Pause = spare.none) -> Verdict:
    """One regular file, by its first bytes and its name."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(fd)
    with direct.open_file(fd, info.st_size, pause) as file:
        if not stat.S_ISREG(info.st_mode):
            return Verdict(False, "special", "not a regular file")
        head = file.read(512)
        check = _check_for(os.path.basename(path), head)
        if check is None:
            return Verdict(None, "unknown", "its format is not known")
        file.seek(0)
        return check(file, info.st_size)


def recognised(path: str) -> bool:
    """Whether this regular file is of a format that could prove that it is complete."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with open(fd, "rb") as file:
        return (
            stat.S_ISREG(os.fstat(fd).st_mode)
            and _check_for(os.path.basename(path), file.read(512)) is not None
        )


def _check_for(name: str, head: bytes) -> Optional[Check]:
    for suffix, check in _SUFFIX:
        if name.lower().endswith(suffix):
            return check
    if not head:
        return None
    for offset, magic, check in _MAGIC:
        if head[offset : offset + len(magic)] == magic and _plausible(check, head):
            return check
    return None


def _plausible(check: Check, head: bytes) -> bool:
    """One byte is not much of a sign: of files of bare numbers, one in a hundred begins with a brace or a bracket. With a brace
    in the ninth it is safetensors if the length before it is a small number, with one in the first JSON if it is text."""
    if check is verify_arrays.check_safetensors:
        return head[4:8] == b"\0\0\0\0"
    if check is verify_archives.check_json:
        return _is_text(head)
    return True


def _is_text(head: bytes) -> bool:
    """The last character may be cut off."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(char < " " and char not in "\t\r\n" for char in text)
