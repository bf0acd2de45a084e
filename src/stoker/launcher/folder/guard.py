"""Keeps versions of what the training writes into its working folder, and repairs the folder after a violent death.

A script that writes its state in place (`torch.save(..., "last.pt")`) leaves a torn file when it is killed in the middle. While
the training runs, the guard sees which files have settled, and keeps their newest versions:

    renamed into place    it was never torn; its version is a link
    closed                quiet for a moment, and no process has it open: it is copied aside
    several files         quiet for some seconds: copied as a whole

After the death, what has changed since it settled is suspect. It stays if its format proves it whole; otherwise its newest
version is put back, or it is set aside as `NAME.torn`.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from stoker.launcher.checkpoints import open_files, snapshot, stager
from stoker.launcher.checkpoints.scan_state import key_of
from stoker.launcher.folder import decisions, listing, units
from stoker.launcher.folder.aftermath import Aftermath, Report
from stoker.launcher.folder.changes import Changes
from stoker.launcher.folder.guard_state import GuardState
from stoker.launcher.folder.tree_watch import TreeChange, TreeWatch
from stoker.launcher.folder.units import Unit
from stoker.launcher.folder.versions import Versions
from stoker.task import layout
from stoker.task.formats import TaskInfo

REST = 0.1
"""Seconds after events in which no more are read. The kernel collects them meanwhile."""
RESCAN = 1.0
RESCAN_SHARE = 50.0
"""Least seconds between two scans where the kernel sends no events, also as a multiple of a scan's duration."""
SLOW_WALK = 0.1
"""Seconds of a listing of the folder beyond which scans only look at the known units."""
BUDGET_SHARE = 10
"""Part of the free disk that copies of the files from before the generation may take."""
MOST_CHANGES = 2000
"""Units that are remembered while nothing happens to them."""


def folder_of(directory: str, info: TaskInfo) -> Optional[str]:
    """The working folder that a task's launcher guards; None if it guards none. User code can change task.json: only the shared
    folder of the task's own attempt counts."""
    if not info.guards:
        return None
    if info.common is None:
        return os.path.join(directory, layout.CODE)
    common = os.path.join(os.path.dirname(directory), layout.COMMON)
    return os.path.join(common, layout.CODE) if os.path.normpath(info.common) == common else None


