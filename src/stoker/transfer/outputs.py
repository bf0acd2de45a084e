"""Files of a task's output directory or working folder, as files of a tree."""

from __future__ import annotations

import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stoker.blobs import BlobStore
from stoker.errors import BlobDamaged, DiskFull, SpecError, TooLarge
from stoker.spec.tree import TreeFile, check_link, check_path
from stoker.task import layout
from stoker.task.directory import RemoteAccess
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import Found, open_beneath
from stoker.transfer.fetch import FetchedFiles, Fetcher, store
from stoker.transfer.walk import too_many, walk

MARGIN = 1 << 30
"""Bytes of the disk that stay free; at most a twentieth of the disk."""
AT_ONCE = 4
"""Files of a remote task directory that are fetched at the same time."""


def copy(task_dir: LocalTaskDir, blobs: BlobStore, max_entries: int, max_bytes: int) -> list[TreeFile]:
    """Store the outputs of a local task directory."""
    try:
        root = open_beneath(task_dir.root, layout.OUTPUT)
    except (FileNotFoundError, UnsafePath):
        return []  # no directory, or a link in its place: no outputs
    try:
        found = list(walk(root, max_entries=max_entries))
    finally:
        os.close(root)
    _check(found, blobs, max_bytes)
    files: list[TreeFile] = []
    left = max_bytes
    for name, entry in named(found):
        file = _copied(task_dir, name, entry, blobs, left)
        if file is not None:
            files.append(file)
            left -= file.size
    return without_clashes(files)


def fetch(
    task_dir: RemoteAccess, blobs: BlobStore, max_entries: int, max_bytes: int, known: str | None
) -> list[TreeFile]:
    """Fetch and store the outputs of a remote task directory. `known`: a tree whose files need not be fetched."""
    try:
        listed = task_dir.walk(layout.OUTPUT, max_entries=max_entries)
    except UnsafePath:
        return []
    except ValueError as exc:
        raise too_many(max_entries) from exc
    found = [Found(raw["path"], raw.get("size", 0), raw.get("mode", 0), raw.get("link")) for raw in listed]
    digests = {raw["path"]: raw["sha256"] for raw in listed if "link" not in raw}
    _check(found, blobs, max_bytes)
    given = blobs.tree(known).blobs() if known is not None else {}
    spare = max_bytes - sum(entry.size for entry in found)
    contents = Contents(task_dir, blobs, given, spare, layout.OUTPUT)
    wanted = [(name, entry) for name, entry in named(found) if entry.link is None]
    files = [TreeFile(name, link=entry.link) for name, entry in named(found) if entry.link is not None]
    with Fetcher(task_dir) as fetcher, ThreadPoolExecutor(AT_ONCE, thread_name_prefix="outputs") as threads:
        stored = threads.map(lambda item: contents.take(fetcher, item[1], digests[item[1].path]), wanted)
        for (name, entry), content in zip(wanted, stored, strict=True):
            if content is not None:
                files.append(TreeFile(name, *content, plain_mode(entry.mode)))
    return without_clashes(files)


def check_room(blobs: BlobStore, total: int, what: str) -> None:
    """Refuse what cannot fit before it fills the disk: a sparse file takes no space, but its copy does. `what`: the
    beginning of the message."""
    blobs.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    usage = shutil.disk_usage(blobs.root)
    room = usage.free - min(MARGIN, usage.total // 20)
    if total > max(room, 0):
        raise DiskFull(
            f"{what} {total} bytes, and {usage.free} are free on the disk that holds {blobs.root}",
            hint="Make room, or write less.",
        )


def plain_mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


class Contents:
    """Stores contents of a remote task directory. Any thread."""

    def __init__(
        self, task_dir: RemoteAccess, blobs: BlobStore, known: Mapping[str, int], spare: int, folder: str
    ) -> None:
        """`known`: blobs that the task has been given, with their sizes. `spare`: bytes by which a file may have grown since
        it was listed. `folder`: the directory in the task directory."""
        self._folder = folder
        self._blobs = blobs
        self._taken = FetchedFiles(task_dir)
        self._known = known
        self._spare = spare
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def take(self, fetcher: Fetcher, entry: Found, digest: str) -> tuple[str, int] | None:
        """Fetch and store a file: its digest and size; None: it is not there any more."""
        path = f"{self._folder}/{entry.path}"
        with self._locks[digest]:  # files with the same content are fetched once
            if self._stored(digest, entry.size):
                return digest, entry.size
            try:
                content = self._fetch(fetcher, path, digest, entry.size)
            except (FileNotFoundError, UnsafePath):
                return None  # gone or swapped since it was seen: not an output
            self._taken.add(*content, durable=False)
            return content

    def _fetch(self, fetcher: Fetcher, path: str, digest: str, size: int) -> tuple[str, int]:
        try:
            part = fetcher.fetch(path, digest, size)
            return store(part, self._blobs, digest=digest, size=size, durable=False)
        except BlobDamaged:
            # It has changed since it was listed: the file as it is now is the output.
            part = fetcher.whole(path, size + self._spare)
            return store(part, self._blobs, durable=False)

    def _stored(self, digest: str, size: int) -> bool:
        ours = (digest, size) in self._taken or self._known.get(digest) == size
        return ours and not self._blobs.missing([digest]) and self._blobs.size(digest) == size


def _check(found: Sequence[Found], blobs: BlobStore, max_bytes: int) -> None:
    total = sum(entry.size for entry in found)
    if total > max_bytes:
        biggest = sorted(found, key=lambda entry: entry.size, reverse=True)[:3]
        names = ", ".join(f"{entry.path!r} ({entry.size} bytes)" for entry in biggest)
        raise TooLarge(f"the outputs hold {total} bytes, over the cap of {max_bytes}; the biggest: {names}")
    check_room(blobs, total, "the outputs hold")


def named(found: Sequence[Found]) -> Iterator[tuple[str, Found]]:
    """Entries that a tree can have, with their names in it: UTF-8, undecodable bytes escaped."""
    taken: set[str] = set()
    for entry in sorted(found, key=lambda entry: entry.path):
        name = entry.path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        while name in taken:
            name += "~"
        try:
            check_path(name)
            if entry.link is not None:
                check_link(name, entry.link)
        except SpecError:
            continue
        taken.add(name)
        yield name, entry


def _copied(task_dir: LocalTaskDir, name: str, entry: Found, blobs: BlobStore, left: int) -> TreeFile | None:
    if entry.link is not None:
        return TreeFile(name, link=entry.link)
    try:
        fd = task_dir.open(f"{layout.OUTPUT}/{entry.path}")
    except (FileNotFoundError, UnsafePath):
        return None  # gone or swapped since it was seen: not an output
    try:
        digest, size = blobs.put_fd(fd, durable=False, limit=left)
    finally:
        os.close(fd)
    return TreeFile(name, digest, size, plain_mode(entry.mode))


def without_clashes(files: Sequence[TreeFile]) -> list[TreeFile]:
    """Escaping can give a file and a directory the same name; the file is left out."""
    parents: set[str] = set()
    for file in files:
        parent = file.path.rpartition("/")[0]
        while parent and parent not in parents:
            parents.add(parent)
            parent = parent.rpartition("/")[0]
    return [file for file in files if file.path not in parents]
