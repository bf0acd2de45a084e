"""Stages a checkpoint: makes the copy that is verified, hashed and transferred.

The training may write during the copy. So inode, size and modification time of every file are compared before and after, and a
copy of a file that has changed is discarded. Where the file system supports it, the copy shares its blocks with the source
(reflink). It is never a hard link, because overwriting the file would change the copy too.

    StagingJob      what to copy, and the sign that it is complete
    StagingOutcome  the result
    Stager          one thread of low priority that does one job after another
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import queue
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from stoker.launcher.checkpoints import snapshot
from stoker.launcher.verify import verify
from stoker.linux import direct_io, idle_throttle
from stoker.linux.descriptors import Closing
from stoker.task import formats

HEADROOM = 16 << 20
"""Bytes that a copy leaves free on the disk, for the training's next checkpoint."""

NICE = 15
"""For the work between two pauses, and for small copies, which have none. With the lowest priority (19) a copy would make no
progress on a machine with more than one training."""

_FICLONE = 0x40049409
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class StagingJob:
    """One checkpoint to copy. The owner sets `stale` when the source changes meanwhile."""

    name: str
    members: List[str]
    """Top-level entries."""
    how: str
    source: str
    """The checkpoint directory."""
    target: str
    """The target of the copy: `.../staged/NNNNNN.tmp`."""
    number: int
    must_verify: bool = False
    """Offered only if the format proves that it is complete. A failure is not reported."""
    suspect: bool = False
    """The writer died violently: a checkpoint that the format cannot prove complete is rejected."""
    pointer: Optional[Tuple[str, bytes]] = None
    """A small file to add that names this checkpoint: (name, content)."""
    known: str = ""
    """Content of the last staged version."""
    hashed: bool = True
    """Whether large files are hashed too. Not needed where the server takes these files directly, because it hashes them."""
    plain: bool = False
    """A copy for this task directory alone: it is neither hashed nor synced."""
    spare: int = 0
    """Bytes that the copy leaves free on the disk, beyond `HEADROOM`."""
    reuse: Mapping[str, Tuple[snapshot.State, str]] = field(default_factory=dict)
    """By path: the state of a file in an earlier copy, and where that copy is. A file in this state is linked to it."""
    patient: bool = True
    """Whether the copy may be throttled. Not if the source changed before its last copy was complete."""
    stale: bool = False
    version: int = 0
    """For the owner: the version of the candidate."""
    commit: Optional[Dict[str, Any]] = None
    """For the owner: what the SDK has declared of this version."""
    examined: snapshot.Signature = ()
    """For the owner: the files when it was decided to copy them."""


