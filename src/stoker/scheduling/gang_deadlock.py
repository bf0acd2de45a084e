"""Gangs that are partly up, and who of them lets go.

The queue starts gangs whole, but it does not own a cluster: others use it too, and its own scheduler places one pod at
a time. So of two gangs each may get half of what it needs, and both would wait for ever.

- A gang that is not complete within its time lets go of all it has and is queued again.
- Where two or more wait for room in the same place, the last in the order (lowest priority, newest) let go early: as
  many as hold what the first one misses. The first one is never asked, so one of them gets through.
- After that everybody is given time again: what was let go has to end before others can have it.
- Each comes back after a wait of its own: it doubles with every try, and differs from gang to gang and from try to
  try, so that no two come back in step. It is drawn from a hash, so the same gang waits the same after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATIENCE = 60.0
"""Seconds for pods to come up or go away, before a lack of room is taken for what it is."""
FIRST_WAIT = 10.0
LONGEST_WAIT = 600.0
"""Seconds."""


@dataclass(frozen=True)
class PartialGang:
    """A gang that is starting and not complete."""

    id: str
    up: int
    """So many of its tasks have their place."""
    wanted: int
    since: float
    """When it began to start."""
    within: float
    """Seconds it may take."""
    priority: int
    seq: int
    tries: int = 0
    """How often it let go before."""
    no_room: bool = False
    """Its other tasks wait for room, and not for an image or a disk."""
    where: str = ""
    """The cluster it waits in. Gangs in different ones do not stand in one another's way."""


@dataclass(frozen=True)
class LetGo:
    """A decision: give back everything and be queued again."""

    id: str
    reason: str
    """For a person: lower-case, without a full stop."""
    retry_after: float
    """Seconds to wait before it may start again."""


class Deadlock:
    """Who lets go. Remembers only when somebody last did, so that a new one at worst waits a little longer.
    Not thread-safe; `now` never goes back."""

    def __init__(self, patience: float = PATIENCE, last: Mapping[str, float] | None = None) -> None:
        self._patience = patience
        self._last = dict(last or {})
        """When somebody last let go, by cluster."""

    def judge(self, halves: Sequence[PartialGang], now: float) -> list[LetGo]:
        decided: list[LetGo] = []
        for where in sorted({half.where for half in halves}):
            here = sorted((half for half in halves if half.where == where), key=_order)
            decided += self._judge(here, where, now)
        return decided

    def _judge(self, here: list[PartialGang], where: str, now: float) -> list[LetGo]:
        recent = now - self._last.get(where, now - self._patience) < self._patience
        stuck = [half for half in here if half.no_room and now - half.since >= self._early(half)]
        gone: dict[str, str] = {}
        if len(stuck) > 1 and not recent:
            first = stuck[0]
            missing = first.wanted - first.up
            for half in reversed(stuck[1:]):
                if missing <= 0:
                    break
                if half.up:
                    gone[half.id] = (
                        f"it held {half.up} of {half.wanted} tasks while {first.id} waits for room too"
                    )
                    missing -= half.up
        favoured = stuck[0].id if stuck and (gone or recent) else None
        for half in here:
            if now - half.since >= half.within and half.id not in gone and half.id != favoured:
                gone[half.id] = f"only {half.up} of {half.wanted} tasks were up after {half.within:g} s"
        if gone:
            self._last[where] = now
        tries = {half.id: half.tries for half in here}
        return [LetGo(id, reason, wait(id, tries[id])) for id, reason in gone.items()]

    def _early(self, half: PartialGang) -> float:
        return min(self._patience, half.within / 2)


def wait(id: str, tries: int) -> float:
    """Seconds before a gang that let go so many times before may start again."""
    doubled = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(tries, 20))
    drawn: float = int.from_bytes(hashlib.sha256(f"{id}/{tries}".encode()).digest()[:8], "big") / 2**64
    return doubled * (0.5 + drawn)


def _order(half: PartialGang) -> tuple[int, int, str]:
    return (-half.priority, half.seq, half.id)
