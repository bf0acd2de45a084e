"""What a run keeps of its working folder: the files that it created or changed.

The folder begins as the shipped code and what was kept before (`before`). A file that is as it was is not stored again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stoker.blobs import BlobStore
from stoker.blobs.files import hash_fd
from stoker.spec.kept_files import FileFacts, KeepRules, within_budget
from stoker.spec.tree import Tree, TreeFile
from stoker.task import layout
from stoker.task.directory import RemoteAccess, TaskDir
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import Found, open_beneath
from stoker.transfer.fetch import Fetcher
from stoker.transfer.merge import Given, for_task
from stoker.transfer.outputs import AT_ONCE, Contents, check_room, named, plain_mode, without_clashes
from stoker.transfer.walk import too_many, walk

ENTRIES = 400_000
"""Cap on the entries of a folder."""
NEVER_LISTED = ("__pycache__", ".git", ".venv", "node_modules", ".cache")
"""Names of directories that a courier need not list."""
SETTLED = 2.0
"""Seconds before the start of the processes. A file that last changed earlier is as it was placed."""


@dataclass(frozen=True)
class Span:
    """When the processes ran, by the clock of their machine."""

    began: float
    ended: float


@dataclass(frozen=True)
class KeptFolder:
    """What is kept of one task's working folder."""

    tree: Tree
    newest: str = ""
    """The file that was written last."""
    newest_at: float = 0.0
    left: tuple[FileFacts, ...] = ()
    """Files over the budget, largest first."""
    ignored: tuple[str, ...] = ()
    """What `.stokerignore` leaves out."""


def ignore_lines(blobs: BlobStore, code: Tree) -> list[bytes]:
    """The patterns of the shipped `.stokerignore`."""
    entry = next((file for file in code.files if file.path == ".stokerignore" and file.link is None), None)
    if entry is None or entry.size > 1 << 20:
        return []
    with blobs.open(entry.sha256) as file:
        return file.read().split(b"\n")


def carry_folder(
    task_dir: TaskDir,
    blobs: BlobStore,
    *,
    rules: KeepRules,
    budget: int,
    code: Tree,
    before: Tree,
    span: Span,
) -> KeptFolder | None:
    """Store what is to be kept. The files stay where they are, so a second call finds the same. None: there is no folder."""
    files = _Listing(task_dir, rules).read()
    if files is None:
        return None
    given = {file.path: file for file in (*code.files, *before.files)}
    shipped = {file.path: file for file in code.files}
    storing = _Remote if isinstance(task_dir, RemoteAccess) else _Local
    changed = [(name, entry) for name, entry in files.entries if not _is_shipped_link(entry, given.get(name))]
    facts = {name: FileFacts(name, entry.size, entry.mtime) for name, entry in changed if entry.link is None}
    store = storing(task_dir, blobs, given, span, files.digests)  # type: ignore[arg-type]
    unchanged = {name: file for name, entry in changed if (file := store.unchanged(name, entry)) is not None}
    wanted = [fact for name, fact in facts.items() if not _same(unchanged.get(name), shipped.get(name))]
    chosen = within_budget(wanted, budget, span.began, span.ended)
    stay = {fact.path for fact in chosen.kept}
    fresh = [(name, entry) for name, entry in changed if name in stay and name not in unchanged]
    check_room(blobs, sum(entry.size for _, entry in fresh), "the working folder has new files of")
    stored = store.store(fresh)
    kept = [file for name, file in unchanged.items() if name in stay]
    kept += [file for file in stored if not _same(file, shipped.get(file.path))]
    kept += [TreeFile(name, link=entry.link) for name, entry in changed if entry.link is not None]
    tree = Tree.of(without_clashes(kept))
    newest = max((facts[file.path] for file in tree.files if file.path in facts), key=_when, default=None)
    return KeptFolder(
        tree,
        newest.path if newest else "",
        newest.mtime if newest else 0.0,
        tuple(chosen.left),
        tuple(files.ignored),
    )


def folder_view(blobs: BlobStore, folder: Mapping[str, Any], place: int) -> str:
    """The kept files as the task at this position sees them: with its own where tasks differ."""
    digest = str(folder["digest"])
    return for_task(blobs, digest, place) if folder.get("apart") else digest


def without_damaged(blobs: BlobStore, digest: str) -> tuple[str, list[str]]:
    """The tree without the files whose stored content is missing or damaged, and the paths of those."""
    damaged = blobs.verify_tree(digest)
    if not damaged:
        return digest, []
    gone = set(damaged)
    return blobs.put_tree(
        Tree(tuple(file for file in blobs.tree(digest).files if file.path not in gone))
    ), damaged


def without_deleted(given: Given, base: Tree) -> list[tuple[int, Tree]]:
    """What the tasks have, without files of `base` that one of them deleted and no other changed."""
    known = {file.path: file for file in base.files}
    there = [{file.path for file in tree.files} for _, tree in given]
    deleted = {path for path in known if any(path not in paths for paths in there)}
    return [
        (
            place,
            Tree(tuple(file for file in tree.files if file.path not in deleted or file != known[file.path])),
        )
        for place, tree in given
    ]


def folder_tree(blobs: BlobStore, code: str, kept: str | None) -> str:
    """The digest of the tree that a working folder begins with: the code, and what was kept over it."""
    if kept is None:
        return code
    mine = blobs.tree(kept).files
    shipped = blobs.tree(code).files
    paths = {file.path for file in mine}
    inside = {parent for path in paths for parent in _parents(path)}
    rest = [
        file
        for file in shipped
        if file.path not in paths
        and file.path not in inside
        and not any(parent in paths for parent in _parents(file.path))
    ]
    return blobs.put_tree(Tree.of([*rest, *mine]))


