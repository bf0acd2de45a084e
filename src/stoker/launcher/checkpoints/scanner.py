"""Finding finished checkpoints while training goes on, and what is left of them when it does not.

The launcher sees what nobody sees later: renames, open files, and whether the writer was still alive. So it
decides here which checkpoints are complete, copies them to `staged/` and writes them into the journal; whoever
carries them away only reads. A checkpoint is complete, strongest sign first, when

    sdk         the SDK said so
    rename      it was renamed into place
    quiet       its files have been quiet for some seconds, nobody has one open for writing, the writer lived on
    verified    its format proves it: after a violent death, and for files that are overwritten too often to be quiet

What is damaged is never offered, whatever the sign.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from stoker.launcher.checkpoints import open_files, snapshot, stager
from stoker.launcher.checkpoints.candidate import LOOK_AGAIN, Candidate
from stoker.launcher.checkpoints.directory_watch import DirectoryChange, DirectoryWatch
from stoker.launcher.checkpoints.scan_state import ScanState, key_of
from stoker.launcher.checkpoints.sdk_commits import Commits
from stoker.task import checkpoint_names, formats, layout

RETRY_DISK = 30.0
RETRY_FAILED = 60.0
PENDING = 64
"""Names that are told of checkpoints that are being written."""
UNREADY = 60.0
"""Seconds after which something with a temporary name counts as left behind, not as being written."""
RESCAN = 1.0
"""Seconds between looks where the kernel does not tell; more when one look takes long."""


Look = Tuple[Candidate, str, List[str], snapshot.Signature]
"""A checkpoint, why it may be complete, its top-level entries and the state of its files."""


class Scanner:
    """Scans one task directory. All methods are called from one thread, the owner's; so is `journal`.

    `begin` once per generation, then `poll` whenever `fileno` is readable or the time that `poll` returned (on
    the scanner's clock) has come, for as long as processes of the task live; `finish` once they are all gone.
    Valid after a crash at any point: a new scanner that begins the same generation and finishes it knows what
    was seen, announces what was staged and not announced, and announces nothing twice. If `journal` raises
    OSError (no room) the entry is kept and tried again. `near`: the server takes the copies out of this very
    directory.
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
        self._units: Dict[str, Candidate] = {}
        self._facts = ScanState(directory)
        self._commits = Commits(directory)
        self._watch: Optional[DirectoryWatch] = None
        self._rescan_at = 0.0
        self._arrived: Set[str] = set()
        """Checkpoints of which something was renamed into place, not yet noted."""
        self._unfinished: Set[snapshot.State] = set()
        """Files that had a temporary name at the last look: how a rename is known where the kernel does not tell."""
        self._outbox: List[Dict[str, Any]] = []
        """Entries that the journal has not taken yet, in order."""
        self._unready: Dict[str, float] = {}
        """Entries with temporary names that are being written, and when something last happened to them."""
        self._warned = False
        self._too_many: Set[str] = set()
        self.scans = 0
        """Looks at everything that there was to see, finished."""
        self._wake_r, self._wake_w = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        )
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._epoll.register(self._wake_r, select.EPOLLIN)
        self._stager = stager.Stager(self._wake, os.path.join(directory, layout.TURNS) if near else "")

    def fileno(self) -> Optional[int]:
        """Readable when there is something to do. None: this system cannot tell, go by the time."""
        return None if self._epoll is None else self._epoll.fileno()

    def begin(self, generation: int) -> None:
        """Start scanning a generation. What is there already was restored, and is no news unless it changes."""
        self._forget()
        self._stager.hurry(False)
        self._generation = generation
        self._source = os.path.join(self._directory, layout.checkpoints(generation))
        os.makedirs(self._source, exist_ok=True)
        self._facts.load(generation)
        for record in self._facts.unjournaled:
            self._announce({"k": "checkpoint", **record})
        self._watch = self._start_watch()
        if self._facts.resumed:
            self._commits.begin(generation, self._facts.commits_offset)
            self._look_everywhere(self._clock())
        else:
            self._commits.begin(generation, None)
            there = self._entries().items()
            keys = {name: key_of(self._snapshot(members)) for name, members in there}
            self._facts.begin(keys, self._commits.offset)

    def poll(self, now: float) -> Optional[float]:
        """Take in what happened, begin and finish copies. Returns when to call again at the latest; None: no hurry."""
        if self._watch is None:
            return None
        self._flush()
        looked = self._rescan_at
        self._take_in(now)
        self._collect(now)
        self._start_due(now)
        if self._watch is not None and (not self._watch.blind or self._rescan_at != looked):
            self.scans += 1
        return self._next_time(now)

    def pending(self) -> List[str]:
        """Names of checkpoints that are being written, or not dealt with yet. At most `PENDING`."""
        names = {unit.name for unit in self._units.values() if unit.due is not None or unit.job is not None}
        since = self._clock() - UNREADY
        names |= {checkpoint_names.meant(entry) for entry, at in self._unready.items() if at > since}
        return sorted(names)[:PENDING]

    def finish(self, violent: bool) -> None:
        """All processes are gone: settle everything. Returns when every copy has been made or refused.

        `violent`: killed, crashed, out of memory; what was written last may be torn.
        """
        if self._watch is None:
            return
        now = self._clock()
        self._stager.hurry(True)
        self._take_in(now)
        while self._stager.waiting:
            self._collect(now, wait=True)
        self._stager.close()  # What is left is copied by a thread that has never given way to anybody.
        self._settle(now, violent)
        self._flush()
        self._unready = {}
        self.scans += 1
        self._stager.close()  # The owner may fork next, and should do so without threads.

    def close(self) -> None:
        """Gives everything back. A copy under way is finished or dropped; nothing is announced any more."""
        self._forget()
        self._stager.close()
        self._facts.close()
        if self._epoll is not None:
            self._epoll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # -- taking in -------------------------------------------------------------------------------------------

    def _take_in(self, now: float) -> None:
        assert self._watch is not None
        if self._watch.overflowed or (self._watch.blind and now >= self._rescan_at):
            self._watch.overflowed = False
            if not self._watch.active:
                # Others may have given instances back since; begin to see before looking.
                self._watch = self._start_watch()
            self._look_everywhere(now)
        self._read_events(now)
        for commit in self._commits.read():
            self._unit(checkpoint_names.unit_of(commit["name"]) or commit["name"]).declare(commit, now)

    def _start_watch(self) -> DirectoryWatch:
        watch = DirectoryWatch(self._source)
        if self._epoll is not None and watch.active:
            self._epoll.register(watch.fileno() or 0, select.EPOLLIN)
        return watch

    def _read_events(self, now: float) -> None:
        """A rename is noted, because it cannot be seen later; but only if nothing was written since."""
        assert self._watch is not None
        for change in self._watch.read():
            name = checkpoint_names.unit_of(change.entry)
            if name is None:
                self._note_unready(change, now)
                continue
            unit = self._unit(name)
            unit.see(change, now)
            if change.kind == "arrived" and not change.inside:
                self._arrived.add(name)
            elif not unit.fresh and unit.job is None and unit.commit is None:
                del self._units[name]
        arrived, self._arrived = self._arrived, set()
        looked = self._look_at({name: "rename" for name in arrived if self._unit(name).renamed}, now)
        for unit, _, _, signature in looked:
            self._facts.seen("renamed", unit.name, key_of(signature))

    def _note_unready(self, change: DirectoryChange, now: float) -> None:
        if change.kind == "gone" and not change.inside:
            self._unready.pop(change.entry, None)
        elif checkpoint_names.is_unfinished(change.entry) and (
            change.entry in self._unready or len(self._unready) < PENDING
        ):
            self._unready[change.entry] = now

    def _look_everywhere(self, now: float) -> None:
        """Compare everything with what is known: at the start, after lost events, and where there are none."""
        started = time.monotonic()
        names = snapshot.entries(self._source)
        states = snapshot.states(self._source, names)
        for name, members in checkpoint_names.group(names).items():
            key = key_of(self._snapshot(members))
            if key == self._facts.settled.get(name):
                continue
            unit = self._unit(name)
            if key != unit.key:
                moved = {m: "renamed" if states.get(m) in self._unfinished else "written" for m in members}
                unit.look(moved, key, now)
                if unit.renamed:
                    self._arrived.add(name)
        self._unfinished = {state for name, state in states.items() if checkpoint_names.is_temporary(name)}
        self._rescan_at = now + max(RESCAN, 20 * (time.monotonic() - started))

    # -- deciding --------------------------------------------------------------------------------------------

    def _start_due(self, now: float) -> None:
        signs: Dict[str, str] = {}
        for unit in self._units.values():
            if unit.due is not None and unit.due <= now and unit.job is None:
                sign = unit.sign(now)
                if sign is not None:
                    signs[unit.name] = sign
        for unit, sign, members, signature in self._look_at(signs, now):
            if sign == "quiet":
                self._facts.seen("quiet", unit.name, key_of(signature))
            self._submit(unit, sign, members, must_verify=sign == "verified")

    def _look_at(self, signs: Dict[str, str], now: float) -> List[Look]:
        """Those that are worth keeping, are not being written, and have not changed while we looked."""
        if not signs:
            return []
        entries = self._entries()
        looked: List[Look] = []
        for name, sign in signs.items():
            unit = self._unit(name)
            members = entries.get(name, [name] if sign == "sdk" else [])
            if self._worth(unit, members, entries):
                signature = self._snapshot(members)
                if snapshot.counts(signature):
                    looked.append((unit, sign, members, signature))
        versions = {unit.name: unit.version for unit, *_ in looked}
        writers = open_files.being_written(
            self._source,
            [member for _, sign, _, signature in looked if sign != "sdk" for member in signature],
        )
        for unit, _, _, signature in looked:
            if any(member.ino in writers for member in signature):
                unit.still_open(now)
                unit.version += 1
        self._read_events(now)
        return [look for look in looked if look[0].version == versions[look[0].name]]

    def _worth(self, unit: Candidate, members: List[str], entries: Dict[str, List[str]]) -> bool:
        if unit.commit is not None:
            return True
        if checkpoint_names.is_weak(unit.name) and unit.name not in checkpoint_names.strong_units(entries):
            return False
        if checkpoint_names.is_note(unit.name) and not unit.renamed:
            return False
        return bool(members) and not checkpoint_names.is_partial(members)

    def _settle(self, now: float, violent: bool) -> None:
        """Decide about everything that is not as it was when last dealt with, oldest first."""
        entries = self._entries()
        pending = []
        for name, members in checkpoint_names.strong_units(entries).items():
            signature = self._snapshot(members)
            key = key_of(signature)
            if checkpoint_names.is_note(name) and self._facts.complete["renamed"].get(name) != key:
                continue
            if key != self._facts.settled.get(name) and snapshot.counts(signature):
                pending.append((max(member.mtime_ns for member in signature), name, members, key))
        for unit in self._units.values():
            if unit.commit is not None and all(unit.name != name for _, name, _, _ in pending):
                pending.append((0, unit.name, entries.get(unit.name, [unit.name]), ""))
        for _, name, members, key in sorted(pending):
            unit = self._unit(name)
            how = self._last_sign(unit, key, violent)
            self._submit(unit, how, members, must_verify=how == "verified", suspect=how == "verified")
            while self._stager.waiting:
                self._collect(now, wait=True)

    def _last_sign(self, unit: Candidate, key: str, violent: bool) -> str:
        if unit.commit is not None:
            return "sdk"
        # After a power cut the names may be there without the bytes.
        trusted = not self._facts.rebooted
        if trusted and self._facts.complete["renamed"].get(unit.name) == key:
            return "rename"
        if not violent or (trusted and self._facts.complete["quiet"].get(unit.name) == key):
            return "quiet"
        return "verified"

    # -- copying ---------------------------------------------------------------------------------------------

    def _submit(
        self, unit: Candidate, how: str, members: List[str], *, must_verify: bool, suspect: bool = False
    ) -> None:
        self._facts.number += 1
        number = self._facts.number
        unit.job = stager.StagingJob(
            name=unit.name,
            members=members,
            how=how,
            source=self._source,
            target=os.path.join(self._directory, layout.staged(number) + ".tmp"),
            number=number,
            must_verify=must_verify,
            suspect=suspect,
            pointer=snapshot.pointer(self._source, unit.name, members),
            known=self._facts.contents.get(unit.name, ""),
            hashed=not self._near,
            patient=not unit.missed,
            version=unit.version,
        )
        self._stager.submit(unit.job)

    def _collect(self, now: float, *, wait: bool = False) -> None:
        """Deal with copies that are done."""
        while True:
            outcome = self._stager.next_outcome(None if wait else 0.0)
            if outcome is None:
                return
            wait = False
            self._drain_wake()
            if self._watch is not None:
                self._take_in(now)
            self._conclude(outcome, now)

    def _conclude(self, outcome: stager.StagingOutcome, now: float) -> None:
        job = outcome.job
        unit = self._unit(job.name)
        unit.copied(now, outcome.seconds)
        if job.stale or outcome.status == "changed":
            stager.remove(job.target)
            unit.missed = True
            unit.due = unit.due or now + min(self._quiet, LOOK_AGAIN)
            return
        if outcome.status in ("disk-full", "failed"):
            self._warn(outcome)
            unit.due = now + (RETRY_DISK if outcome.status == "disk-full" else RETRY_FAILED)
            return
        if outcome.status == "unproven":
            unit.closed = False
            unit.due = unit.due or unit.changed + self._quiet
            return
        unit.missed = False
        if outcome.status == "staged":
            self._commit(outcome, unit)
        elif outcome.status == "rejected" and f"{job.name} {outcome.content}" not in self._facts.refused:
            self._facts.refuse(job.name, key_of(outcome.signature), outcome.content)
            self._announce(self._entry("rejected", name=job.name, reason=outcome.reason))
        elif outcome.status in ("same", "rejected"):
            self._facts.settled[job.name] = key_of(outcome.signature)
        unit.settle(job.version)

    def _commit(self, outcome: stager.StagingOutcome, unit: Candidate) -> None:
        """The copy gets its name, and the journal says so. A crash between the two is mended at the next begin."""
        job = outcome.job
        said = unit.take_commit(job.version)
        commit = said or {}
        record = formats.StagedCheckpoint(
            number=job.number,
            generation=self._generation,
            name=job.name,
            how=job.how if said is None else "sdk",
            files=outcome.files,
            step=commit["step"] if commit.get("step") is not None else checkpoint_names.step_of(job.name),
            metrics=commit.get("metrics") or {},
            at=time.time(),
            written_at=max(member.mtime_ns for member in outcome.signature) / 1e9,
        ).to_json()
        self._facts.staged(record, key_of(outcome.signature), outcome.content)
        final = job.target[: -len(".tmp")]
        os.rename(job.target, final)
        formats.sync_directory(os.path.dirname(final))
        self._warned = False
        self._announce({"k": "checkpoint", **record})

    # -- telling ---------------------------------------------------------------------------------------------

    def _announce(self, entry: Dict[str, Any]) -> None:
        self._outbox.append(entry)
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._journal(self._outbox[0])
            except OSError:
                return  # No room: tried again at the next poll; the copies are safe.
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

    # -- small things ----------------------------------------------------------------------------------------

    def _unit(self, name: str) -> Candidate:
        return self._units.setdefault(name, Candidate(name, self._quiet))

    def _entries(self) -> Dict[str, List[str]]:
        return checkpoint_names.group(snapshot.entries(self._source))

    def _snapshot(self, members: List[str]) -> snapshot.Signature:
        """Too many files are no checkpoint; that is said once."""
        try:
            return snapshot.snapshot(self._source, members)
        except snapshot.TooMany as exc:
            if members[0] not in self._too_many:
                self._too_many.add(members[0])
                message = f"checkpoint {members[0]} is not kept: {exc.strerror}"
                self._announce(self._entry("warning", name=members[0], message=message))
            return ()

    def _next_time(self, now: float) -> Optional[float]:
        times = [unit.due for unit in self._units.values() if unit.due is not None and unit.job is None]
        if self._outbox:
            times.append(now + 1.0)
        if self._watch is not None and self._watch.blind:
            times.append(self._rescan_at)
        if self._stager.waiting and self._epoll is None:
            times.append(now + 0.1)
        return min(times, default=None)

    def _forget(self) -> None:
        for unit in self._units.values():
            if unit.job is not None:
                unit.job.stale = True
        while self._stager.waiting:
            outcome = self._stager.next_outcome(None)
            if outcome is not None:
                stager.remove(outcome.job.target)
        self._units = {}
        self._arrived = set()
        self._unready = {}
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
            pass  # Enough is in the pipe to wake the owner.

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_r, 4096)
        except BlockingIOError:
            pass