class FolderGuard:
    """Guards one working folder (`root`). All methods, and `journal`, are called from one thread, the owner's.

    Call `begin` once per generation, before its body starts; then `poll` when `fileno` is readable or the time that `poll`
    returned has come, while processes of the body live; `finish` when all of them have ended. After a crash at any point,
    `recover` of another guard does what `finish` would have done. `near`: the server works on this machine too.
    """

    def __init__(
        self,
        directory: str,
        root: str,
        journal: Callable[[Dict[str, Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        quiet: float = 3.0,
        near: bool = False,
        watches: Optional[int] = None,
    ) -> None:
        self._directory = directory
        self._root = root
        self._journal = journal
        self._clock = clock
        self._quiet = quiet
        self._watches = watches
        self._generation = -1
        self._state = GuardState(directory)
        self._versions = Versions(directory, self._state)
        self._watch: Optional[TreeWatch] = None
        self._changes: Dict[str, Changes] = {}
        """By unit: those that have changed in this generation."""
        self._sets: Set[str] = set()
        """Directories whose files are one state."""
        self._marked: Set[str] = set()
        """Directories that have a file which makes them a set together with others."""
        self._backlog: List[Unit] = []
        """Units that were there before, and have no version yet."""
        self._admission = decisions.Admission()
        self._rest_until = 0.0
        self._rescan_at = 0.0
        self._slow = False
        self._warned = False
        self._wake_r, self._wake_w = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        )
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._epoll.register(self._wake_r, select.EPOLLIN)
        self._stager = stager.Stager(self._wake, os.path.join(directory, layout.TURNS) if near else "")

    def fileno(self) -> Optional[int]:
        """Readable when there is something to do. None: `poll` tells the time of the next call."""
        if self._epoll is None or self._watch is None or self._rest_until:
            return None
        return self._epoll.fileno()

    def begin(self, generation: int) -> None:
        """What is in the folder counts as complete. Raises OSError; then the folder is not guarded."""
        self._forget()
        os.close(snapshot.open_directory(self._root))
        self._stager.hurry(False)
        self._state.load()
        self._versions.load()
        self._generation = generation
        self._state.begin(generation)
        watch = TreeWatch(self._root, listing.enters, *(() if self._watches is None else (self._watches,)))
        self._watch = watch
        began = time.monotonic()
        listed = listing.walk(self._root, watch.add)
        self._slow = time.monotonic() - began > SLOW_WALK or not listed.whole
        self._sets = listing.sets_in(listed.names)
        self._marked = {path for path, names in listed.names.items() if any(map(units.is_marker, names))}
        self._backlog = self._unsaved(listed.names)
        if watch.blind:
            self._state.sync()
        if self._epoll is not None and watch.active:
            self._epoll.register(watch.fileno() or 0, select.EPOLLIN)

    def poll(self, now: float) -> Optional[float]:
        """Process events, start and finish copies. Returns the latest time for the next call; None: no limit."""
        if self._watch is None:
            return None
        self._update(now)
        self._collect(now)
        self._examine(now)
        self._start_copy(now)
        self._tidy(now)
        return self._next_time(now)

    def finish(self, violent: bool, *, failed: bool = False) -> Report:
        """Repair the folder, when all processes have ended. The entry that was journaled, if any. `violent`: a signal ended the
        body. `failed`: it ended by itself, but not well; then only files that are proven damaged are touched."""
        if self._watch is None:
            return None
        now = self._clock()
        self._stager.hurry(True)
        for change in self._changes.values():
            if change.job is not None and not change.pending:
                change.job.stale = True  # its unit is complete without it
        self._update(now, last=violent or failed)
        while self._stager.waiting:
            self._collect(now, wait=True)
        self._stager.close()  # The owner may fork next, which is safe only without threads.
        report: Report = None
        if violent or failed:
            for one in self._changes.values():
                if one.pending and one.renamed:
                    key = key_of(listing.signature(self._root, one.unit))
                    self._state.settle(one.unit.path, key, renamed=True)
            recent = now - decisions.RECENT
            changed = [
                one.unit
                for one in self._changes.values()
                if one.pending or (one.settled_at is not None and one.settled_at > recent)
            ]
            report = self._aftermath().repair(changed, violent=violent)
        self._state.finish()
        self._forget()
        return report

    def recover(self) -> Report:
        """Finish the generation of a launcher that died. Nothing is done if it had finished, or if there was no guard."""
        self._state.load()
        if self._state.generation is None:
            return None
        self._versions.load()
        names = listing.walk(self._root).names
        sets = listing.sets_in(names)
        changed = [
            unit
            for unit in listing.units_in(names, sets.__contains__).values()
            if listing.change_times(self._root, listing.signature(self._root, unit))[1] > self._state.since
        ]
        report = self._aftermath().repair(changed, violent=True)
        self._state.finish()
        return report

    def discard(self) -> None:
        """Remove all versions: no other generation follows in this task directory."""
        self._forget()
        self._state.close()
        stager.remove(os.path.join(self._directory, layout.VERSIONS))

    def close(self) -> None:
        """Release all resources. A copy in progress is dropped."""
        self._forget()
        self._stager.close()
        self._state.close()
        if self._epoll is not None:
            self._epoll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # -- events ----------------------------------------------------------------------------------------------

    def _update(self, now: float, *, last: bool = False) -> None:
        """`last`: nothing may be missed, because what has changed is judged now."""
        watch = self._watch
        assert watch is not None
        if last or now >= self._rest_until:
            self._rest_until = 0.0
            changes = watch.read()
            for change in changes:
                self._see(change, now)
            if changes:
                self._state.sync()
                self._rest_until = now + REST
        if watch.overflowed or (watch.blind and (last or now >= self._rescan_at)):
            self._rescan(now, everything=watch.overflowed or last or not self._slow)
            watch.overflowed = False

    def _see(self, change: TreeChange, now: float) -> None:
        if change.directory:
            unit = units.directory_unit_of(change.path, self._sets.__contains__)
            if unit is not None and change.kind in ("arrived", "gone"):
                self._change(unit).see(change.kind, now, itself=unit.path == change.path)
            return
        self._note_marker(change)
        unit = units.unit_of(change.path, self._sets.__contains__)
        if unit is not None:
            self._change(unit).see(change.kind, now, itself=unit.kind == units.FILE)

    def _note_marker(self, change: TreeChange) -> None:
        """Find out whether a new file makes its directory a set. Its files were units of their own until then."""
        directory, name = units.parent_of(change.path), change.path.rpartition("/")[2]
        if not directory or directory in self._sets or change.kind == "gone":
            return
        if units.is_marker(name):
            self._marked.add(directory)
        if directory not in self._marked:
            return
        if units.holds_set(snapshot.entries(os.path.join(self._root, directory))):
            self._sets.add(directory)
            for path in [path for path in self._changes if path.startswith(directory + "/")]:
                if self._changes[path].unit.kind == units.FILE and self._changes[path].job is None:
                    del self._changes[path]
                    self._versions.drop(path)

    def _change(self, unit: Unit) -> Changes:
        return self._changes.setdefault(unit.path, Changes(unit, self._quiet))

    def _rescan(self, now: float, *, everything: bool) -> None:
        """Compare the files with the known states. `everything`: also those that are not known yet."""
        began = time.monotonic()
        if everything:
            names = listing.walk(self._root).names
            self._sets |= listing.sets_in(names)
            found = listing.units_in(names, self._sets.__contains__)
        else:
            found = {change.unit.path: change.unit for change in self._changes.values()}
            for path in {units.parent_of(path) for path in found}:
                files = [
                    name
                    for name, _ in snapshot.states(
                        os.path.join(self._root, path),
                        snapshot.entries(os.path.join(self._root, path)),
                    ).items()
                ]
                found.update(listing.units_in({path: files}, self._sets.__contains__))
        for path, unit in found.items():
            files_now = listing.signature(self._root, unit)
            if files_now and listing.change_times(self._root, files_now)[1] > self._state.since:
                key = key_of(files_now)
                if key != self._state.settled.get(path):
                    self._change(unit).look(key, now)
        self._rescan_at = now + max(RESCAN, RESCAN_SHARE * (time.monotonic() - began))

    # -- settling --------------------------------------------------------------------------------------------

    def _examine(self, now: float) -> None:
        due = [one for one in self._changes.values() if one.due is not None and one.due <= now]
        looked: List[Tuple[Changes, snapshot.Signature]] = []
        for change in due:
            files = listing.signature(self._root, change.unit)
            if not files or not self._is_state(change.unit):
                del self._changes[change.unit.path]
            elif not snapshot.counts(files):
                change.doubt()
            else:
                looked.append((change, files))
        writers = open_files.being_written(self._root, [file for _, files in looked for file in files])
        for change, files in looked:
            if any(file.ino in writers for file in files):
                change.still_open(now)
            else:
                self._settle(change, files, now)

    def _is_state(self, unit: Unit) -> bool:
        if unit.kind != units.FILE or (unit.named and not unit.path.lower().endswith(".json")):
            return True
        head = listing.head_of(self._root, unit.path, units.HEAD)
        if unit.named:
            return not units.is_log(unit.path, head)
        return units.is_state_content(head)

    def _settle(self, change: Changes, files: snapshot.Signature, now: float) -> None:
        unit, key, renamed = change.unit, key_of(files), change.renamed
        rewritten = unit.path in self._state.settled or self._versions.has(unit.path)
        self._state.settle(unit.path, key, renamed=renamed)
        wanted = self._admission.admits(unit, rewritten=rewritten) and not self._versions.holds(
            unit.path, key
        )
        if wanted and renamed:
            try:
                self._versions.add_links(self._root, unit, key, files)
            except OSError:
                pass  # Another file system, or a file of another user: a file that is renamed is never torn.
        change.settle(now, copy=wanted and not renamed)

    def _tidy(self, now: float) -> None:
        """Forget units to which nothing has happened for a while."""
        if len(self._changes) <= MOST_CHANGES:
            return
        for path, change in list(self._changes.items()):
            idle = change.due is None and change.copy_due is None and change.job is None
            old = change.settled_at is not None and change.settled_at < now - decisions.RECENT
            if idle and old and not change.pending:
                del self._changes[path]

    # -- copying ---------------------------------------------------------------------------------------------

    def _unsaved(self, names: Dict[str, List[str]]) -> List[Unit]:
        """Units that are there before the body starts and get a copy: the first write of a generation can be torn too."""
        found = []
        by_directory: Dict[str, int] = {}
        for unit in listing.units_in(names, self._sets.__contains__).values():
            above = units.parent_of(unit.path)
            by_directory[above] = by_directory.get(above, 0) + 1
            if unit.numbered or not unit.named or by_directory[above] > decisions.CROWD:
                continue
            files = listing.signature(self._root, unit)
            if files and not self._versions.holds(unit.path, key_of(files)):
                newest = max(file.mtime_ns for file in files) / 1e9
                found.append((newest, sum(file.size for file in files), unit))
        room = os.statvfs(self._root)
        return decisions.worth_a_copy(found, room.f_bavail * room.f_frsize // BUDGET_SHARE)

    def _start_copy(self, now: float) -> None:
        """One at a time: several at once would not be throttled."""
        if self._stager.waiting:
            return
        due = [one for one in self._changes.values() if one.copy_due is not None and one.copy_due <= now]
        for change in sorted(due, key=lambda one: one.copy_due or 0.0):
            if self._submit(change):
                return
        while self._backlog:
            unit = self._backlog.pop(0)
            if unit.path not in self._changes and self._is_state(unit) and self._submit(self._change(unit)):
                return

    def _submit(self, change: Changes) -> bool:
        files = listing.signature(self._root, change.unit)
        change.copy_due = None
        if not snapshot.counts(files):
            return False
        try:
            number = self._versions.next_number()
        except OSError:
            return False
        change.copying = key_of(files)
        change.job = stager.StagingJob(
            name=change.unit.path,
            members=[file.path for file in files],
            how="",
            source=self._root,
            target=self._versions.target(number) + ".tmp",
            number=number,
            plain=True,
            spare=sum(file.size for file in files),
            reuse=self._versions.reusable(change.unit.path),
            patient=change.patient,
            version=change.version,
        )
        self._stager.submit(change.job)
        return True

    def _collect(self, now: float, *, wait: bool = False) -> None:
        """Process the outcomes of finished copies."""
        while True:
            outcome = self._stager.next_outcome(None if wait else 0.0)
            if outcome is None:
                return
            wait = False
            self._drain_wake()
            self._conclude(outcome, now)

    def _conclude(self, outcome: stager.StagingOutcome, now: float) -> None:
        job = outcome.job
        change = self._changes.get(job.name)
        if change is None or change.job is not job or job.stale:
            stager.remove(job.target)
            if change is not None and change.job is job:
                change.copied(now, outcome.seconds, missed=True)
            return
        status, same = outcome.status, key_of(outcome.signature) == change.copying
        if status == "staged" and same:
            try:
                self._versions.add_copy(change.unit, job.number, change.copying, outcome.signature)
                self._warned = False
            except OSError as exc:
                status, outcome.reason = "disk-full", str(exc)
        if status in ("disk-full", "failed"):
            stager.remove(job.target)
            change.copied(now, outcome.seconds, missed=False)
            self._make_room(change, outcome, now)
            return
        missed = not same or status in ("changed", "absent")
        change.copied(now, outcome.seconds, missed=missed)
        if missed:
            stager.remove(job.target)
            if not change.pending:
                change.see("created", now, itself=False)
        elif status == "rejected" and change.version == job.version:
            self._state.settle(change.unit.path, "")
            change.doubt()

    def _make_room(self, change: Changes, outcome: stager.StagingOutcome, now: float) -> None:
        change.retry(now)
        if outcome.status == "disk-full" and self._versions.spare_room():
            change.copy_due = None if change.copy_due is None else now
        elif not self._warned:
            self._warned = True
            area = os.path.join(self._directory, layout.VERSIONS)
            message = f"no version of {change.unit.path} can be kept on the disk of {area}: {outcome.reason}; trying again"
            entry = {"k": "warning", "generation": self._generation, "name": change.unit.path}
            self._journal({**entry, "message": message, "at": time.time()})

    # -- helpers ---------------------------------------------------------------------------------------------

    def _aftermath(self) -> Aftermath:
        return Aftermath(self._directory, self._root, self._state, self._versions, self._journal)

    def _next_time(self, now: float) -> Optional[float]:
        times = [one.due for one in self._changes.values() if one.due is not None]
        if not self._stager.waiting:
            times += [one.copy_due for one in self._changes.values() if one.copy_due is not None]
            if self._backlog:
                times.append(now)
        if self._rest_until:
            times.append(self._rest_until)
        if self._watch is not None and self._watch.blind:
            times.append(self._rescan_at)
        if self._stager.waiting and self._epoll is None:
            times.append(now + REST)
        return min(times, default=None)

    def _forget(self) -> None:
        for change in self._changes.values():
            if change.job is not None:
                change.job.stale = True
        while self._stager.waiting:
            outcome = self._stager.next_outcome(None)
            if outcome is not None:
                stager.remove(outcome.job.target)
        self._changes, self._backlog = {}, []
        self._sets, self._marked = set(), set()
        self._admission = decisions.Admission()
        self._rest_until = self._rescan_at = 0.0
        if self._watch is not None:
            if self._epoll is not None and self._watch.active:
                self._epoll.unregister(self._watch.fileno() or 0)
            self._watch.close()
            self._watch = None

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b".")
        except BlockingIOError:
            pass  # The pipe is full, so the owner will wake up anyway.

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_r, 4096)
        except BlockingIOError:
            pass
