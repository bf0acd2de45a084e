"""The blobs of one home, on its disk.

    objects/ab/cdef...   file contents
    trees/ab/cdef...     manifests of trees, canonical JSON
    tmp/                 being written; never read

Collecting is mark and sweep with a grace age. A blob that is asked for or stored again counts as fresh: its
modification time is renewed. So nothing disappears between "it is stored, do not send it" and the row that refers to
it. Fresh trees keep what they refer to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from stoker.blobs.collect import GRACE, Freed, collect, discard, usage
from stoker.blobs.files import (
    CHUNK,
    Copier,
    has_writer,
    hash_fd,
    naming_full_disks,
    sync_file_system,
)
from stoker.blobs.framing import framed
from stoker.blobs.place import missing_blob, place_at
from stoker.errors import BlobDamaged, NotFound, SpecError, TooLarge
from stoker.linux.descriptors import Closing
from stoker.linux.idle_throttle import Pause, none
from stoker.spec.tree import Tree, check_digest
from stoker.task.formats import sync_directory, write_all

EMPTY = hashlib.sha256(b"").hexdigest()
MAX_TREE = 256 << 20
"""Bytes of one stored manifest."""


class BlobStore:
    """May be used from any thread and by several processes at once; all state is on the disk.

    Putting is idempotent. A put that fails or is killed leaves at most a file under tmp/, which `collect` removes.
    Every digest is checked for its form before it becomes a path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / "objects"
        self._trees = root / "trees"
        self._temporary = root / "tmp"
        self._copier = Copier()

    # -- queries ---------------------------------------------------------------------------------------------

    def has(self, digest: str) -> bool:
        """Whether a blob or a tree of this name is stored."""
        return self._stored(self._object(digest), digest) is not None or self.has_tree(digest)

    def has_tree(self, digest: str) -> bool:
        return self._stored(self._tree(digest), digest) is not None

    def size(self, digest: str) -> int:
        info = self._stored(self._object(digest), digest)
        if info is None:
            raise missing_blob(digest)
        return info.st_size

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Blobs that are not stored, in order and each once. Those that are stored stay for the grace age."""
        return [digest for digest in dict.fromkeys(digests) if not self._renew(self._object(digest), digest)]

    def touch(self, digest: str) -> bool:
        """Makes a blob or tree count as fresh. False when it is not stored."""
        renewed = [self._renew(path, digest) for path in (self._object(digest), self._tree(digest))]
        return any(renewed)

    # -- putting ---------------------------------------------------------------------------------------------

    def put_stream(
        self,
        chunks: Iterable[bytes],
        *,
        digest: str | None = None,
        size: int | None = None,
        durable: bool = True,
    ) -> tuple[str, int]:
        """Stores what `chunks` yields. With `digest` or `size`, any other content is refused."""
        with self._writing() as (fd, temporary):
            found, count = self._receive(fd, chunks, size)
            return self._finish(fd, temporary, found, count, digest, size, durable)

    def put_fd(
        self,
        fd: int,
        *,
        digest: str | None = None,
        size: int | None = None,
        move: bool = False,
        durable: bool = True,
        limit: int | None = None,
        pause: Pause = none,
    ) -> tuple[str, int]:
        """Stores an open regular file. With `move` the caller unlinks its name afterwards. The store then takes the
        file itself where that is safe (same disk, no other name, no writer), else a copy. `pause`: called between
        pieces while reading."""
        if move and (taken := self._take(fd, digest, size, durable, limit, pause)):
            return taken
        return self.put_stream(_chunks(fd, limit, pause), digest=digest, size=size, durable=durable)

    def put_tree(self, tree: Tree, *, durable: bool = True) -> str:
        """Stores a manifest. The caller makes sure that its blobs are stored."""
        tree.validate(max_files=None, max_bytes=None)
        data = tree.canonical()
        digest = hashlib.sha256(data).hexdigest()
        path = self._tree(digest)
        if self.has_tree(digest):
            self.touch(digest)
            return digest
        with self._writing() as (fd, temporary):
            write_all(fd, data)
            self._settle(fd, temporary, path, durable)
        return digest

    def sync(self) -> None:
        """Makes everything durable that was put with `durable=False`."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_file_system(self.root)

    # -- getting ---------------------------------------------------------------------------------------------

    def path(self, digest: str) -> Path:
        """The path of a blob, for reading only."""
        path = self._object(digest)
        if self._stored(path, digest) is None:
            raise missing_blob(digest)
        return path

    def where(self, digest: str) -> Path:
        """The path that a blob has if it is stored. Checks nothing."""
        return self._object(digest)

    def open(self, digest: str) -> BinaryIO:
        return os.fdopen(self._open(digest), "rb")

    def framed(self, wanted: Iterable[tuple[str, int | None]]) -> Iterator[bytes]:
        """Many blobs as one stream, see `stoker.blobs.framing`. Each comes with its expected size; None: not
        available."""
        return framed(wanted, self._open)

    def tree(self, digest: str) -> Tree:
        """A stored tree. Its hash and its rules are checked."""
        path = self._tree(digest)
        try:
            if path.stat().st_size > MAX_TREE:
                raise TooLarge(f"the manifest of the tree {digest} is over {MAX_TREE} bytes")
            data = path.read_bytes()
        except FileNotFoundError as exc:
            raise NotFound(f"no tree {digest} is stored here") from exc
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobDamaged(f"the stored tree {digest} does not have its hash")
        try:
            return Tree.from_json(json.loads(data)).validate(max_files=None, max_bytes=None)
        except ValueError as exc:
            raise SpecError(f"the stored tree {digest} is not a manifest") from exc

    def place_at(
        self,
        tree_digest: str,
        parent: int,
        name: str,
        *,
        verify: bool = False,
        replace: bool = False,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        """Makes `name` in an open directory hold exactly this tree, by one rename at the end; see `stoker.blobs.place`.
        `verify` hashes every file again and raises BlobDamaged. `rename`: gives
        files and directories other names there."""
        tree = self.tree(tree_digest)
        if rename is not None:
            tree = tree.renamed(rename)
        with naming_full_disks(self.root):
            place_at(tree, parent, name, self._open, self._copier, verify=verify, replace=replace)

    def verify(self, digest: str) -> bool:
        """Whether the stored bytes still have their hash. Raises NotFound when there are none."""
        with Closing(self._open(digest)) as fd:
            return hash_fd(fd)[0] == digest

    def verify_tree(self, digest: str) -> list[str]:
        """Paths in a tree whose content is missing or damaged."""
        bad = []
        checked: dict[str, bool] = {}
        for file in self.tree(digest).files:
            if file.link is None:
                if file.sha256 not in checked:
                    checked[file.sha256] = not self.missing([file.sha256]) and self.verify(file.sha256)
                if not checked[file.sha256]:
                    bad.append(file.path)
        return bad

    # -- maintenance -----------------------------------------------------------------------------------------

    def collect(self, roots: set[str], *, grace: float = GRACE) -> Freed:
        """Deletes what is referenced neither by `roots` (trees or blobs) nor by anything fresh.

        A root with a damaged manifest stops it before anything is deleted: its blobs would be unknown.
        """
        return collect(
            self._objects, self._trees, self._temporary, lambda name: self.tree(name).blobs(), roots, grace
        )

    def discard(self, dropped: set[str], roots: set[str], *, grace: float = 60.0) -> tuple[Freed, set[str]]:
        """Frees the bytes of trees that are no longer referenced, now. Returns the trees to be tried later."""
        return discard(
            self._objects, self._trees, lambda name: self.tree(name).blobs(), dropped, roots, grace
        )

    def usage(self, kinds: Mapping[str, Iterable[str]]) -> dict[str, int]:
        """Bytes of everything stored, each counted for the first kind (of trees) that has it; `rest`: for none."""
        return usage(self._objects, self._trees, lambda name: self.tree(name).blobs(), kinds)

    # -- internals -------------------------------------------------------------------------------------------

    def _object(self, digest: str) -> Path:
        check_digest(digest)
        return self._objects / digest[:2] / digest[2:]

    def _tree(self, digest: str) -> Path:
        check_digest(digest)
        return self._trees / digest[:2] / digest[2:]

    def _stored(self, path: Path, digest: str) -> os.stat_result | None:
        """The stored file; None if there is none. An empty file under another digest was left by a power cut: not
        stored."""
        try:
            info = path.lstat()
        except FileNotFoundError:
            return None
        return info if stat.S_ISREG(info.st_mode) and (info.st_size or digest == EMPTY) else None

    def _renew(self, path: Path, digest: str, size: int | None = None) -> bool:
        info = self._stored(path, digest)
        if info is None or size not in (None, info.st_size):
            return False
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _open(self, digest: str) -> int:
        try:
            return os.open(self._object(digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise missing_blob(digest) from exc

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[int, Path]]:
        """A temporary file that is deleted at the end unless it was renamed."""
        temporary = self._temporary / secrets.token_hex(12)
        with naming_full_disks(self.root):
            try:
                fd = _create(temporary)
            except FileNotFoundError:
                self._temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
                fd = _create(temporary)
            try:
                yield fd, temporary
            finally:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()

    def _receive(self, fd: int, chunks: Iterable[bytes], size: int | None) -> tuple[str, int]:
        digest = hashlib.sha256()
        count = 0
        for chunk in chunks:
            count += len(chunk)
            if size is not None and count > size:
                raise BlobDamaged(f"more than the {size} bytes that were announced")
            digest.update(chunk)
            write_all(fd, chunk)
        return digest.hexdigest(), count

    def _finish(
        self,
        fd: int,
        temporary: Path,
        found: str,
        count: int,
        digest: str | None,
        size: int | None,
        durable: bool,
    ) -> tuple[str, int]:
        _expect(found, count, digest, size)
        if not self._renew(self._object(found), found, count):
            self._settle(fd, temporary, self._object(found), durable)
        return found, count

    def _settle(self, fd: int, temporary: Path, path: Path, durable: bool) -> None:
        os.fchmod(fd, 0o444)
        if durable:
            os.fsync(fd)
        try:
            temporary.replace(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.replace(path)
        if durable:
            sync_directory(str(path.parent))

    def _take(
        self, fd: int, digest: str | None, size: int | None, durable: bool, limit: int | None, pause: Pause
    ) -> tuple[str, int] | None:
        """Takes the file itself as a blob; None when it has to be copied.

        Links exactly the inode that was hashed (through /proc), so swapping names has no effect.
        """
        before = os.fstat(fd)
        if before.st_nlink != 1 or has_writer(fd):
            return None
        os.fchmod(fd, 0o444)
        found, count = hash_fd(fd, limit=limit, pause=pause)
        _expect(found, count, digest, size)
        if has_writer(fd) or _changed(before, os.fstat(fd)):
            return None
        path = self._object(found)
        if self._renew(path, found, count):
            return found, count
        if durable:
            os.fsync(fd)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        if not _link_fd(fd, path):
            return None
        os.utime(path)
        if durable:
            sync_directory(str(path.parent))
        return found, count


def _expect(found: str, count: int, digest: str | None, size: int | None) -> None:
    if size is not None and count != size:
        raise BlobDamaged(f"{count} bytes instead of the {size} that were announced")
    if digest is not None and found != check_digest(digest):
        raise BlobDamaged(f"the bytes have the hash {found} instead of {digest}")


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _chunks(fd: int, limit: int | None, pause: Pause) -> Iterator[bytes]:
    done = 0
    while data := os.pread(fd, CHUNK, done):
        done += len(data)
        if limit is not None and done > limit:
            raise TooLarge(f"a file has more than {limit} bytes")
        yield data
        pause()


def _link_fd(fd: int, path: Path) -> bool:
    """Gives an open file another name. False on another disk, without /proc, or where links are not allowed."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a directory descriptor Python lets the kernel follow the link in /proc, without one it does not.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=directory, follow_symlinks=True)
    except OSError:
        return False
    finally:
        os.close(directory)
    return True


def _changed(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
