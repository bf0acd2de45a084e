"""Finds complete checkpoints while the training runs, and after it has ended.

Only the launcher sees renames, open files, and whether the writer was still alive. So the scanner decides which checkpoints are
complete, copies them to `staged/` and writes them into the journal; the server only reads. A checkpoint is complete, strongest
sign first, when

    sdk         the SDK has declared it
    rename      it was renamed into place
    quiet       its files were quiet for some seconds, no process has one open for writing, the writer was still alive
    verified    its format proves it: after a violent death, and for files that are overwritten too often to be quiet

A damaged checkpoint is never offered, whatever the sign.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from stoker.launcher.checkpoints import open_files, snapshot, stager
from stoker.launcher.checkpoints.candidate import EXAMINE_AGAIN, RENAME_SETTLE, Candidate
from stoker.launcher.checkpoints.directory_watch import DirectoryChange, DirectoryWatch
from stoker.launcher.checkpoints.scan_state import ScanState, key_of
from stoker.launcher.checkpoints.sdk_commits import Commits
from stoker.task import checkpoint_names, formats, layout

RETRY_DISK = 30.0
RETRY_FAILED = 60.0
PENDING = 64
"""Largest number of names of unfinished checkpoints that are reported."""
UNFINISHED_FOR = 60.0
"""Seconds after which an entry with a temporary name counts as left behind, not as being written."""
RESCAN = 1.0
"""Seconds between two full scans where the kernel sends no events; more when a scan takes long."""


Examined = Tuple[Candidate, str, List[str], snapshot.Signature]
"""A candidate, the sign that it may be complete, its top-level entries and the state of its files."""


class Scanner:
    """Scans one task directory. All methods, and `journal`, are called from one thread, the owner's.

    Call `begin` once per generation, then `poll` when `fileno` is readable or the time that `poll` returned (on the scanner's
    clock) has come, while processes of the task live; `finish` when all of them have ended. After a crash at any point, a new
    scanner that begins and finishes the same generation knows what was seen. It announces copies that were not announced, and
    none twice. If `journal` raises OSError (the disk is full) the entry is kept and tried again. `near`: the server takes the
    copies directly from this directory.
    """

    def __init__(
        self,
        directory: str,
        journal: Callable[[Dict[str, Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        quiet: float = 3.0,
        near: bool = False,
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._clock = clock
        self._quiet = quiet
        self._near = near
        self._generation = -1
        self._source = ""
        self._candidates: Dict[str, Candidate] = {}
        self._state = ScanState(directory)
        self._commits = Commits(directory)
        self._watch: Optional[DirectoryWatch] = None
        self._rescan_at = 0.0
        self._arrived: Set[str] = set()
        """Candidates with an entry that was renamed into place, not yet recorded."""
        self._unfinished: Set[snapshot.State] = set()
        """Files that had a temporary name at the last scan: shows a rename where the kernel sends no events."""
        self._outbox: List[Dict[str, Any]] = []
        """Entries not yet in the journal, in order."""
        self._unfinished_entries: Dict[str, float] = {}
        """Entries with temporary names that are being written, and the time of their last event."""
        self._warned = False
        self._too_many: Set[str] = set()
        self.scans = 0
        """Number of finished scans."""
        self._wake_r, self._wake_w = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        )
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._epoll.register(self._wake_r, select.EPOLLIN)
        self._stager = stager.Stager(self._wake, os.path.join(directory, layout.TURNS) if near else "")

    def fileno(self) -> Optional[int]:
        """Readable when there is something to do. None: the system has no events; `poll` tells the time of the next call."""
        return None if self._epoll is None else self._epoll.fileno()

    def begin(self, generation: int) -> None:
        """Start scanning a generation. Files that are there already were restored; they count only when they change."""
        self._forget()
        self._stager.hurry(False)
        self._generation = generation
        self._source = os.path.join(self._directory, layout.checkpoints(generation))
        os.makedirs(self._source, exist_ok=True)
        self._state.load(generation)
        for record in self._state.unjournaled:
            self._announce({"k": "checkpoint", **record})
        self._watch = self._start_watch()
        if self._state.resumed:
            self._commits.begin(generation, self._state.commits_offset)
            self._rescan(self._clock())
        else:
            self._commits.begin(generation, None)
            there = self._entries().items()
            keys = {name: key_of(self._snapshot(members)) for name, members in there}
            self._state.begin(keys, self._commits.offset)

    def poll(self, now: float) -> Optional[float]:
        """Process events, start and finish copies. Returns the latest time for the next call; None: no limit."""
        if self._watch is None:
            return None
        self._flush()
        looked = self._rescan_at
        self._update(now)
        self._collect(now)
        self._start_due(now)
        if self._watch is not None and (not self._watch.blind or self._rescan_at != looked):
            self.scans += 1
        return self._next_time(now)

    def pending(self) -> List[str]:
        """Names of checkpoints that are being written or not decided yet. At most `PENDING`."""
        names = {
            candidate.name
            for candidate in self._candidates.values()
            if candidate.due is not None or candidate.job is not None
        }
        since = self._clock() - UNFINISHED_FOR
        names |= {
            checkpoint_names.final_name(entry) for entry, at in self._unfinished_entries.items() if at > since
        }
        return sorted(names)[:PENDING]

    def finish(self, violent: bool) -> None:
        """Decide about all candidates, when all processes have ended. Returns when every copy has been made or refused.

        `violent`: killed, crashed, out of memory; the last files may be torn.
        """
        if self._watch is None:
            return
        now = self._clock()
        self._stager.hurry(True)
        self._update(now)
        while self._stager.waiting:
            self._collect(now, wait=True)
        self._stager.close()  # The remaining copies are made by a new thread, with the normal priority.
        self._decide_rest(now, violent)
        self._flush()
        self._unfinished_entries = {}
        self.scans += 1
        self._stager.close()  # The owner may fork next, which is safe only without threads.

    def close(self) -> None:
        """Release all resources. A copy in progress is finished or dropped; nothing more is announced."""
        self._forget()
        self._stager.close()
        self._state.close()
        if self._epoll is not None:
            self._epoll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # -- events ----------------------------------------------------------------------------------------------

    def _update(self, now: float) -> None:
        assert self._watch is not None
        if self._watch.overflowed or (self._watch.blind and now >= self._rescan_at):
            self._watch.overflowed = False
            if not self._watch.active:
                # There may be free inotify instances again. The watch starts before the scan, so that nothing is missed.
                self._watch = self._start_watch()
            self._rescan(now)
        commits = self._commits.read()  # before the events: so the rename of each is among these or was seen
        self._read_events(now)
        for commit in commits:
            self._candidate(checkpoint_names.unit_of(commit["name"]) or commit["name"]).declare(commit, now)

    def _start_watch(self) -> DirectoryWatch:
        watch = DirectoryWatch(self._source)
        if self._epoll is not None and watch.active:
            self._epoll.register(watch.fileno() or 0, select.EPOLLIN)
        return watch

    def _read_events(self, now: float) -> None:
        """Process the kernel's events. A rename is recorded, because it cannot be seen later, unless there was a write since."""
        assert self._watch is not None
        for change in self._watch.read():
            name = checkpoint_names.unit_of(change.entry)
            if name is None:
                self._note_unfinished(change, now)
                continue
            if snapshot.is_pointer(self._source, change.entry):
                continue
            candidate = self._candidate(name)
            candidate.see(change, now)
            if change.kind == "arrived" and not change.inside:
                self._arrived.add(name)
            elif not candidate.fresh and candidate.job is None and candidate.commit is None:
                del self._candidates[name]
        arrived, self._arrived = self._arrived, set()
        looked = self._examine({name: "rename" for name in arrived if self._candidate(name).renamed}, now)
        for candidate, _, _, signature in looked:
            self._state.seen("renamed", candidate.name, key_of(signature))

    def _note_unfinished(self, change: DirectoryChange, now: float) -> None:
        if change.kind == "gone" and not change.inside:
            self._unfinished_entries.pop(change.entry, None)
        elif checkpoint_names.is_unfinished(change.entry) and (
            change.entry in self._unfinished_entries or len(self._unfinished_entries) < PENDING
        ):
            self._unfinished_entries[change.entry] = now

    def _rescan(self, now: float) -> None:
        """Compare all entries with the known state: at the start, after lost events, and where there are no events."""
        started = time.monotonic()
        names = snapshot.entries(self._source)
        states = snapshot.states(self._source, names)
        for name, members in snapshot.units(self._source, names).items():
            key = key_of(self._snapshot(members))
            if key == self._state.settled.get(name):
                continue
            candidate = self._candidate(name)
            if key != candidate.key:
                moved = {m: "renamed" if states.get(m) in self._unfinished else "written" for m in members}
                candidate.look(moved, key, now)
                if candidate.renamed:
                    self._arrived.add(name)
        self._unfinished = {state for name, state in states.items() if checkpoint_names.is_temporary(name)}
        self._rescan_at = now + max(RESCAN, 20 * (time.monotonic() - started))

    # -- decisions -------------------------------------------------------------------------------------------

    def _start_due(self, now: float) -> None:
        signs: Dict[str, str] = {}
        for candidate in self._candidates.values():
            if candidate.due is not None and candidate.due <= now and candidate.job is None:
                sign = candidate.sign(now)
                if sign is not None:
                    signs[candidate.name] = sign
        for candidate, sign, members, signature in self._examine(signs, now):
            if sign == "quiet":
                self._state.seen("quiet", candidate.name, key_of(signature))
            self._submit(candidate, sign, members, signature, must_verify=sign == "verified")

    def _examine(self, signs: Dict[str, str], now: float) -> List[Examined]:
        """The eligible candidates that are not being written, and that did not change during the examination."""
        if not signs:
            return []
        entries = self._entries()
        looked: List[Examined] = []
        for name, sign in signs.items():
            candidate = self._candidate(name)
            members = entries.get(name, [name] if sign == "sdk" else [])
            if self._is_eligible(candidate, members, entries):
                signature = self._snapshot(members)
                if snapshot.counts(signature):
                    looked.append((candidate, sign, members, signature))
        versions = {candidate.name: candidate.version for candidate, *_ in looked}
        writers = open_files.being_written(
            self._source,
            [member for _, sign, _, signature in looked if sign != "sdk" for member in signature],
        )
        for candidate, _, _, signature in looked:
            if any(member.ino in writers for member in signature):
                candidate.still_open(now)
                candidate.version += 1
        self._read_events(now)
        return [look for look in looked if look[0].version == versions[look[0].name]]

    def _is_eligible(self, candidate: Candidate, members: List[str], entries: Dict[str, List[str]]) -> bool:
        if candidate.commit is not None:
            return True
        if checkpoint_names.is_weak(candidate.name) and candidate.name not in checkpoint_names.strong_units(
            entries
        ):
            return False
        if checkpoint_names.is_note(candidate.name) and not candidate.renamed:
            return False
        return bool(members) and not checkpoint_names.is_partial(members)

    def _decide_rest(self, now: float, violent: bool) -> None:
        """Decide about every candidate that has changed since its last decision, oldest first."""
        entries = self._entries()
        pending = []
        for name, members in checkpoint_names.strong_units(entries).items():
            signature = self._snapshot(members)
            key = key_of(signature)
            if checkpoint_names.is_note(name) and self._state.complete["renamed"].get(name) != key:
                continue
            if key != self._state.settled.get(name) and snapshot.counts(signature):
                pending.append((max(member.mtime_ns for member in signature), name, members, key))
        for candidate in self._candidates.values():
            if candidate.commit is not None and all(candidate.name != name for _, name, _, _ in pending):
                pending.append((0, candidate.name, entries.get(candidate.name, [candidate.name]), ""))
        for _, name, members, key in sorted(pending):
            candidate = self._candidate(name)
            how = self._last_sign(candidate, key, violent)
            unproven = how == "verified"
            signature = self._snapshot(members)
            self._submit(candidate, how, members, signature, must_verify=unproven, suspect=unproven)
            while self._stager.waiting:
                self._collect(now, wait=True)

    def _last_sign(self, candidate: Candidate, key: str, violent: bool) -> str:
        if candidate.declared:
            return "sdk"
        # After a power cut a file may have its name but not its content.
        trusted = not self._state.rebooted
        if trusted and self._state.complete["renamed"].get(candidate.name) == key:
            return "rename"
        if not violent or (trusted and self._state.complete["quiet"].get(candidate.name) == key):
            return "quiet"
        return "verified"

    # -- copying ---------------------------------------------------------------------------------------------

    def _submit(
        self,
        candidate: Candidate,
        how: str,
        members: List[str],
        signature: snapshot.Signature,
        *,
        must_verify: bool,
        suspect: bool = False,
    ) -> None:
        self._state.number += 1
        number = self._state.number
        candidate.job = stager.StagingJob(
            name=candidate.name,
            members=members,
            how=how,
            source=self._source,
            target=os.path.join(self._directory, layout.staged(number) + ".tmp"),
            number=number,
            must_verify=must_verify,
            suspect=suspect,
            pointer=snapshot.pointer(self._source, candidate.name, members),
            known=self._state.contents.get(candidate.name, ""),
            hashed=not self._near,
            patient=not candidate.missed,
            version=candidate.version,
            commit=candidate.commit if how == "sdk" else None,
            examined=signature,
        )
        self._stager.submit(candidate.job)

    def _collect(self, now: float, *, wait: bool = False) -> None:
        while True:
            outcome = self._stager.next_outcome(None if wait else 0.0)
            if outcome is None:
                return
            wait = False
            self._drain_wake()
            if self._watch is not None:
                self._update(now)
            self._conclude(outcome, now)

    def _conclude(self, outcome: stager.StagingOutcome, now: float) -> None:
        job = outcome.job
        candidate = self._candidate(job.name)
        commit = candidate.commit_of(job)
        candidate.copied(now, outcome.seconds)
        if outcome.status == "staged" and job.commit is not None and outcome.signature != job.examined:
            # It was replaced before the copy began. The copy is of a version that the SDK has declared since, or will declare.
            if not candidate.declared or self._snapshot(job.members) != outcome.signature:
                stager.remove(job.target)
                candidate.due = candidate.due or now + RENAME_SETTLE
                return
            commit = candidate.commit
        if job.stale or outcome.status == "changed":
            stager.remove(job.target)
            candidate.missed = True
            candidate.due = candidate.due or now + min(self._quiet, EXAMINE_AGAIN)
            return
        if outcome.status in ("disk-full", "failed"):
            self._warn(outcome)
            candidate.due = now + (RETRY_DISK if outcome.status == "disk-full" else RETRY_FAILED)
            return
        if outcome.status == "unproven":
            candidate.closed = False
            candidate.due = candidate.due or candidate.changed + self._quiet
            return
        candidate.missed = False
        if outcome.status == "staged":
            self._commit(outcome, commit)
        elif outcome.status == "rejected" and f"{job.name} {outcome.content}" not in self._state.refused:
            self._state.refuse(job.name, key_of(outcome.signature), outcome.content)
            self._announce(self._entry("rejected", name=job.name, reason=outcome.reason))
        elif outcome.status in ("same", "rejected"):
            self._state.settled[job.name] = key_of(outcome.signature)
        candidate.settle(job)

    def _commit(self, outcome: stager.StagingOutcome, declared: Optional[Dict[str, Any]]) -> None:
        """Rename the copy to its final name and journal it. After a crash between the two, the next `begin` journals it."""
        job = outcome.job
        commit = declared or {}
        record = formats.StagedCheckpoint(
            number=job.number,
            generation=self._generation,
            name=job.name,
            how=job.how if declared is None else "sdk",
            files=outcome.files,
            step=commit["step"] if commit.get("step") is not None else checkpoint_names.step_of(job.name),
            metrics=commit.get("metrics") or {},
            at=time.time(),
            written_at=max(member.mtime_ns for member in outcome.signature) / 1e9,
        ).to_json()
        self._state.staged(record, key_of(outcome.signature), outcome.content)
        final = job.target[: -len(".tmp")]
        os.rename(job.target, final)
        formats.sync_directory(os.path.dirname(final))
        self._warned = False
        self._announce({"k": "checkpoint", **record})

    # -- announcements ---------------------------------------------------------------------------------------

    def _announce(self, entry: Dict[str, Any]) -> None:
        self._outbox.append(entry)
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._journal(self._outbox[0])
            except OSError:
                return  # The disk is full: tried again at the next poll; the copies are safe.
            self._outbox.pop(0)

    def _warn(self, outcome: stager.StagingOutcome) -> None:
        if self._warned:
            return
        self._warned = True
        area = os.path.join(self._directory, layout.STAGED)
        message = outcome.reason
        if outcome.status == "disk-full":
            message = f"no room to keep checkpoint {outcome.job.name} on the disk of {area}: {outcome.reason}; trying again"
        self._announce(self._entry("warning", name=outcome.job.name, message=message))

    def _entry(self, kind: str, **fields: Any) -> Dict[str, Any]:
        return {"k": kind, "generation": self._generation, **fields, "at": time.time()}

    # -- helpers ---------------------------------------------------------------------------------------------

    def _candidate(self, name: str) -> Candidate:
        return self._candidates.setdefault(name, Candidate(name, self._quiet))

    def _entries(self) -> Dict[str, List[str]]:
        return snapshot.units(self._source, snapshot.entries(self._source))

    def _snapshot(self, members: List[str]) -> snapshot.Signature:
        """The state of the files. An entry with too many files is no checkpoint, which is reported once."""
        try:
            return snapshot.snapshot(self._source, members)
        except snapshot.TooMany as exc:
            if members[0] not in self._too_many:
                self._too_many.add(members[0])
                message = f"checkpoint {members[0]} is not kept: {exc.strerror}"
                self._announce(self._entry("warning", name=members[0], message=message))
            return ()

    def _next_time(self, now: float) -> Optional[float]:
        times = [
            candidate.due
            for candidate in self._candidates.values()
            if candidate.due is not None and candidate.job is None
        ]
        if self._outbox:
            times.append(now + 1.0)
        if self._watch is not None and self._watch.blind:
            times.append(self._rescan_at)
        if self._stager.waiting and self._epoll is None:
            times.append(now + 0.1)
        return min(times, default=None)

    def _forget(self) -> None:
        for candidate in self._candidates.values():
            if candidate.job is not None:
                candidate.job.stale = True
        while self._stager.waiting:
            outcome = self._stager.next_outcome(None)
            if outcome is not None:
                stager.remove(outcome.job.target)
        self._candidates = {}
        self._arrived = set()
        self._unfinished_entries = {}
        self._unfinished = set()
        self._outbox = []
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