@dataclass
class StagingOutcome:
    job: StagingJob
    status: str
    """staged | same | changed | rejected | unproven | absent | disk-full | failed"""
    reason: str = ""
    signature: snapshot.Signature = ()
    content: str = ""
    files: List[Dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    """Duration without the pauses."""


class Stager:
    """Runs jobs on one thread. Only the owner's thread calls `submit` and `next_outcome`.

    `wake` is called on the stager's thread after each job, to wake the owner; it must not block. `turns`: see
    `stoker.linux.idle_throttle`.
    """

    def __init__(self, wake: Callable[[], None], turns: str = "") -> None:
        self._jobs: "queue.SimpleQueue[Optional[StagingJob]]" = queue.SimpleQueue()
        self.done: "queue.SimpleQueue[StagingOutcome]" = queue.SimpleQueue()
        self._wake = wake
        self._turns = turns
        self._thread: Optional[threading.Thread] = None
        self.waiting = 0
        self._patient = True

    def submit(self, job: StagingJob) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stoker-stager", daemon=True)
            self._thread.start()
        self.waiting += 1
        self._jobs.put(job)

    def hurry(self, hurry: bool) -> None:
        """Whether to copy at full speed: the training is over, and the end of the task waits for the copies."""
        self._patient = not hurry

    def _is_hurried(self, job: StagingJob) -> bool:
        """Whether this copy is not throttled: other jobs wait, or its source has changed."""
        return not self._patient or not job.patient or job.stale or self.waiting > 1

    def next_outcome(self, timeout: Optional[float] = 0.0) -> Optional[StagingOutcome]:
        """A finished job, or None when there is none (within `timeout`; None: for as long as it takes)."""
        if not self.waiting:
            return None
        try:
            outcome = self.done.get(block=timeout != 0.0, timeout=timeout)
        except queue.Empty:
            return None
        self.waiting -= 1
        return outcome

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        if self._patient:
            lower_priority()
        while True:
            job = self._jobs.get()
            if job is None:
                return
            started = time.monotonic()
            with idle_throttle.IdleThrottle(functools.partial(self._is_hurried, job), self._turns) as rests:
                outcome = stage(job, rests.pause)
            outcome.seconds = time.monotonic() - started - rests.rested
            self.done.put(outcome)
            self._wake()


def stage(job: StagingJob, pause: idle_throttle.Pause = idle_throttle.none) -> StagingOutcome:
    """Copy, hash and verify. Only an outcome `staged` leaves a copy; the source is only read. `pause`: called between two
    pieces of large files."""
    try:
        outcome = _stage(job, pause)
    except OSError as exc:
        if exc.errno in _DISK_FULL:
            outcome = StagingOutcome(job, "disk-full", str(exc))
        elif exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            outcome = StagingOutcome(job, "changed", str(exc))
        else:
            outcome = StagingOutcome(job, "failed", f"cannot copy {job.name}: {exc}")
    except Exception as exc:  # noqa: BLE001 - any file may be malformed, and the owner waits for an outcome
        outcome = StagingOutcome(job, "failed", f"cannot copy {job.name}: {type(exc).__name__}: {exc}")
    if outcome.status != "staged":
        remove(job.target)
    return outcome


def _stage(job: StagingJob, pause: idle_throttle.Pause) -> StagingOutcome:
    before = snapshot.snapshot(job.source, job.members)
    if not snapshot.counts(before):
        return StagingOutcome(job, "absent", signature=before)
    if job.must_verify and not job.suspect and not _could_prove(job, before):
        return StagingOutcome(job, "unproven", "its format is not known", before)
    _check_room(job, before)
    remove(job.target)
    os.mkdir(job.target, 0o700)
    files = _copy_all(job, before, pause)
    if files is None or (snapshot.snapshot(job.source, job.members) != before and len(before) > 1):
        return StagingOutcome(job, "changed", signature=before)
    members = {member.path: member for member in before}
    content = digest([_with_identity(file, members[file["path"]]) for file in files])
    if content == job.known:
        return StagingOutcome(job, "same", signature=before, content=content)
    verdict = verify.verify_unit(job.target, job.name, [member.path for member in before], pause)
    if verdict.ok is False and not (job.must_verify and not job.suspect):
        return StagingOutcome(job, "rejected", verdict.reason, before, content)
    if verdict.ok is not True and job.must_verify:
        reason = verdict.reason or "its format cannot prove that it is complete"
        return StagingOutcome(job, "rejected" if job.suspect else "unproven", reason, before, content)
    if job.pointer is not None:
        files.append(_write_pointer(job.target, *job.pointer))
    if not job.plain:
        sync_tree(job.target)
    return StagingOutcome(job, "staged", signature=before, content=content, files=files)


def _could_prove(job: StagingJob, signature: snapshot.Signature) -> bool:
    """Whether its format can prove a checkpoint complete. If not, it need not be copied."""
    return len(signature) == 1 and verify.recognised(os.path.join(job.source, signature[0].path))


def _check_room(job: StagingJob, signature: snapshot.Signature) -> None:
    """Refuse a copy for which the disk has too little space, unless a reflink is possible."""
    room = os.statvfs(os.path.dirname(job.target))
    free = room.f_bavail * room.f_frsize
    need = sum(member.size for member in signature if not _is_reusable(job, member))
    if free < need + HEADROOM + job.spare and not _can_reflink(job, signature):
        raise OSError(errno.ENOSPC, f"{need} bytes are needed and {free} are free", job.target)


def _can_reflink(job: StagingJob, signature: snapshot.Signature) -> bool:
    probe = job.target + ".probe"
    root = snapshot.open_directory(job.source)
    try:
        with Closing(snapshot.open_file(root, max(signature, key=lambda member: member.size).path)) as source:
            target = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                return reflink(source, target)
            finally:
                os.close(target)
                os.unlink(probe)
    except OSError:
        return False
    finally:
        os.close(root)


def _copy_all(
    job: StagingJob, signature: snapshot.Signature, pause: idle_throttle.Pause
) -> Optional[List[Dict[str, Any]]]:
    """Copy the files; their entries as in `StagedCheckpoint.files`, or None when one of them changed meanwhile."""
    with Closing(snapshot.open_directory(job.source)) as root:
        files: List[Dict[str, Any]] = []
        for member in signature:
            if job.stale:
                return None
            target = os.path.join(job.target, member.path)
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            if _is_reusable(job, member):
                os.link(job.reuse[member.path][1], target, follow_symlinks=False)
                files.append(formats.CheckpointFile(member.path, member.size, "", member.mode).to_json())
                continue
            with Closing(snapshot.open_file(root, member.path)) as source:
                if not _unchanged(source, member):
                    return None
                sha256 = _copy(
                    source,
                    target,
                    member,
                    job,
                    pause if member.size >= direct_io.LARGE else idle_throttle.none,
                )
                if not _unchanged(source, member):
                    return None
            files.append(formats.CheckpointFile(member.path, member.size, sha256, member.mode).to_json())
        return files


def _is_reusable(job: StagingJob, member: snapshot.FileState) -> bool:
    return member.path in job.reuse and job.reuse[member.path][0] == (
        member.ino,
        member.size,
        member.mtime_ns,
    )


def _unchanged(fd: int, member: snapshot.FileState) -> bool:
    info = os.fstat(fd)
    return (info.st_ino, info.st_size, info.st_mtime_ns) == (member.ino, member.size, member.mtime_ns)


def _copy(
    source: int, target: str, member: snapshot.FileState, job: StagingJob, pause: idle_throttle.Pause
) -> str:
    """Copy one file. Returns the SHA-256 of the copy; empty where it is not needed."""
    hashed = not job.plain and (job.hashed or member.size < direct_io.LARGE)
    sha256 = hashlib.sha256() if hashed else None
    with Closing(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)) as fd:
        cloned = reflink(source, fd)
        if sha256 is not None or not cloned:
            writer = None if cloned else direct_io.Writer(fd, member.size)
            for piece in direct_io.pieces(fd if cloned else source, member.size):
                if job.stale:
                    break
                if sha256 is not None:
                    sha256.update(piece)
                if writer is not None:
                    writer.write_piece(piece)
                pause()
            if writer is not None:
                writer.finish()
        os.fchmod(fd, member.mode & 0o777 | 0o400)
    return "" if sha256 is None else sha256.hexdigest()


