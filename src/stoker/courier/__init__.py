"""Brings code and checkpoints into a task directory and carries checkpoints and outputs away.

    carry      the journeys, to and from directories near and far
    outputs    what a task leaves in its output directory
    merging    what several tasks left, as one tree, and back to each of them
    fetching   getting the bytes of a far directory
    walk       looking through a directory that belongs to somebody else
    sidecar    serves a task directory from inside a pod; standard library only

User code owns the task directory, so nothing in it is believed: every path is opened component by component
without following links, only regular files are taken, and everything is counted before it is read.
"""

from __future__ import annotations

TYPE_CHECKING = False  # nothing is imported until it is used: the sidecar runs where there is nothing else
if TYPE_CHECKING:
    from typing import Any

    from stoker.courier.carry import (
        bring_code,
        bring_outputs,
        carry_checkpoint,
        carry_outputs,
        merge_outputs,
        outputs_for,
        restore_checkpoint,
    )

__all__ = [
    "bring_code",
    "bring_outputs",
    "carry_checkpoint",
    "carry_outputs",
    "merge_outputs",
    "outputs_for",
    "restore_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("stoker.courier.carry"), name)
    raise AttributeError(f"module 'stoker.courier' has no attribute {name!r}")