class _Listing:
    """The entries of a folder that the rules keep."""

    def __init__(self, task_dir: TaskDir, rules: KeepRules) -> None:
        self._task_dir = task_dir
        self._rules = rules
        self.ignored: list[str] = []
        self.entries: list[tuple[str, Found]] = []
        self.digests: Mapping[str, str] = {}

    def read(self) -> _Listing | None:
        found = self._remote() if isinstance(self._task_dir, RemoteAccess) else self._local()
        if found is None:
            return None
        self.entries = list(named([entry for entry in found if self._keeps(entry.path)]))
        return self

    def _local(self) -> list[Found] | None:
        assert isinstance(self._task_dir, LocalTaskDir)
        try:
            root = open_beneath(*self._task_dir.folder)
        except (FileNotFoundError, UnsafePath):
            return None
        try:
            return list(walk(root, max_entries=ENTRIES, enters=self._enters))
        finally:
            os.close(root)

    def _remote(self) -> list[Found] | None:
        assert isinstance(self._task_dir, RemoteAccess)
        try:
            listed = self._task_dir.walk(layout.CODE, max_entries=ENTRIES, skip=NEVER_LISTED)
        except UnsafePath:
            return None
        except ValueError as exc:
            raise too_many(ENTRIES) from exc
        self.digests = {raw["path"]: raw["sha256"] for raw in listed if "link" not in raw}
        return [
            Found(raw["path"], raw.get("size", 0), raw.get("mode", 0), raw.get("link"), raw.get("mtime", 0.0))
            for raw in listed
            if all(self._enters(parent) for parent in _parents(raw["path"]))
        ]

    def _enters(self, path: str) -> bool:
        return self._rules.enters(path) or self._leave_out(path, directory=True)

    def _keeps(self, path: str) -> bool:
        return self._rules.keeps(path) or self._leave_out(path, directory=False)

    def _leave_out(self, path: str, *, directory: bool) -> bool:
        if self._rules.ignored(path, directory=directory) and path not in self.ignored:
            self.ignored.append(path)
        return False


class _Local:
    """Stores files of a task directory on this machine."""

    def __init__(
        self,
        task_dir: LocalTaskDir,
        blobs: BlobStore,
        given: Mapping[str, TreeFile],
        span: Span,
        digests: Mapping[str, str],
    ) -> None:
        parent, self._name = task_dir.folder
        self._parent = LocalTaskDir(parent)
        self._blobs = blobs
        self._given = given
        self._span = span

    def unchanged(self, name: str, entry: Found) -> TreeFile | None:
        """The file as it was given to the task, if it still is. Its time of change cannot be set by a program."""
        given = self._given.get(name)
        if given is None or given.link is not None or entry.link is not None or given.size != entry.size:
            return None
        if entry.ctime < self._span.began - SETTLED:
            return given
        fd = self._open(entry)
        if fd is None:
            return None
        try:
            return given if hash_fd(fd)[0] == given.sha256 else None
        finally:
            os.close(fd)

    def store(self, files: Sequence[tuple[str, Found]]) -> Iterable[TreeFile]:
        found = []
        for name, entry in files:
            fd = self._open(entry)
            if fd is None:
                continue
            try:
                # It may grow meanwhile only where a process of another run writes to it.
                digest, size = self._blobs.put_fd(fd, durable=False)
            finally:
                os.close(fd)
            found.append(TreeFile(name, digest, size, plain_mode(entry.mode)))
        if found:
            self._blobs.sync()
        return found

    def _open(self, entry: Found) -> int | None:
        try:
            return self._parent.open(f"{self._name}/{entry.path}")
        except (FileNotFoundError, UnsafePath):
            return None  # removed or replaced since it was listed


class _Remote:
    """Stores files of a task directory in a pod. Its courier has hashed them."""

    def __init__(
        self,
        task_dir: RemoteAccess,
        blobs: BlobStore,
        given: Mapping[str, TreeFile],
        span: Span,
        digests: Mapping[str, str],
    ) -> None:
        self._task_dir = task_dir
        self._blobs = blobs
        self._given = given
        self._digests = digests

    def unchanged(self, name: str, entry: Found) -> TreeFile | None:
        given = self._given.get(name)
        if given is None or given.link is not None or entry.link is not None:
            return None
        return given if self._digests[entry.path] == given.sha256 else None

    def store(self, files: Sequence[tuple[str, Found]]) -> Iterable[TreeFile]:
        known = {file.sha256: file.size for file in self._given.values() if file.link is None}
        contents = Contents(self._task_dir, self._blobs, known, 0, layout.CODE)
        found = []
        with Fetcher(self._task_dir) as fetcher, ThreadPoolExecutor(AT_ONCE, "folder") as threads:
            taken = threads.map(
                lambda item: contents.take(fetcher, item[1], self._digests[item[1].path]), files
            )
            for (name, entry), content in zip(files, taken, strict=True):
                if content is not None:
                    found.append(TreeFile(name, *content, plain_mode(entry.mode)))
        if found:
            self._blobs.sync()
        return found


def _is_shipped_link(entry: Found, given: TreeFile | None) -> bool:
    return entry.link is not None and given is not None and given.link == entry.link


def _same(one: TreeFile | None, other: TreeFile | None) -> bool:
    """Whether both are the same content under one path."""
    return one is not None and other is not None and (one.sha256, one.link) == (other.sha256, other.link)


def _when(fact: FileFacts) -> tuple[float, str]:
    return fact.mtime, fact.path


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
