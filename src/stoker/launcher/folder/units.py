"""Which files of a working folder are states of a training, and which belong together. Pure.

A unit is what is whole or torn together:

    file       one file
    directory  a directory with a step in its name (`checkpoint-500`)
    set        a directory whose files are one state (weights beside `optimizer.bin`)
    group      a checkpoint of TensorFlow: siblings with one stem

Notes in a directory (logs, tables, texts) belong to no unit. The folder itself is never one. Paths are relative to it.
"""

from __future__ import annotations

import json
import re
from typing import Callable, Collection, NamedTuple, Optional

from stoker.task import checkpoint_names

FILE, DIRECTORY, SET, GROUP = "file", "directory", "set", "group"
TORN = ".torn"
"""Suffix of a torn file that was set aside."""
HEAD = 64 << 10
"""Bytes of a file that tell a log from a state."""
NEVER_ENTERED = frozenset(("__pycache__", ".git", ".venv", "node_modules", ".cache"))
"""Directories that are never kept (see stoker.spec.kept_files)."""

_STATE = re.compile(
    r"\.(pt|pth|ckpt|pkl|pickle|npz|npy|h5|hdf5|keras|safetensors|bin|msgpack|joblib|json|ubj|onnx|distcp)$",
    re.IGNORECASE,
)
_NO_STATE = re.compile(
    r"\.(log|out|err|csv|tsv|txt|jsonl|ndjson|ya?ml|toml|ini|cfg|md|rst|html?|xml|pid|lock"
    r"|png|jpe?g|svg|gif|bmp|webp|tiff?|pdf|mp[34]|wav|avi"
    r"|py|pyc|pyx|pyi|ipynb|sh|c|cc|cpp|cu|h|hpp|rs|go|js|ts|so|o|a"
    r"|gz|tgz|bz2|xz|zst|tar|zip|7z|rar|jar|whl|egg|docx|xlsx|parquet|arrow|feather|db|sqlite3?)$"
    r"|^events\.out\.tfevents\.",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?:^|[^a-z])(?:global_?step|step|checkpoint|ckpt|cp|iter(?:ation)?|epoch)s?[=_\-.]?\d+(?=$|[^a-z0-9])",
    re.IGNORECASE,
)
_BARE_STEP = re.compile(r"^\d+(?:\.[A-Za-z]\w*)?$")
_BUNDLE = re.compile(r"^(?P<stem>.+)\.(?:index|data-\d{5}-of-\d{5})$")
_MARKER = re.compile(r"^optim(izer)?(_\d+)?\.(bin|pt|pth|pkl|safetensors)$|^random_states_\d+\.pkl$")
_ZIP, _HDF5, _NPY = b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY"
_PICKLE = re.compile(rb"^\x80(?:[\x04\x05]\x95|[\x02\x03][}\](cXq])", re.DOTALL)


class Unit(NamedTuple):
    path: str
    """For a group: its stem, with the directory."""
    kind: str
    numbered: bool
    """Its name has a step, so it is written once."""
    named: bool = True
    """The name says that it is a state. Otherwise its first bytes have to."""


def unit_of(path: str, is_set: Callable[[str], bool]) -> Optional[Unit]:
    """The unit that a file belongs to; None for a file that no unit has. `is_set`: whether a directory's files are one state
    (see `holds_set`). Of nested directories the outermost counts."""
    parts = path.split("/")
    if any(part in NEVER_ENTERED or part.endswith(TORN) for part in parts):
        return None
    found = _directory_of(parts, is_set)
    name = parts[-1]
    if found is not None:
        return None if checkpoint_names.is_unfinished(name) or is_note(name) else found
    if checkpoint_names.is_temporary(name) or is_note(name):
        return None
    bundle = _BUNDLE.match(name)
    if bundle:
        stem = bundle.group("stem")
        return Unit("/".join([*parts[:-1], stem]), GROUP, is_numbered(stem))
    return Unit(path, FILE, is_numbered(name), named=is_state_name(name))


def directory_unit_of(path: str, is_set: Callable[[str], bool]) -> Optional[Unit]:
    """The unit that a directory is, or is inside of."""
    parts = path.split("/")
    if any(part in NEVER_ENTERED or part.endswith(TORN) for part in parts):
        return None
    return _directory_of([*parts, ""], is_set)


def is_numbered(name: str) -> bool:
    """Whether a name has the step of a training: `epoch_3.pt`, `checkpoint-500`; not `version_0`, `run-3`, `exp1`."""
    return _STEP.search(name) is not None or ("." in name and _BARE_STEP.match(name) is not None)


def is_state_name(name: str) -> bool:
    return _STATE.search(name) is not None


def may_be_checkpoint(paths: Collection[str]) -> bool:
    """Whether a directory of these files is a checkpoint, and not other work that has a number in its name."""
    names = [path.rpartition("/")[2] for path in paths]
    return any(is_state_name(name) or _BUNDLE.match(name) for name in names)


def is_note(name: str) -> bool:
    """Logs, tables, texts, pictures, sources, archives: files that have no versions."""
    return _NO_STATE.search(name) is not None


def is_state_content(head: bytes) -> bool:
    """Whether a file without a telling name certainly is a state, by its first bytes."""
    if head.startswith((_ZIP, _HDF5, _NPY)) or _PICKLE.match(head):
        return True
    return head[4:9] == b"\0\0\0\0{"  # safetensors


def is_log(name: str, head: bytes) -> bool:
    """Whether a file of JSON is a log: lines, the first of which is complete by itself."""
    if not name.lower().endswith(".json"):
        return False
    line, _, rest = head.partition(b"\n")
    try:
        return isinstance(json.loads(line), (dict, list)) and bool(rest.strip())
    except (ValueError, RecursionError):
        return False


def holds_set(names: Collection[str]) -> bool:
    """Whether the files in a directory are one state, by their names: as accelerate writes it, torch.distributed.checkpoint,
    Keras' BackupAndRestore."""
    if any(_MARKER.match(name) for name in names):
        return any(is_state_name(name) and not _MARKER.match(name) for name in names)
    if ".metadata" in names:
        return any(name.endswith(".distcp") for name in names)
    return "training_metadata.json" in names and any(name.endswith(".weights.h5") for name in names)


def is_marker(name: str) -> bool:
    """Whether a file of this name makes its directory a set, together with others."""
    return _MARKER.match(name) is not None or name in (".metadata", "training_metadata.json")


def is_member(unit: Unit, path: str) -> bool:
    """Whether a file beneath the directory of a unit is part of it."""
    rest = path[len(unit.path) + 1 :].split("/")
    return not (
        any(part in NEVER_ENTERED or part.endswith(TORN) for part in rest)
        or checkpoint_names.is_unfinished(rest[-1])
        or is_note(rest[-1])
        or (unit.kind == SET and any(is_numbered(part) for part in rest[:-1]))
    )


def parent_of(path: str) -> str:
    return path.rpartition("/")[0]


def _directory_of(parts: "list[str]", is_set: Callable[[str], bool]) -> Optional[Unit]:
    for depth in range(1, len(parts)):
        path = "/".join(parts[:depth])
        if is_numbered(parts[depth - 1]):
            return Unit(path, DIRECTORY, True)
        if is_set(path):
            if any(is_numbered(part) for part in parts[depth:-1]):
                continue  # a numbered checkpoint inside is a unit by itself
            return Unit(path, SET, False)
    return None
