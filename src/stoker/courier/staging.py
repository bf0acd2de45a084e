"""Receives content in pieces, from which a directory is built (see placement).

    .courier/stage/SLOT/DIGEST.part    arriving; its size says how much has arrived
    .courier/stage/SLOT/DIGEST         complete and verified
    .courier/stage/SLOT/tree/          being built
    .courier/placed/PATH               what was placed there last
    .courier/trash/                    being removed

A slot is for one manifest at one path; another manifest for that path replaces it. All of this is on the task's own
volume, and user code can reach it. Its changes affect only itself, because links are never followed. If `checkpoints/`
and `staged/` are separate volumes, nothing can be renamed between them; each then has a `.courier` of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from stoker.courier.trash import Trash
from stoker.linux.descriptors import Closing
from stoker.task import layout
from stoker.task.safe_open import OPEN_DIRECTORY, open_beneath

HOME = ".courier"
TREE = "tree"
_BLOCK = 1 << 20
_PREDECESSOR = 5.0
"""Seconds that a piece waits for the one before it, which arrives over another connection."""


class Damaged(Exception):
    """Content does not match its hash."""


class Piece(NamedTuple):
    digest: str
    size: int
    """Size of the whole content."""
    offset: int
    length: int


class _Incoming:
    """One arriving content, guarded by its condition."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.hash = hashlib.sha256() if self.size == 0 else None
        """None: an earlier courier began it; it is read again at the end (`verify`)."""
        self.condition = threading.Condition()
        self.over = False


