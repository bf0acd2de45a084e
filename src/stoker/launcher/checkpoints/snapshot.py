"""What in a checkpoint directory belongs together, what it is called, and what state its files are in.

A checkpoint is one file, one directory, or a group of siblings with one stem, directly inside the checkpoint
directory. Training code owns that directory, so everything is opened beneath it, links are never followed and
only regular files count.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

MAX_FILES = 200_000
"""A checkpoint of more files than this is refused: no real writer makes one."""

_UNFINISHED = re.compile(
    r"^~|~$|^\.tmp|^tmp[-_]|_temp$|\.orbax-checkpoint-tmp|\.tempstate\d*$|\.(tmp|temp)([-_.]?[0-9a-f]+)?$"
    r"|\.(part|partial|incomplete|lock|swp|crdownload|aria2)$",
    re.IGNORECASE,
)
_MADE_BY = re.compile(r"\.\d+-[0-9a-f]+$")
"""The process that makes it, in a name of the SDK's."""
_SIDE = re.compile(
    r"\.(log|out|err|png|jpe?g|svg|gif|pdf|html?|md|rst|py|ipynb|pid)$"
    r"|^events\.out\.tfevents\.|^training_args\.bin$",
    re.IGNORECASE,
)
_NOTE = re.compile(r"\.(csv|tsv|ya?ml|toml|ini|cfg)$", re.IGNORECASE)
_WEAK = re.compile(r"\.(json|jsonl|txt)$", re.IGNORECASE)
_TF_PART = re.compile(r"^(?P<stem>.+)\.(?:index|meta|data-\d{5}-of-\d{5})$")
_SHARD = re.compile(r"^(?P<stem>.+?)-\d{5}-of-\d{5}(?:\.[A-Za-z0-9_]+)?$")
_SHARD_INDEX = re.compile(r"^(?P<stem>.+?)\.[A-Za-z0-9_]+\.index\.json$")
_STEP = (
    re.compile(r"(?:global_?)?step[=_\-.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt|cp|iter(?:ation)?|model)[=_\-.]?(\d+)(?![\d.]*[a-z]\d)", re.IGNORECASE),
    re.compile(r"epoch[=_\-.]?(\d+)", re.IGNORECASE),
    re.compile(r"^(\d+)(?:\.[A-Za-z]\w*)*$"),
    re.compile(r"[-_=](\d+)(?:\.[A-Za-z]\w*)*$"),
)

POINTERS = {"checkpoint", "latest", "latest_checkpointed_iteration.txt"}
"""Files that only name the newest checkpoint (TensorFlow, DeepSpeed, Megatron). Not checkpoints themselves."""


class FileState(NamedTuple):
    """One file of a checkpoint, and what would differ if it had been written to."""

    path: str
    """Relative to the checkpoint directory."""
    ino: int
    size: int
    mtime_ns: int
    mode: int


Signature = Tuple[FileState, ...]
State = Tuple[int, int, int]
"""Inode, size and modification time of a file."""


class TooMany(OSError):
    """More files than a checkpoint can sensibly have."""


def is_temporary(name: str) -> bool:
    """Names that never count: somebody is still writing, or it is hidden."""
    return name.startswith(".") or is_unfinished(name)


def is_unfinished(name: str) -> bool:
    """Names under which writers keep what is not ready. Inside a directory, hidden files may well be ready."""
    return _UNFINISHED.search(name) is not None


def meant(name: str) -> str:
    """What something with a temporary name is probably going to be called."""
    return _MADE_BY.sub("", _UNFINISHED.sub("", name)).lstrip(".") or name


@functools.lru_cache(maxsize=65536)
def unit_of(name: str) -> Optional[str]:
    """The checkpoint that a top-level entry belongs to; None for what never is one."""
    if is_temporary(name) or name in POINTERS or _SIDE.search(name):
        return None
    for pattern in (_TF_PART, _SHARD, _SHARD_INDEX):
        found = pattern.match(name)
        if found:
            return found.group("stem")
    return name


def is_weak(unit: str) -> bool:
    """Text that may be a checkpoint of its own (`state.json`), or a note beside one (`config.json`).

    It is taken for a checkpoint only where nothing else in the directory is one.
    """
    return _WEAK.search(unit) is not None or is_note(unit)


def is_note(unit: str) -> bool:
    """Text that is weaker still: loggers write it in place, line by line or once at the start. Only one that was renamed
    into place was meant to be a state."""
    return _NOTE.search(unit) is not None


