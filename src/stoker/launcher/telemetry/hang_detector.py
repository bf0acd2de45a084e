"""Detects a body that hangs, and saves the stacks of its processes.

Signs of life are output, reports, new entries among checkpoints and outputs, and use of a GPU. After the configured time
without any, a helper (`helpers/stacks.py`) takes the stacks of the processes. The body is not disturbed, and the launcher does
not wait. While the silence lasts, the stacks are taken again after each such time: when all tasks of a world turn out to hang,
there are stacks of all of them from that time.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping, NamedTuple, Optional, Tuple

from stoker.launcher import helpers
from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.process.spawn import CannotStart, spawn
from stoker.launcher.telemetry.framing import Stream
from stoker.launcher.telemetry.log_redaction import Redactor
from stoker.launcher.telemetry.output_log import OutputLog, pipe
from stoker.launcher.telemetry.sampler import Sampler
from stoker.task import layout
from stoker.task.formats import Order, TaskInfo

LOOK_EVERY = 5.0
SOONEST = 0.1
HOW = {0: "py-spy", 1: "faulthandler"}
"""How the stacks were taken, by the helper's exit status."""


class Watched(NamedTuple):
    """The sources of the signs of life."""

    tree: Optional[ProcessTree]
    """None: the processes are in a foreign container and not visible."""
    log: OutputLog
    sampler: Sampler
    redact: Redactor


class HangDetector:
    """For one body whose order has `hang_after`. The launcher's loop calls `poll` while the body runs, and `exited` for
    every process that ends."""

    def __init__(
        self,
        directory: str,
        info: TaskInfo,
        order: Order,
        watched: Watched,
        journal: Callable[[Mapping[str, Any]], None],
        bundle: Optional[str],
    ) -> None:
        assert order.hang_after is not None
        self.after = order.hang_after
        self._directory = directory
        self._info = info
        self._order = order
        self._watched = watched
        self._journal = journal
        self._bundle = bundle
        places = (layout.METRICS, layout.checkpoints(order.generation), layout.OUTPUT)
        self._places = [os.path.join(directory, name) for name in places]
        self._signs: Optional[Tuple[Any, ...]] = None
        self._since = 0.0
        """Time of the last sign of life."""
        self._taken = 0.0
        """Time of the last stacks, or of the last sign of life."""
        self._reported = False
        """Whether the present silence is in the journal."""
        self._count = 0
        self._helper: Optional[int] = None
        self._seconds: Optional[float] = None
        """Length of the silence when the stacks were taken; None: it has ended."""

    def begin(self) -> None:
        try:
            os.makedirs(os.path.join(self._directory, layout.STACKS), exist_ok=True)
        except OSError:
            # The disk is full. There may be space when the stacks are taken.
            pass

    def poll(self, now: float, env: Mapping[str, str]) -> float:
        """Check for signs of life; seconds until the next call. `env`: the body's environment, whose tools are used."""
        signs = (self._watched.log.received, *(_stamp(place) for place in self._places))
        if signs != self._signs or self._busy():
            self._signs, self._since, self._taken, self._seconds = signs, now, now, None
            if self._reported:
                self._reported = False
                self._journal_entry({"k": "alive"})
        elif now - self._taken >= self.after and self._helper is None:
            self._taken, self._seconds = now, now - self._since
            self._take_stacks(env)
        return max(SOONEST, min(LOOK_EVERY, self.after / 4))

    def exited(self, pid: int, status: int) -> None:
        if pid == self._helper:
            self._helper = None
            self._report(HOW.get(os.WEXITSTATUS(status), "none") if os.WIFEXITED(status) else "none")

    def _busy(self) -> bool:
        return any((gpu.get("use") or 0) > 0 for gpu in self._watched.sampler.gpus.latest)

    def _take_stacks(self, env: Mapping[str, str]) -> None:
        if not self._reported:
            self._count += 1
            self._watched.log.say(f"no sign of life for {self.after:g} s; its processes are here:")
        tree = self._watched.tree
        pids = [] if tree is None else tree.pids()
        words = [helpers.MARK, "stacks", os.path.join(self._directory, self._path)]
        try:
            reader, writer = pipe()
        except OSError:
            self._report("none")
            return
        try:
            argv = helpers.command([*words, *(str(pid) for pid in pids)], self._bundle)
            self._helper = spawn(
                argv, env, directory=self._directory, stdout=writer, stderr=writer, info=self._info
            )
        except CannotStart as exc:
            os.close(reader)
            self._watched.log.say(exc.message)
            self._report("none")
            return
        finally:
            os.close(writer)
        if tree is not None:
            tree.empty = False
        if self._reported:
            # The stacks go into the file only; those of the first time are in the log.
            os.close(reader)
        else:
            self._watched.log.attach(reader, Stream("s", self._watched.redact))

    def _report(self, how: str) -> None:
        if not self._reported and self._seconds is not None:
            self._reported = True
            self._journal_entry(
                {"k": "hang", "seconds": round(self._seconds, 1), "stacks": self._path, "how": how}
            )

    def _journal_entry(self, entry: Mapping[str, Any]) -> None:
        self._journal({**entry, "seq": self._order.seq, "generation": self._order.generation})

    @property
    def _path(self) -> str:
        return layout.stacks(self._order.generation, self._count)


def _stamp(place: str) -> Tuple[int, int]:
    """Changes when a file directly in this directory is written, created or removed."""
    try:
        with os.scandir(place) as entries:
            size = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
        return os.stat(place).st_mtime_ns, size
    except OSError:
        return 0, 0
