"""What becomes of a unit after its writer has died, and which versions are made. Pure."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from stoker.launcher.folder import units
from stoker.launcher.folder.units import Unit

STAYS, PUT_BACK, TORN = "stays", "put back", "torn"

KEPT = 2
"""Versions of a unit. The newest can be a link to a file that is overwritten; then the one before it counts."""
CROWD = 32
"""Units of one directory that get a version when they are first written. A directory with more holds data."""
MOST_UNITS = 256
"""Units that have versions. The one whose version is oldest loses it first."""
RECENT = 30.0
"""Seconds before the last write in which a unit that has settled is checked all the same. A process may have died in the middle of
a write while the others of the body went on for a while."""


class Facts(NamedTuple):
    unit: Unit
    settled: bool
    """It is as it was when it last settled."""
    whole: Optional[bool]
    """What its format proves; None: neither."""
    version: bool
    """There is a complete version."""
    replaced: bool = False
    """It was renamed into place before, and is another file since: probably by another rename."""


def decide(facts: Facts, *, violent: bool) -> str:
    """`violent`: a signal ended the body; otherwise only what the format proves damaged is touched."""
    unit = facts.unit
    if facts.whole is False:
        return PUT_BACK if facts.version else TORN
    if facts.settled or not violent:
        return STAYS
    if facts.whole is None and facts.replaced:
        return STAYS
    # Each file of a set can be whole, and yet they are of different saves.
    if facts.whole and not (unit.kind == units.SET and facts.version):
        return STAYS
    if facts.version:
        return PUT_BACK
    if unit.kind == units.DIRECTORY and not facts.whole:
        return TORN
    return STAYS


class Admission:
    """Which units get a version. Data that a run writes are files like its states, but written once, and many."""

    def __init__(self) -> None:
        self._by_directory: Dict[str, Set[str]] = {}
        self._total = 0

    def admits(self, unit: Unit, *, rewritten: bool) -> bool:
        """`rewritten`: it had settled before, or has a version."""
        if unit.numbered:
            return False
        known = self._by_directory.setdefault(units.parent_of(unit.path), set())
        if unit.path in known or rewritten:
            return True
        if len(known) >= CROWD or self._total >= MOST_UNITS:
            return False
        known.add(unit.path)
        self._total += 1
        return True


class VersionFacts(NamedTuple):
    number: int
    linked: bool
    """Its files are links to those of the folder at that time, not copies."""


def superfluous(versions: Sequence[VersionFacts]) -> List[int]:
    """Numbers of the versions of one unit that can go. Of the linked ones only the newest is kept: a file that is replaced by a
    rename is never torn."""
    kept: List[int] = []
    links = 0
    for version in sorted(versions, reverse=True):
        links += version.linked
        if len(kept) < KEPT and (not version.linked or links == 1):
            kept.append(version.number)
    return [version.number for version in versions if version.number not in kept]


def over_limit(newest: Dict[str, int], limit: int = MOST_UNITS) -> List[str]:
    """Paths of the units that lose their versions. `newest`: the number of each unit's newest version."""
    excess = max(0, len(newest) - limit)
    return sorted(newest, key=lambda path: newest[path])[:excess]


def worth_a_copy(found: Sequence[Tuple[float, int, Unit]], budget: int, limit: int = CROWD) -> List[Unit]:
    """Of the units that are there before the body starts (time, bytes, unit), those that get a copy: a first write can be
    torn too. The newest first, within the budget."""
    chosen: List[Unit] = []
    for _, size, unit in sorted(found, key=lambda one: (-one[0], one[2].path)):
        if len(chosen) >= limit:
            break
        if not unit.numbered and 0 < size <= budget:
            chosen.append(unit)
            budget -= size
    return chosen
