"""The server's side of moving trees: code and checkpoints into a task directory, checkpoints and outputs out of it.

transfers  the operations, on local and remote task directories alike
outputs    what a task leaves in its output directory
merge      what several tasks left, as one tree, and back to each of them
fetch      copies the bytes of a remote directory
walk       looks through a directory that user code owns

User code owns the task directory, so nothing in it is believed: every path is opened component by component
without following links, only regular files are taken, and everything is counted before it is read.
"""

from stoker.transfer.transfers import (
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
