"""Brings code and checkpoints into a task directory and carries checkpoints and outputs away.

    carry    the four journeys
    walk     looking through a directory that belongs to somebody else

User code owns the task directory, so nothing in it is believed: every path is opened component by component
without following links, only regular files are taken, and everything is counted before it is read.
"""

from stoker.courier.carry import (
    bring_code,
    bring_outputs,
    carry_checkpoint,
    carry_outputs,
    restore_checkpoint,
)

__all__ = ["bring_code", "bring_outputs", "carry_checkpoint", "carry_outputs", "restore_checkpoint"]
