"""Never two at once: the rules by which a body starts, a record is accepted and a lost task is replaced.

Launcher and server apply them, and each can be cut off, late or suspended for hours:

    launcher   `may_start`   a body starts at most once per (attempt, generation, task)
    server     `accept`      only the newest generation of an attempt that has not ended may add anything
    server     `Vigil`       a task is replaced on proof of death, or after silence that this server observed

The rules are pure. Times are of a monotonic clock, and only differences observed by one process count. So a clock that
jumps, or a server that was suspended, proves nothing about a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from stoker.task import formats

KEEP = "keep"
"""Leave the task as it is: it is alive, or nothing is known."""
REPLACE = "replace"
"""Replace the task by a new incarnation in a new generation."""
END = "end"
"""The node is ready and the task does not answer: end it through the engine and wait for proof that it has ended."""

GAP = 0.25
"""The largest part of `lost_after` that one interval between two looks adds to a silence. A server that was itself frozen
or overloaded sees one long interval, and has to look again before it decides."""

LEASE_MARGIN = 1.1
"""A task counts as ended after this many times its lease: clocks of two machines run at different speeds, and ending
takes a moment."""


# -- the launcher's rule ---------------------------------------------------------------------------------------


def may_start(journal: Iterable[Mapping[str, Any]], order: formats.Order) -> bool:
    """Whether this order may fork a body, by the journal of this task directory.

    Only a `run` order may, with a larger number than every order acted on, for a larger generation than every one started
    here. So an order that arrives after its successor starts nothing, and a server that numbers an order again after a
    crash does not start the same generation twice. The caller syncs `starting` to the disk before it forks; where the
    journal cannot be written, nothing is started.
    """
    if order.verb != "run":
        return False
    for entry in journal:
        kind, seq, generation = entry.get("k"), entry.get("seq"), entry.get("generation")
        if kind not in ("starting", "ended") or not isinstance(seq, int):
            continue
        if order.seq <= seq:
            return False
        if kind == "starting" and isinstance(generation, int) and order.generation <= generation:
            return False
    return True


# -- the server's rules ----------------------------------------------------------------------------------------


def accept(record_generation: int, current_generation: int, ended: bool) -> bool:
    """Whether a checkpoint, metric, log line, output or ending of an attempt may still count.

    Call it in the transaction that adds the record, with the attempt's row read in that transaction. Then a record of an
    old generation is refused however late it arrives.
    """
    return not ended and record_generation == current_generation


@dataclass(frozen=True)
class TaskSight:
    """One task as the engine shows it at one look."""

    task: str
    """Names one incarnation: the silence of its successor is counted from zero."""
    presence: str
    """alive | gone (proof of death) | silent"""
    node: str = ""
    node_ready: Optional[bool] = None
    """Whether its node is ready; None: the engine does not tell."""
    lost_after: float = 120.0
    lease: Optional[float] = None
    """Seconds without a request after which the task ends itself; None: it never does."""
    exclusive: bool = False
    """Do not replace it on silence; wait for proof of death, or for the end of the lease."""


class Vigil:
    """Detects lost tasks by their silence. One per server process: silence before a restart, or while the engine did not
    answer, was not observed and does not count.

    The control loop calls `look` with everything the engine shows; from any thread, one at a time. Only the length of each
    task's silence is remembered.
    """

    def __init__(self) -> None:
        self._silent: Dict[str, float] = {}
        self._unready: Dict[str, float] = {}
        self._last: Optional[float] = None

    def look(self, now: float, sights: Optional[Sequence[TaskSight]]) -> Dict[str, str]:
        """What to do about each task. `now`: this process's monotonic clock. `sights` None: the engine did not answer,
        so nothing is known about its tasks."""
        if sights is None:
            self._last = None
            return {}
        passed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        self._silent = self._longer(self._silent, [s for s in sights if s.presence == "silent"], passed)
        self._unready = self._longer(self._unready, [s for s in sights if _unreachable(s)], passed)
        ours = mass_silence(sights)
        return {sight.task: self._decide(sight, ours) for sight in sights}

    def _longer(self, before: Dict[str, float], sights: List[TaskSight], passed: float) -> Dict[str, float]:
        """The first silent look counts as zero seconds; each later one adds the time since the last, up to a limit."""
        return {
            sight.task: before[sight.task] + min(passed, GAP * sight.lost_after)
            if sight.task in before
            else 0.0
            for sight in sights
        }

    def _decide(self, sight: TaskSight, ours: bool) -> str:
        if sight.presence == "gone":
            return REPLACE
        if sight.presence != "silent":
            return KEEP
        silent = self._silent[sight.task]
        if sight.lease is not None and silent >= max(sight.lease * LEASE_MARGIN, sight.lost_after):
            return REPLACE
        if ours or silent < sight.lost_after:
            return KEEP
        if sight.node_ready:
            return END
        if self._unready.get(sight.task, 0.0) < sight.lost_after or sight.exclusive:
            return KEEP
        return REPLACE


def mass_silence(sights: Sequence[TaskSight]) -> bool:
    """Whether most tasks are silent, on more than one node: then the server is more likely cut off than they are. One lost
    node with all its tasks does not count as such."""
    silent = [sight for sight in sights if sight.presence == "silent"]
    return 2 * len(silent) > len(sights) and len({sight.node for sight in silent}) > 1


def _unreachable(sight: TaskSight) -> bool:
    return sight.presence == "silent" and sight.node_ready is False
