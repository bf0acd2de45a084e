"""Never two at once: the rules by which a body starts, a record is believed and a lost task is replaced.

Three parties keep them, and each can be alone, late or asleep for hours:

    launcher   `may_start`   a body starts at most once per (attempt, generation, task)
    server     `accept`      only the newest generation of an attempt that has not ended may add anything
    server     `Vigil`       a task is replaced on proof of death, or after silence that was really watched

The rules are pure. Time is whatever monotonic clock the caller reads, and only differences observed by one
process count, so that a clock that jumps and a server that slept prove nothing about a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from stoker.task import formats

KEEP = "keep"
"""Leave it: it is there, or nothing is known."""
REPLACE = "replace"
"""Give its place to a new incarnation in a new generation."""
END = "end"
"""Its node is ready and it does not answer: end it through the engine and wait for the proof."""

GAP = 0.25
"""The largest share of `lost_after` that one pause between two looks can add to a silence. A server that was
itself frozen or swamped sees one long pause, and must look again before it concludes anything."""

LEASE_MARGIN = 1.1
"""How much longer than its lease a task must be silent before it counts as having given up: clocks of two
machines do not run at the same speed, and ending takes a moment."""


# -- the launcher's rule ---------------------------------------------------------------------------------------


def may_start(journal: Iterable[Mapping[str, Any]], order: formats.Order) -> bool:
    """Whether this order may fork a body, by all that the journal of this task directory says.

    Only a `run` that is newer than every order acted on, for a generation newer than every one started here.
    Newer by number, not merely other: an order that was delayed and arrives after its successor is dead, and
    a server that numbers its order anew after a crash does not start the same generation again. The caller
    has `starting` on the disk before it forks; a journal that cannot be written starts nothing.
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

    To be asked in the transaction that records it, against the attempt's row read in that transaction: then
    what is fenced is fenced however late it arrives.
    """
    return not ended and record_generation == current_generation


@dataclass(frozen=True)
class TaskSight:
    """One task as the engine shows it at one look."""

    task: str
    """Names one incarnation: a successor is another task to be watched from the start."""
    presence: str
    """alive | gone (proof of death) | silent"""
    node: str = ""
    node_ready: Optional[bool] = None
    """What the engine says of its node; None: the engine does not say."""
    lost_after: float = 120.0
    lease: Optional[float] = None
    """Seconds without a request after which the task ends itself; None: it never does."""
    exclusive: bool = False
    """Do not replace on silence; wait for proof, or for the lease to have run out."""


class Vigil:
    """Watches for tasks that are lost. Belongs to one server process and lives as long as it: silence that
    nobody watched, before a restart or while the engine did not answer, does not count.

    `look` is called with everything the engine shows, at the pace of the control loop; any thread, one at a
    time. It remembers only how long each task has been silent.
    """

    def __init__(self) -> None:
        self._silent: Dict[str, float] = {}
        self._unready: Dict[str, float] = {}
        self._last: Optional[float] = None

    def look(self, now: float, sights: Optional[Sequence[TaskSight]]) -> Dict[str, str]:
        """What to do about each task. `now`: this process's monotonic clock. `sights` None: the engine did
        not answer, which says nothing about its tasks."""
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
        """A first silent look is zero seconds of silence; each later one adds what passed, within bounds."""
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
    """Most tasks are silent, on more than one node: more likely we are cut off than they. One node that is
    lost with everything on it is not that."""
    silent = [sight for sight in sights if sight.presence == "silent"]
    return 2 * len(silent) > len(sights) and len({sight.node for sight in silent}) > 1


def _unreachable(sight: TaskSight) -> bool:
    return sight.presence == "silent" and sight.node_ready is False
