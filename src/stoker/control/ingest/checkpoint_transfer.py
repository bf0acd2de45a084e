"""Threads that move checkpoints from task directories to the blobs, without delaying logs, metrics and stops."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from stoker.blobs import BlobStore
from stoker.linux.direct_io import LARGE
from stoker.linux.idle_throttle import IdleThrottle, Pause
from stoker.task.directory import TaskDir
from stoker.task.formats import StagedCheckpoint
from stoker.transfer import carry_checkpoint

AT_ONCE = 32
"""Transfers at a time. Most of them pause most of the time, or wait for the network."""
RUNS_AT_ONCE = 128
"""Up to this many transfers, a run without an active one gets one, regardless of AT_ONCE: slow pods of one run do not
delay another run. A transfer takes up to 12 MiB of memory."""

Work = Callable[[], bool]
"""One transfer. Returns True if another one follows. Raises only Abandoned."""


class Abandoned(Exception):
    """The server is ending, or reloads from the database. The next session continues with the bytes that have arrived."""


class CheckpointTransfers:
    """The transfers of one session with the database. Thread-safe. Runs take turns."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="checkpoints")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()
        """By run, in the order of their turns."""
        self._active: Counter[str] = Counter()
        self._closing = threading.Event()

    def add(self, run: str, work: Work) -> None:
        """Call `work` in a transfer thread, again and again while it returns True."""
        with self._lock:
            self._waiting.setdefault(run, deque()).append(work)
            due = self._due()
        self._begin(due)

    def carry(
        self,
        directory: TaskDir,
        staged: StagedCheckpoint,
        blobs: BlobStore,
        *,
        size: int,
        hurried: Callable[[], bool],
        rename: Callable[[str], str] | None = None,
    ) -> tuple[str, int]:
        """Like `carry_checkpoint`; called in a transfer thread. The transfer of a large checkpoint leaves the CPUs
        to the training on the same machine, until `hurried` returns True."""
        self._check()
        if directory.turns is None or size < LARGE:
            return carry_checkpoint(directory, staged, blobs, pause=self._check, rename=rename)
        with IdleThrottle(lambda: self._closing.is_set() or hurried(), directory.turns) as throttle:
            return carry_checkpoint(
                directory, staged, blobs, pause=self._pause(throttle.pause), rename=rename
            )

    def wait(self, seconds: float) -> None:
        """Wait before a retry. Raises Abandoned as soon as the session ends."""
        self._closing.wait(seconds)
        self._check()

    def close(self) -> None:
        """Stop active transfers after their current piece, and discard those that wait. Does not wait for the threads."""
        self._closing.set()
        with self._lock:
            self._waiting.clear()
        self._threads.shutdown(wait=False)

    def _due(self) -> list[tuple[str, Work]]:
        """Take the transfers that may start now and count them as active. Called with the lock."""
        found: list[tuple[str, Work]] = []
        if self._closing.is_set():
            return found
        total = self._active.total()
        for run in list(self._waiting):
            if total + len(found) < (AT_ONCE if self._active[run] else RUNS_AT_ONCE):
                found.append(self._next(run))
        while total + len(found) < AT_ONCE and self._waiting:
            found.append(self._next(next(iter(self._waiting))))
        return found

    def _next(self, run: str) -> tuple[str, Work]:
        work = self._waiting[run].popleft()
        if self._waiting[run]:
            self._waiting.move_to_end(run)
        else:
            del self._waiting[run]
        self._active[run] += 1
        return run, work

    def _begin(self, due: list[tuple[str, Work]]) -> None:
        with contextlib.suppress(RuntimeError):  # shut down meanwhile
            for run, work in due:
                self._threads.submit(self._do, run, work)

    def _do(self, run: str, work: Work) -> None:
        more = False
        try:
            more = not self._closing.is_set() and work()
        except Abandoned:
            pass
        finally:
            with self._lock:
                self._active[run] -= 1
                if more and not self._closing.is_set():
                    self._waiting.setdefault(run, deque()).append(work)
                due = self._due()
                self._active += Counter()  # removes runs without active transfers
            self._begin(due)

    def _pause(self, rest: Pause) -> Pause:
        def pause() -> None:
            rest()
            self._check()

        return pause

    def _check(self) -> None:
        if self._closing.is_set():
            raise Abandoned
