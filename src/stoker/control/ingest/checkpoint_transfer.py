"""Taking in large checkpoints on threads of their own, while logs, metrics and those who want to stop a run go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from stoker.blobs import BlobStore
from stoker.linux.idle_throttle import IdleThrottle, Pause
from stoker.task.directory import TaskDir
from stoker.task.formats import StagedCheckpoint
from stoker.transfer import carry_checkpoint

_AT_ONCE = 32
"""Most of them rest most of the time, or wait for a network."""


class Abandoned(Exception):
    """The server ends, or begins again from the database. Whoever comes next goes on with what has arrived."""


class CheckpointTransfers:
    """Of one session with the database; used from any thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checkpoints")
        self._closing = False

    def carry(
        self,
        directory: TaskDir,
        staged: StagedCheckpoint,
        blobs: BlobStore,
        hurried: Callable[[], bool],
        rename: Callable[[str], str] | None = None,
    ) -> Future[tuple[str, int]]:
        """As `carry_checkpoint`. Beside the training it gives way to it, until it is `hurried`."""

        def work() -> tuple[str, int]:
            self._go_on()
            if directory.turns is None:
                return carry_checkpoint(directory, staged, blobs, pause=self._go_on, rename=rename)
            with IdleThrottle(lambda: self._closing or hurried(), directory.turns) as rests:
                pause = self._pause(rests.pause)
                return carry_checkpoint(directory, staged, blobs, pause=pause, rename=rename)

        try:
            return self._threads.submit(work)
        except RuntimeError:  # closed
            refused: Future[tuple[str, int]] = Future()
            refused.set_exception(Abandoned())
            return refused

    def close(self) -> None:
        """What is under way is broken off after the piece it is at, and what waits for its turn never begins."""
        self._closing = True
        self._threads.shutdown(wait=False)

    def _pause(self, rest: Pause) -> Pause:
        def pause() -> None:
            rest()
            self._go_on()

        return pause

    def _go_on(self) -> None:
        if self._closing:
            raise Abandoned