def step_of(name: str) -> Optional[int]:
    """The training step a name speaks of: `step-100`, `checkpoint-500`, `epoch=3-step=400.ckpt`, `ckpt-3`."""
    for pattern in _STEP:
        found = pattern.search(name)
        if found and len(found.group(1)) <= 15:
            return int(found.group(1))
    return None


def group(names: Iterable[str]) -> Dict[str, List[str]]:
    """Top-level entries by checkpoint. Members of each are sorted."""
    units: Dict[str, List[str]] = {}
    for name in names:
        unit = unit_of(name)
        if unit is not None:
            units.setdefault(unit, []).append(name)
    for members in units.values():
        members.sort()
    return units


def strong_units(units: Dict[str, List[str]]) -> Dict[str, List[str]]:
    """Without notes beside checkpoints, where there are checkpoints."""
    strong = {name: members for name, members in units.items() if not is_weak(name)}
    return strong or units


def is_partial(members: List[str]) -> bool:
    """A TensorFlow group whose index, which is written last, is not there yet."""
    parts = [member for member in members if ".data-" in member and _TF_PART.match(member)]
    return bool(parts) and len(parts) == len(members)


def pointer(directory: str, unit: str, members: List[str]) -> Optional[Tuple[str, bytes]]:
    """The small file by which its framework finds this checkpoint again, written for this one.

    The script's own may name a newer one, or not have been written yet when the script died.
    """
    if f"{unit}.index" in members and not re.search(r"[\"\\\n]", unit):
        text = f'model_checkpoint_path: "{unit}"\nall_model_checkpoint_paths: "{unit}"\n'
        return "checkpoint", text.encode("utf-8", "surrogateescape")
    if members != [unit] or not os.path.isdir(os.path.join(directory, unit)):
        return None
    if os.path.isfile(os.path.join(directory, "latest")):
        return "latest", unit.encode("utf-8", "surrogateescape")
    iteration = re.match(r"^iter_(\d+)$", unit)
    if iteration and os.path.isfile(os.path.join(directory, "latest_checkpointed_iteration.txt")):
        return "latest_checkpointed_iteration.txt", (iteration.group(1).lstrip("0") or "0").encode()
    return None


def snapshot(directory: str, members: Iterable[str]) -> Signature:
    """The regular files of these entries as they are now. What vanished meanwhile is left out."""
    found: List[FileState] = []
    try:
        fd = open_directory(directory)
    except OSError as exc:
        # Scripts delete and make it again; and what is a link now is not our directory.
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return ()
        raise
    try:
        for name in members:
            _collect(fd, name, name, found)
    finally:
        os.close(fd)
    found.sort()
    return tuple(found)


def counts(signature: Signature) -> bool:
    """Empty files and directories are no checkpoint."""
    return any(member.size for member in signature)


def entries(directory: str) -> List[str]:
    """Names in a directory; none where there is no directory."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def states(directory: str, names: Iterable[str]) -> Dict[str, State]:
    """The state of each entry that is a regular file. A rename leaves it as it is."""
    found: Dict[str, State] = {}
    for name in names:
        try:
            info = os.stat(os.path.join(directory, name), follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode):
            found[name] = (info.st_ino, info.st_size, info.st_mtime_ns)
    return found


def open_directory(path: str, dir_fd: Optional[int] = None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def open_file(root_fd: int, path: str) -> int:
    """A regular file beneath the directory, no component of whose path is a link."""
    fd, parts = os.dup(root_fd), path.split("/")
    try:
        for part in parts[:-1]:
            child = open_directory(part, dir_fd=fd)
            os.close(fd)
            fd = child
        opened = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EPERM, "not a regular file", path)
    return opened


def _collect(fd: int, name: str, path: str, found: List[FileState]) -> None:
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            if len(found) >= MAX_FILES:
                raise TooMany(errno.EFBIG, f"more than {MAX_FILES} files", path)
            found.append(
                FileState(path, info.st_ino, info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode))
            )
            return
        if not stat.S_ISDIR(info.st_mode):
            return
        child = open_directory(name, dir_fd=fd)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as exc:
        # A link put in the place of a directory between the two calls: not followed.
        if exc.errno == errno.ELOOP:
            return
        raise
    try:
        for entry in os.listdir(child):
            if not is_unfinished(entry):
                _collect(child, entry, f"{path}/{entry}", found)
    finally:
        os.close(child)