class Staging:
    """May be used from any thread. `recover` is called first."""

    def __init__(self, directory: str, *, lasting: bool = False) -> None:
        """`lasting`: checkpoints are on separate volumes, which outlive the task."""
        self._directory = directory
        self._apart = layout.LASTING if lasting else ()
        self.homes = (HOME, *(f"{top}/{HOME}" for top in self._apart))
        self._trashes = {home: Trash(directory, f"{home}/trash") for home in self.homes}
        self._lock = threading.Lock()
        self._incoming: Dict[Tuple[str, str], _Incoming] = {}

    def recover(self) -> None:
        """Clean up after a courier that was killed: half-built trees are removed. So are files with a second link:
        they belong to a tree that was placed, and the training may have changed them."""
        for home, trash in self._trashes.items():
            try:
                os.close(open_beneath(self._directory, home))
            except OSError:
                continue  # absent, or replaced by user code: the next request for it reports the error
            with self.open(stage_of(home)) as stage:
                self._recover(stage, trash)

    def _recover(self, stage: int, trash: Trash) -> None:
        for slot in os.listdir(stage):
            with contextlib.suppress(OSError), subdirectory(stage, slot) as here:
                trash.throw(here, TREE)
        trash.empty()
        for slot in os.listdir(stage):
            with contextlib.suppress(OSError), subdirectory(stage, slot) as here:
                _drop_shared(here, trash)
        trash.empty()

    def home(self, path: str) -> str:
        """The directory of the courier's own files on the volume of this path."""
        top = path.split("/")[0]
        return f"{top}/{HOME}" if top in self._apart else HOME

    def trash(self, path: str) -> Trash:
        """The trash on the volume of this path."""
        return self._trashes[self.home(path)]

    def here(self, path: str, manifest: str, digests: Sequence[str]) -> Tuple[List[str], Dict[str, int]]:
        """The contents that are complete, and the size of those that have begun."""
        self._clear(path, manifest)
        complete: List[str] = []
        begun: Dict[str, int] = {}
        with self.slot(path, manifest) as here:
            for digest in digests:
                if regular(here, digest) is not None:
                    complete.append(digest)
                else:
                    info = regular(here, f"{digest}.part")
                    if info is not None:
                        begun[digest] = info.st_size
        return complete, begun

    def receive(
        self, path: str, manifest: str, pieces: Sequence[Piece], data: memoryview
    ) -> Tuple[List[str], Dict[str, int]]:
        """Receive pieces, whose bytes follow each other in `data`. The result is that of `here`. Pieces may repeat and
        overlap, and those of one content may come in any order within a few seconds. Raises Damaged when a whole
        content does not match its hash, and deletes it."""
        complete: List[str] = []
        begun: Dict[str, int] = {}
        at = 0
        with self.slot(path, manifest) as here:
            for piece in pieces:
                size = self._take(slot_name(path, manifest), piece, data[at : at + piece.length], here)
                at += piece.length
                if size is None:
                    complete.append(piece.digest)
                else:
                    begun[piece.digest] = size
        return complete, begun

    def verify(self, path: str, manifest: str, digest: str, size: int) -> None:
        """Complete a content that an earlier courier began: all of it is read again."""
        with self.slot(path, manifest) as here:
            if regular(here, digest) is None:
                name = slot_name(path, manifest)
                incoming = self._arriving(name, digest, here)
                with incoming.condition:
                    if not incoming.over:
                        self._complete(name, digest, size, here, incoming)

    def _take(self, slot: str, piece: Piece, data: memoryview, here: int) -> Optional[int]:
        """The size of a content so far; None: it is complete."""
        if regular(here, piece.digest) is not None:
            return None
        incoming = self._arriving(slot, piece.digest, here)
        with incoming.condition:
            incoming.condition.wait_for(lambda: incoming.over or incoming.size >= piece.offset, _PREDECESSOR)
            if incoming.over:
                return None if regular(here, piece.digest) is not None else 0
            if incoming.size >= piece.offset:
                _append(incoming, data[incoming.size - piece.offset :])
                incoming.condition.notify_all()
            if incoming.size < piece.size or incoming.hash is None:
                return incoming.size
            self._complete(slot, piece.digest, piece.size, here, incoming)
            return None

    def _arriving(self, slot: str, digest: str, here: int) -> _Incoming:
        with self._lock:
            found = self._incoming.get((slot, digest))
            if found is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(f"{digest}.part", flags, 0o600, dir_fd=here)
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    os.close(fd)
                    raise Damaged(f"{digest} is not a regular file")
                found = self._incoming[slot, digest] = _Incoming(fd)
            return found

    def _complete(self, slot: str, digest: str, size: int, here: int, incoming: _Incoming) -> None:
        try:
            found = incoming.hash.hexdigest() if incoming.hash is not None else _hash(incoming.fd)
            if found != digest or incoming.size != size:
                os.unlink(f"{digest}.part", dir_fd=here)
                raise Damaged(
                    f"{incoming.size} bytes with the hash {found} arrived instead of {size} with {digest}"
                )
            os.rename(f"{digest}.part", digest, src_dir_fd=here, dst_dir_fd=here)
        finally:
            self._forget(slot, digest, incoming)

    def _forget(self, slot: str, digest: str, incoming: _Incoming) -> None:
        with self._lock:
            self._incoming.pop((slot, digest), None)
        incoming.over = True
        os.close(incoming.fd)
        incoming.condition.notify_all()

    def _clear(self, path: str, manifest: str) -> None:
        """Discard what was begun for this path with another manifest."""
        keep, prefix = slot_name(path, manifest), slot_name(path, "")
        with self.open(stage_of(self.home(path))) as stage:
            stale = [name for name in os.listdir(stage) if name.startswith(prefix) and name != keep]
            for name in stale:
                self.trash(path).throw(stage, name)
        if not stale:
            return
        with self._lock:
            arriving = [(key, one) for key, one in self._incoming.items() if key[0] in stale]
        for (slot, digest), incoming in arriving:
            with incoming.condition:
                if not incoming.over:
                    self._forget(slot, digest, incoming)
        self.trash(path).empty()

    @contextlib.contextmanager
    def slot(self, path: str, manifest: str) -> Iterator[int]:
        with self.open(f"{stage_of(self.home(path))}/{slot_name(path, manifest)}") as fd:
            yield fd

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[int]:
        """A directory below the task's, created if it is absent."""
        private = HOME in path.split("/")[:2]
        with Closing(
            open_beneath(self._directory, path, create=True, mode=0o700 if private else 0o755)
        ) as fd:
            yield fd


def stage_of(home: str) -> str:
    return f"{home}/stage"


def slot_name(path: str, manifest: str) -> str:
    return f"{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}-{manifest}"


def regular(here: int, name: str) -> Optional[os.stat_result]:
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


@contextlib.contextmanager
def subdirectory(parent: int, name: str) -> Iterator[int]:
    with Closing(os.open(name, OPEN_DIRECTORY, dir_fd=parent)) as fd:
        yield fd


def _drop_shared(here: int, trash: Trash) -> None:
    with os.scandir(here) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_nlink != 1:
                trash.throw(here, entry.name)


def _append(incoming: _Incoming, data: memoryview) -> None:
    while data:
        count = os.pwrite(incoming.fd, data, incoming.size)
        if incoming.hash is not None:
            incoming.hash.update(data[:count])
        incoming.size += count
        data = data[count:]


def _hash(fd: int) -> str:
    found = hashlib.sha256()
    done = 0
    while True:
        data = os.pread(fd, _BLOCK, done)
        if not data:
            return found.hexdigest()
        found.update(data)
        done += len(data)
