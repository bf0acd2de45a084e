"""What is done to a working folder after its writers have died."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from stoker.launcher.checkpoints import open_files, snapshot
from stoker.launcher.checkpoints.scan_state import key_of
from stoker.launcher.folder import decisions, listing, repair, units
from stoker.launcher.folder.guard_state import GuardState
from stoker.launcher.folder.units import Unit
from stoker.launcher.folder.versions import LINK, Version, Versions
from stoker.launcher.verify import verify
from stoker.task import formats, layout

PLAN, DONE = "folder-plan", "folder"
"""Kinds of the journal's entries before and after."""
NAMED = 20
"""Files that the entry afterwards names of each kind."""
_TAIL = 4 << 20

Report = Optional[Dict[str, Any]]


class Suspect(NamedTuple):
    unit: Unit
    files: snapshot.Signature
    settled: bool
    written_at: float


class Aftermath:
    """Used once for each end of a generation. After a crash at any point another one comes to the same result: what is to be
    done is journaled before, and each step may be repeated."""

    def __init__(
        self,
        directory: str,
        root: str,
        state: GuardState,
        versions: Versions,
        journal: Callable[[Dict[str, Any]], None],
    ) -> None:
        self._directory = directory
        self._root = root
        self._state = state
        self._versions = versions
        self._journal = journal

    def repair(self, changed: Iterable[Unit], *, violent: bool) -> Report:
        """`changed`: units that may have changed since they last settled. The entry that was journaled, if any."""
        back, torn = self._planned()
        known = {item["path"] for item in back} | set(torn)
        for suspect in self._suspects(changed):
            if suspect.unit.path in known:
                continue
            whole = self._verdict(suspect)
            version = self._version(suspect.unit)
            replaced = version is not None and version.how == LINK and not self._is_same(version, suspect)
            facts = decisions.Facts(suspect.unit, suspect.settled, whole, version is not None, replaced)
            what = decisions.decide(facts, violent=violent)
            if what == decisions.PUT_BACK and version is not None:
                back.append({"path": suspect.unit.path, "written_at": version.written_at})
            elif what == decisions.TORN:
                torn += self._damaged(suspect)
        if not back and not torn:
            return None
        self._journal(self._entry(PLAN, back, torn))
        back = [item for item in back if self._put_back(item)]
        torn = [path for path in torn if repair.set_aside(self._root, path)]
        entry = {**self._entry(DONE, back[:NAMED], torn[:NAMED]), "violent": violent}
        self._journal(entry)
        return entry

    def _suspects(self, changed: Iterable[Unit]) -> List[Suspect]:
        found = []
        for unit in changed:
            files = listing.signature(self._root, unit)
            key = key_of(files)
            if files and (self._state.rebooted or self._state.renamed.get(unit.path) != key):
                settled = self._state.settled.get(unit.path) == key
                found.append(Suspect(unit, files, settled, max(file.mtime_ns for file in files) / 1e9))
        last = max((suspect.written_at for suspect in found), default=0.0) - decisions.RECENT
        recent = [
            suspect
            for suspect in found
            if suspect.written_at >= last
            or not (suspect.settled or (suspect.unit.kind == units.FILE and not suspect.files[0].size))
        ]
        members = [file for suspect in recent for file in suspect.files]
        # Another task may share the folder, and write on.
        writers = open_files.being_written(self._root, members)
        return [one for one in recent if not any(file.ino in writers for file in one.files)]

    def _verdict(self, suspect: Suspect) -> Optional[bool]:
        unit, files = suspect.unit, suspect.files
        above, name = units.parent_of(unit.path), unit.path.rpartition("/")[2]
        if unit.kind == units.FILE:
            if not files[0].size:
                # A state that is empty was just being opened. Other empty files are marks, and locks.
                return False if unit.named and not suspect.settled else None
            head = listing.head_of(self._root, unit.path, units.HEAD)
            if units.is_log(name, head) or not (unit.named or units.is_state_content(head)):
                return None
        whole = _verify(self._root, above, name, [file.path for file in files])
        if whole is None and unit.kind == units.DIRECTORY and not self._is_new(suspect):
            return True
        return whole

    def _is_new(self, suspect: Suspect) -> bool:
        """Whether a directory with a number in its name is a checkpoint of this generation. Others are work of the user."""
        oldest, _ = listing.change_times(self._root, suspect.files)
        return oldest > self._state.since and units.may_be_checkpoint([file.path for file in suspect.files])

    def _version(self, unit: Unit) -> Optional[Version]:
        for version in self._versions.intact(unit.path):
            if not self._state.rebooted:
                return version
            # What was not synced may be lost.
            above, name = units.parent_of(unit.path), unit.path.rpartition("/")[2]
            source = self._versions.target(version.number)
            if _verify(source, above, name, [str(file[0]) for file in version.files]):
                return version
        return None

    def _is_same(self, version: Version, suspect: Suspect) -> bool:
        """Whether these are the inodes that were linked. A write in place does not change them."""
        return {file[1] for file in version.files} == {file.ino for file in suspect.files}

    def _damaged(self, suspect: Suspect) -> List[str]:
        """What is set aside of a torn unit."""
        if suspect.unit.kind in (units.FILE, units.DIRECTORY):
            return [suspect.unit.path]
        paths = [file.path for file in suspect.files]
        if suspect.unit.kind == units.GROUP:
            return paths
        return [
            path
            for path in paths
            if _verify(self._root, units.parent_of(path), path.rpartition("/")[2], [path]) is False
        ]

    def _put_back(self, item: Dict[str, Any]) -> bool:
        """Without room for it the unit stays as it is."""
        version = next(iter(self._versions.intact(item["path"])), None)
        if version is None:
            return False
        try:
            linked = repair.put_back(self._root, version, self._versions.target(version.number))
        except OSError:
            return False
        if linked:
            self._versions.follow(version)
        return True

    def _planned(self) -> "tuple[List[Dict[str, Any]], List[str]]":
        """What an earlier launcher was about to do when it died."""
        plan: Dict[str, Any] = {}
        for entry in _last_entries(self._directory):
            if entry.get("k") in (PLAN, DONE) and entry.get("generation") == self._state.generation:
                plan = entry if entry["k"] == PLAN else {}
        back = [item for item in plan.get("put_back") or () if _is_item(item)]
        return back, [path for path in plan.get("torn") or () if isinstance(path, str)]

    def _entry(self, kind: str, back: List[Dict[str, Any]], torn: List[str]) -> Dict[str, Any]:
        entry: Dict[str, Any] = {"k": kind, "generation": self._state.generation}
        entry.update(put_back=back, torn=torn, at=time.time())
        return entry


def _is_item(item: Any) -> bool:
    """Whether this is an entry of `put_back`: user code can write the journal."""
    return (
        isinstance(item, dict)
        and isinstance(item.get("path"), str)
        and isinstance(item.get("written_at"), (int, float))
    )


def _verify(root: str, above: str, name: str, paths: List[str]) -> Optional[bool]:
    """What the format of a unit's files proves. `above`: the directory of the unit; `paths` are relative to `root`."""
    try:
        with listing.beneath(root, above) as parent:
            files = [path[len(above) + 1 :] if above else path for path in paths]
            return verify.verify_unit(parent, name, files).ok
    except Exception:  # noqa: BLE001 - any file may be malformed; then nothing is proven
        return None


def _last_entries(directory: str) -> List[Dict[str, Any]]:
    try:
        fd = os.open(os.path.join(directory, layout.JOURNAL), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        data = os.pread(fd, _TAIL, max(0, os.fstat(fd).st_size - _TAIL))
    finally:
        os.close(fd)
    return list(formats.parse_lines(data.split(b"\n")))
