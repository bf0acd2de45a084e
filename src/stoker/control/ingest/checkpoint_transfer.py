"""Threads that move checkpoints from task directories to the blobs, while logs and metrics are read and runs are stopped."""

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
"""Transfers at a time. Most of them rest most of the time, or wait for a network."""
RUNS_AT_ONCE = 128
"""Up to this many, a run that has no transfer under way gets one, however many others have: slow pods of one run do not
hold up another. A transfer takes up to 12 MiB of memory."""

Work = Callable[[], bool]
"""One transfer. True: there is another one after it. Raises nothing but Abandoned."""


class Abandoned(Exception):
    """The server ends, or begins again from the database. The next one goes on with what has arrived."""


class CheckpointTransfers:
    """Of one session with the database; used from any thread. Runs take turns."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="checkpoints")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()
        """By run; the one whose turn is next comes first."""
        self._under_way: Counter[str] = Counter()
        self._closing = threading.Event()

    def add(self, run: str, work: Work) -> None:
        """Call `work` in a thread of ours, again and again while it returns True."""
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
        """As `carry_checkpoint`, from a thread of ours. A large one beside the training gives way to it, until it is
        `hurried`."""
        self._go_on()
        if directory.turns is None or size < LARGE:
            return carry_checkpoint(directory, staged, blobs, pause=self._go_on, rename=rename)
        with IdleThrottle(lambda: self._closing.is_set() or hurried(), directory.turns) as rests:
            return carry_checkpoint(directory, staged, blobs, pause=self._pause(rests.pause), rename=rename)

    def wait(self, seconds: float) -> None:
        """Before another try. Abandoned as soon as the session ends."""
        self._closing.wait(seconds)
        self._go_on()

    def close(self) -> None:
        """What is under way is broken off after the piece it is at, and what waits for its turn never begins."""
        self._closing.set()
        with self._lock:
            self._waiting.clear()
        self._threads.shutdown(wait=False)

    def _due(self) -> list[tuple[str, Work]]:
        """What may start now counts as under way. Called with the lock."""
        found: list[tuple[str, Work]] = []
        if self._closing.is_set():
            return found
        total = self._under_way.total()
        for run in list(self._waiting):
            if total + len(found) < (AT_ONCE if self._under_way[run] else RUNS_AT_ONCE):
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
        self._under_way[run] += 1
        return run, work

    def _begin(self, due: list[tuple[str, Work]]) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
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
                self._under_way[run] -= 1
                if more and not self._closing.is_set():
                    self._waiting.setdefault(run, deque()).append(work)
                due = self._due()
                self._under_way += Counter()  # runs that have none any more are forgotten
            self._begin(due)

    def _pause(self, rest: Pause) -> Pause:
        def pause() -> None:
            rest()
            self._go_on()

        return pause

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise Abandoned
