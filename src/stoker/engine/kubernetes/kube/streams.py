"""What flows both ways or without end: exec, port-forward, logs, watches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """A command that ran in a container to its end."""

    code: int
    stdout: bytes
    stderr: bytes
