"""The server's side of transfers: code, checkpoints and outputs into task directories; checkpoints and outputs out.

transfers  the operations, for local and remote task directories
folder     what a run keeps of its working folder
outputs    the files of a task's output directory
merge      merges the outputs of several tasks into one tree, and makes each task's view of it
fetch      copies the bytes of a remote task directory
walk       lists a directory that user code owns

User code owns the task directory, so nothing in it is trusted: every path is opened component by component without
following links, only regular files are taken, and everything is counted before it is read.
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
