"""Whether a body still says or does anything, and what its processes do when it does not.

Signs of life are output, reports, new entries among checkpoints and outputs, and use of a GPU. After the set time
without any, the stacks of its processes are taken by a helper beside it (`helpers/stacks.py`): the body itself is
left alone, and the launcher never waits. While it stays silent they are taken again each time that long has passed: who
finds later that all of a world were hung has stacks from when they were.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping, NamedTuple, Optional, Tuple

from stoker.launcher import helpers
from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.process.spawn import CannotStart, spawn
from stoker.launcher.telemetry.framing import Redactor, Stream
from stoker.launcher.telemetry.output_log import OutputLog, pipe
from stoker.launcher.telemetry.sampler import Sampler
from stoker.task import layout
from stoker.task.formats import Order, TaskInfo

LOOK_EVERY = 5.0
SOONEST = 0.1
HOW = {0: "py-spy", 1: "faulthandler"}
"""By the helper's exit status."""


class Watched(NamedTuple):
    """What is known of the body from elsewhere."""

    tree: Optional[ProcessTree]
    """None: its processes are out of sight, in a container that is not ours to look into."""
    log: OutputLog
    sampler: Sampler
    redact: Redactor


class HangDetector:
    """Of one body whose order has `hang_after`. `poll` in the launcher's loop while it runs; `exited` for every end."""

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
        """When the last sign was seen."""
        self._taken = 0.0
        """When stacks were taken last, or there was no need to."""
        self._said = False
        """The present silence is in the journal."""
        self._count = 0
        self._helper: Optional[int] = None
        self._seconds: Optional[float] = None
        """How long it had been silent when stacks were taken; None: it is not any more."""

    def begin(self) -> None:
        try:
            os.makedirs(os.path.join(self._directory, layout.STACKS), exist_ok=True)
        except OSError:
            # No room now: there may be some when they are taken.
            pass

    def poll(self, now: float, env: Mapping[str, str]) -> float:
        """Look; seconds until the next time. `env`: of the body, for the tools it has."""
        signs = (self._watched.log.heard, *(_stamp(place) for place in self._places))
        if signs != self._signs or self._busy():
            self._signs, self._since, self._taken, self._seconds = signs, now, now, None
            if self._said:
                self._said = False
                self._note({"k": "alive"})
        elif now - self._taken >= self.after and self._helper is None:
            self._taken, self._seconds = now, now - self._since
            self._take(env)
        return max(SOONEST, min(LOOK_EVERY, self.after / 4))

    def exited(self, pid: int, status: int) -> None:
        if pid == self._helper:
            self._helper = None
            self._say(HOW.get(os.WEXITSTATUS(status), "none") if os.WIFEXITED(status) else "none")

    def _busy(self) -> bool:
        return any((gpu.get("use") or 0) > 0 for gpu in self._watched.sampler.gpus.latest)

    def _take(self, env: Mapping[str, str]) -> None:
        if not self._said:
            self._count += 1
            self._watched.log.say(f"no sign of life for {self.after:g} s; its processes are here:")
        tree = self._watched.tree
        pids = [] if tree is None else tree.pids()
        words = [helpers.MARK, "stacks", os.path.join(self._directory, self._path)]
        try:
            reader, writer = pipe()
        except OSError:
            self._say("none")
            return
        try:
            argv = helpers.command([*words, *(str(pid) for pid in pids)], self._bundle)
            self._helper = spawn(
                argv, env, directory=self._directory, stdout=writer, stderr=writer, info=self._info
            )
        except CannotStart as exc:
            os.close(reader)
            self._watched.log.say(exc.message)
            self._say("none")
            return
        finally:
            os.close(writer)
        if tree is not None:
            tree.empty = False
        if self._said:
            # They go into the file; the log has them from the first time.
            os.close(reader)
        else:
            self._watched.log.attach(reader, Stream("s", self._watched.redact))

    def _say(self, how: str) -> None:
        if not self._said and self._seconds is not None:
            self._said = True
            self._note({"k": "hang", "seconds": round(self._seconds, 1), "stacks": self._path, "how": how})

    def _note(self, entry: Mapping[str, Any]) -> None:
        self._journal({**entry, "seq": self._order.seq, "generation": self._order.generation})

    @property
    def _path(self) -> str:
        return layout.stacks(self._order.generation, self._count)


def _stamp(place: str) -> Tuple[int, int]:
    """Changes when something right beneath it is written, comes or goes."""
    try:
        with os.scandir(place) as entries:
            size = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
        return os.stat(place).st_mtime_ns, size
    except OSError:
        return 0, 0
