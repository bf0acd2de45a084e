"""Gangs that are partly up, and which of them are released.

The queue starts gangs whole, but it does not own a cluster: others use it too, and the cluster's scheduler places one
pod at a time. So two gangs may each get half of what they need, and both would wait forever.

- A gang that is not complete within its time releases everything and is queued again.
- Where two or more gangs wait for room in the same place, the last in order (lowest priority, newest) are released
  early: as many as hold what the first one misses. The first one is never released, so one gang can start.
- After that all gangs get more time: released tasks have to end before others can use their room.
- Each gang comes back after its own wait. It doubles with every try and differs between gangs and tries, so that no
  two come back in step. It is derived from a hash, so a gang waits equally long after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 60.0
"""Seconds for pods to come up or go away, before lack of room counts as such."""
FIRST_WAIT = 10.0
LONGEST_WAIT = 600.0
"""Seconds."""


@dataclass(frozen=True)
class PartialGang:
    """A gang that is starting and not complete."""

    id: str
    up: int
    """How many of its tasks have their place."""
    wanted: int
    since: float
    """When it began to start."""
    within: float
    """Seconds that it may take."""
    priority: int
    seq: int
    tries: int = 0
    """How often it was released before."""
    no_room: bool = False
    """Whether its other tasks wait for room, and not for an image or a disk."""
    where: str = ""
    """The cluster in which it waits. Gangs in different clusters do not compete."""


@dataclass(frozen=True)
class LetGo:
    """A decision: the gang releases everything and is queued again."""

    id: str
    reason: str
    """For the user: lower-case, without a full stop."""
    retry_after: float
    """Seconds to wait before it may start again."""


class Deadlock:
    """Decides which gangs are released. Remembers only the time of the last release, so a new instance at worst waits
    a little longer. Not thread-safe; `now` never goes back."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        """Time of the last release, by cluster."""

    def judge(self, gangs: Sequence[PartialGang], now: float) -> list[LetGo]:
        decided: list[LetGo] = []
        for where in sorted({gang.where for gang in gangs}):
            here = sorted((gang for gang in gangs if gang.where == where), key=_order)
            decided += self._judge(here, where, now)
        return decided

    def _judge(self, here: list[PartialGang], where: str, now: float) -> list[LetGo]:
        recent = now - self._last.get(where, now - PATIENCE) < PATIENCE
        stuck = [gang for gang in here if gang.no_room and now - gang.since >= self._early(gang)]
        released: dict[str, str] = {}
        if len(stuck) > 1 and not recent:
            first = stuck[0]
            missing = first.wanted - first.up
            for gang in reversed(stuck[1:]):
                if missing <= 0:
                    break
                if gang.up:
                    released[gang.id] = (
                        f"it held {gang.up} of {gang.wanted} tasks while {first.id} waits for room too"
                    )
                    missing -= gang.up
        favoured = stuck[0].id if stuck and (released or recent) else None
        for gang in here:
            if now - gang.since >= gang.within and gang.id not in released and gang.id != favoured:
                released[gang.id] = f"only {gang.up} of {gang.wanted} tasks were up after {gang.within:g} s"
        if released:
            self._last[where] = now
        tries = {gang.id: gang.tries for gang in here}
        return [LetGo(id, reason, wait(id, tries[id])) for id, reason in released.items()]

    def _early(self, gang: PartialGang) -> float:
        return min(PATIENCE, gang.within / 2)


def wait(id: str, tries: int) -> float:
    """Seconds before a gang that was released `tries` times before may start again."""
    doubled = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(tries, 20))
    drawn: float = int.from_bytes(hashlib.sha256(f"{id}/{tries}".encode()).digest()[:8], "big") / 2**64
    return doubled * (0.5 + drawn)


def _order(gang: PartialGang) -> tuple[int, int, str]:
    return (-gang.priority, gang.seq, gang.id)