def reflink(source: int, target: int) -> bool:
    try:
        import fcntl

        fcntl.ioctl(target, _FICLONE, source)
    except (ImportError, OSError):
        return False
    return True


def _write_pointer(target: str, name: str, content: bytes) -> Dict[str, Any]:
    with open(os.path.join(target, name), "xb") as file:
        file.write(content)
    return formats.CheckpointFile(name, len(content), hashlib.sha256(content).hexdigest()).to_json()


def digest(files: List[Dict[str, Any]]) -> str:
    """A digest of the names and contents of a checkpoint, without modes and times."""
    lines = sorted(f"{file['sha256']} {file['size']} {file['path']}" for file in files)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _with_identity(file: Dict[str, Any], member: snapshot.FileState) -> Dict[str, Any]:
    """The entry with a replacement for a missing hash, which changes whenever the file is written."""
    return file if file["sha256"] else {**file, "sha256": f"{member.ino}-{member.mtime_ns}"}


def sync_tree(path: str) -> None:
    for directory, _, names in os.walk(path):
        for name in names:
            with Closing(os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)) as fd:
                os.fsync(fd)
        formats.sync_directory(directory)


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def lower_priority() -> None:
    """Lower this thread's priority for CPU time and, where the kernel supports it, for disk time."""
    if sys.platform != "linux":
        return  # Elsewhere priority belongs to the whole process.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
    if number is not None:
        # ioprio_set(IOPRIO_WHO_PROCESS, this thread, best effort class, lowest level)
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, (2 << 13) | 7)
