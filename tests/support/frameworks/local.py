"""A run on this machine: its members are processes here, and its log is files here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.journey import Journey
from support.processes import of_task


class LocalJourney(Journey):
    def _written(self) -> str:
        """The log as the launchers write it."""
        paths = (self.box.home.tasks / self.run).glob("*/*/log/*.log")
        return "".join(path.read_text(errors="replace") for path in paths)

    def directory(self, task: str) -> Path:
        attempts = sorted((self.box.home.tasks / self.run).iterdir(), key=lambda path: int(path.name))
        return attempts[-1] / task

    def kill(self, task: str) -> None:
        """Kill every process of the task's body, as the kernel does when memory runs out."""
        killed = [os.kill(pid, signal.SIGKILL) for pid in of_task(self.directory(task))]
        assert killed, f"{task} has no process"
