"""Versions of units: copies of settled states in `versions/NNNNNN/` of the task directory.

A unit that was renamed into place needs no copy: its version is a hard link. It counts as long as the file is unchanged, so a
later write in place leaves the version before it.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from stoker.launcher.checkpoints import snapshot, stager
from stoker.launcher.folder import decisions, listing
from stoker.launcher.folder.guard_state import GuardState
from stoker.launcher.folder.units import Unit
from stoker.task import layout

COPY, LINK, RETURNED = "copy", "link", "returned"
"""How a version was made; `returned`: a copy that was put back by links, so that the folder has the same files."""


@dataclass
class Version:
    number: int
    path: str
    """Of the unit."""
    key: str
    """State of the unit's files when this was made (`scan_state.key_of`)."""
    written_at: float
    how: str = COPY
    files: List[List[Any]] = field(default_factory=list)
    """[path, inode, size, modification time in ns, inode of the file in the folder] of each of its own files."""

    @property
    def linked(self) -> bool:
        return self.how != COPY

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Optional[Version]:
        """None for a record that no guard wrote: user code can write the file."""
        try:
            files = [[str(one[0]), *(int(value) for value in one[1:5])] for one in raw["files"]]
            if any(part in ("", ".", "..") for one in files for part in str(one[0]).split("/")):
                return None
            if any(len(one) != 5 for one in files) or raw["how"] not in (COPY, LINK, RETURNED):
                return None
            number, written = int(raw["number"]), float(raw["written_at"])
            return cls(number, str(raw["path"]), str(raw["key"]), written, str(raw["how"]), files)
        except (KeyError, TypeError, ValueError):
            return None


class Versions:
    """Only the guard of the task directory uses it. Numbers only grow, and each version is recorded after its files are there."""

    def __init__(self, directory: str, state: GuardState) -> None:
        self._directory = directory
        self._state = state
        self._of: Dict[str, List[Version]] = {}
        """By unit, oldest first."""
        self._number = 0

    def load(self) -> None:
        """Take over those of earlier guards, and remove what is incomplete."""
        self._of = {}
        known = [Version.from_json(raw) for raw in self._state.versions.values()]
        for version in sorted((one for one in known if one is not None), key=lambda one: one.number):
            self._of.setdefault(version.path, []).append(version)
        numbers = {version.number for versions in self._of.values() for version in versions}
        area = os.path.join(self._directory, layout.VERSIONS)
        for name in snapshot.entries(area):
            if (not name.isdigit() and f"{layout.VERSIONS}/{name}" != layout.GUARD) or (
                name.isdigit() and int(name) not in numbers
            ):
                stager.remove(os.path.join(area, name))
        self._number = max([self._number, *numbers])

    def next_number(self) -> int:
        os.makedirs(os.path.join(self._directory, layout.VERSIONS), mode=0o700, exist_ok=True)
        self._number += 1
        return self._number

    def target(self, number: int) -> str:
        return os.path.join(self._directory, layout.version(number))

    def intact(self, path: str) -> Iterator[Version]:
        """The versions of a unit whose files are as they were made, newest first."""
        for version in reversed(self._of.get(path, [])):
            if self._is_intact(version):
                yield version

    def has(self, path: str) -> bool:
        return path in self._of

    def holds(self, path: str, key: str) -> bool:
        """Whether this state of a unit has a version. One that was put back does not count: a write to the unit changes it."""
        return any(one.key == key and one.how != RETURNED for one in self.intact(path))

    def add_copy(self, unit: Unit, number: int, key: str, found: snapshot.Signature) -> None:
        """The stager has made the copy `NNNNNN.tmp` of these files."""
        temporary = self.target(number) + ".tmp"
        for member in found:
            os.utime(os.path.join(temporary, member.path), ns=(member.mtime_ns, member.mtime_ns))
        os.rename(temporary, self.target(number))
        self._add(unit, number, key, found, COPY)

    def add_links(self, root: str, unit: Unit, key: str, found: snapshot.Signature) -> None:
        """Link the files of a unit that was renamed into place. Raises OSError where that is not possible."""
        number = self.next_number()
        temporary = self.target(number) + ".tmp"
        try:
            for member in found:
                target = os.path.join(temporary, member.path)
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                with listing.beneath(root, os.path.dirname(member.path)) as parent:
                    name = os.path.basename(member.path)
                    os.link(os.path.join(parent, name), target, follow_symlinks=False)
            os.rename(temporary, self.target(number))
        except OSError:
            stager.remove(temporary)
            raise
        self._add(unit, number, key, found, LINK)

    def follow(self, version: Version) -> None:
        """It was put back by links: the unit has the same files."""
        version.how = RETURNED
        self._state.version(version.to_json())

    def reusable(self, path: str) -> Dict[str, Tuple[snapshot.State, str]]:
        """Files of the newest copy, which a new one may share: the state of the file in the folder, and where the copy is."""
        for version in self.intact(path):
            if not version.linked:
                root = self.target(version.number)
                return {
                    one: ((ino, size, mtime), os.path.join(root, one))
                    for one, _, size, mtime, ino in version.files
                }
        return {}

    def drop(self, path: str) -> None:
        for version in self._of.pop(path, []):
            self._remove(version)

    def spare_room(self) -> bool:
        """Remove all but the newest intact version of each unit. False: there was none to remove."""
        removed = False
        for path, versions in self._of.items():
            newest = next(self.intact(path), None)
            for version in [one for one in versions if one is not newest]:
                versions.remove(version)
                self._remove(version)
                removed = True
        return removed

    def _add(self, unit: Unit, number: int, key: str, found: snapshot.Signature, how: str) -> None:
        root = self.target(number)
        files: List[List[Any]] = []
        for member in found:
            own = listing.state_of(root, member.path)
            if own is not None:
                files.append([own.path, own.ino, own.size, own.mtime_ns, member.ino])
        written = max((member.mtime_ns for member in found), default=0) / 1e9
        version = Version(number, unit.path, key, written, how, files)
        self._state.version(version.to_json())
        versions = self._of.setdefault(unit.path, [])
        versions.append(version)
        facts = [decisions.VersionFacts(one.number, one.linked) for one in versions]
        for gone in decisions.superfluous(facts):
            dropped = next(one for one in versions if one.number == gone)
            versions.remove(dropped)
            self._remove(dropped)
        for path in decisions.over_limit({path: of[-1].number for path, of in self._of.items() if of}):
            self.drop(path)

    def _remove(self, version: Version) -> None:
        stager.remove(self.target(version.number))
        self._state.dropped(version.number)

    def _is_intact(self, version: Version) -> bool:
        root = self.target(version.number)
        for path, ino, size, mtime, _ in version.files:
            state = listing.state_of(root, path)
            if state is None or (state.ino, state.size, state.mtime_ns) != (ino, size, mtime):
                return False
        return bool(version.files)
