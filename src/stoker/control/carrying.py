"""Taking in large checkpoints on threads of their own, while logs, metrics and those who want to stop a run go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from stoker.blobs import BlobStore
from stoker.courier import carry_checkpoint
from stoker.task.access import FarTaskDir, TaskDir
from stoker.task.formats import StagedCheckpoint
from stoker.task.spare import Pause, Spare, none

_AT_ONCE = 8


class Abandoned(Exception):
    """The server ends. Whoever comes next goes on with what has arrived."""


class Carriers:
    """One per server; used from any thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checkpoints")
        self._closing = False

    def carry(
        self, directory: TaskDir, staged: StagedCheckpoint, blobs: BlobStore, hurried: Callable[[], bool]
    ) -> Future[tuple[str, int]]:
        """As `carry_checkpoint`. Beside the training it gives way to it, until it is `hurried`."""
        rest = none if isinstance(directory, FarTaskDir) else Spare(lambda: self._closing or hurried()).pause
        return self._threads.submit(carry_checkpoint, directory, staged, blobs, pause=self._pause(rest))

    def close(self) -> None:
        """What is under way is broken off after the piece it is at."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pause(self, rest: Pause) -> Pause:
        def pause() -> None:
            rest()
            if self._closing:
                raise Abandoned

        return pause
