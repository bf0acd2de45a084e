"""What names in a checkpoint directory mean: which belong together, which never count, and the step they speak of.

The launcher goes by them where checkpoints are written, the server where it puts together what several tasks wrote.
"""

from __future__ import annotations

import functools
import re
from typing import Dict, Iterable, List, Optional

_UNFINISHED = re.compile(
    r"^~.|.~$|^\.tmp|^tmp[-_]|_temp$|\.orbax-checkpoint-tmp|\.tempstate\d*$|\.(tmp|temp)([-_.]?[0-9a-f]+)?$"
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
"""Files that only name the newest checkpoint (TensorFlow, DeepSpeed, Megatron). Scripts give these names to whole checkpoints
too: what is there tells (`launcher/checkpoints/snapshot.is_pointer`)."""


def is_temporary(name: str) -> bool:
    """Whether an entry never counts by its name: it is still being written, or hidden."""
    return name.startswith(".") or is_unfinished(name)


def is_unfinished(name: str) -> bool:
    """Whether a name is one that writers use for unfinished files. Inside a directory, hidden files may be finished."""
    return _UNFINISHED.search(name) is not None


def final_name(name: str) -> str:
    """The probable final name of an entry with a temporary name."""
    return _MADE_BY.sub("", _UNFINISHED.sub("", name)).lstrip(".") or name


@functools.lru_cache(maxsize=65536)
def unit_of(name: str) -> Optional[str]:
    """The checkpoint that a top-level entry belongs to; None for an entry that never is one."""
    if is_temporary(name) or _SIDE.search(name):
        return None
    for pattern in (_TF_PART, _SHARD, _SHARD_INDEX):
        found = pattern.match(name)
        if found:
            return found.group("stem")
    return name


def is_weak(unit: str) -> bool:
    """Whether it is text that may be a checkpoint (`state.json`) or a note beside one (`config.json`).

    It counts as a checkpoint only where nothing else in the directory is one.
    """
    return _WEAK.search(unit) is not None or is_note(unit)


def is_note(unit: str) -> bool:
    """Whether it is text of a kind that loggers write in place, line by line or once at the start. It counts as a checkpoint
    only if it was renamed into place."""
    return _NOTE.search(unit) is not None


def step_of(name: str) -> Optional[int]:
    """The training step in a name: `step-100`, `checkpoint-500`, `epoch=3-step=400.ckpt`, `ckpt-3`."""
    for pattern in _STEP:
        found = pattern.search(name)
        if found and len(found.group(1)) <= 15:
            return int(found.group(1))
    return None


def group(names: Iterable[str]) -> Dict[str, List[str]]:
    """Top-level entries by checkpoint, sorted."""
    units: Dict[str, List[str]] = {}
    for name in names:
        unit = unit_of(name)
        if unit is not None:
            units.setdefault(unit, []).append(name)
    for members in units.values():
        members.sort()
    return units


def strong_units(units: Dict[str, List[str]]) -> Dict[str, List[str]]:
    """The checkpoints without the notes beside them; only notes, if there is nothing else."""
    strong = {name: members for name, members in units.items() if not is_weak(name)}
    return strong or units


def is_partial(members: List[str]) -> bool:
    """Whether it is a TensorFlow group without its index, which is written last."""
    parts = [member for member in members if ".data-" in member and _TF_PART.match(member)]
    return bool(parts) and len(parts) == len(members)
