"""Merges the outputs of several tasks into one tree.

The same path with the same bytes is one file. If the bytes differ, the first task's file (in the order of ranks) keeps
its path. The others' files go under `task-N/`, where N is the task's position in that order. `for_task` makes the tree
that one task gets back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stoker.blobs import BlobStore
from stoker.spec.tree import Tree, TreeFile

_APART = re.compile(r"task-(\d{1,9})~*")
Given = Sequence[tuple[int, Tree]]
"""Positions in the order of ranks, ascending, with each task's tree."""


@dataclass(frozen=True)
class Merged:
    tree: Tree
    apart: tuple[str, ...] = ()
    """Paths at which tasks had different bytes."""


def merge(given: Given, base: Tree = Tree(), *, parted: bool = False) -> Merged:
    """Merge the trees of tasks. `base`: the tree that was brought to each of them; a file of it that a task did not
    change yields to another task's change. `parted`: each task got its own view of `base` (`for_task`)."""
    plain = {file.path: file for file in (plain_of(base) if parted else base).files}
    names = _directories((_places(base) if parted else set()) | {place for place, _ in given}, given)
    known = {place: _own(base, place) if parted else {} for place in names}
    wanted: dict[str, list[tuple[int, TreeFile, bool]]] = {}
    for place, tree in given:
        mine = known[place]
        for file in tree.files:
            left = mine.get(file.path, plain.get(file.path))
            fresh = left is None or not _same(left, file)
            wanted.setdefault(file.path, []).append((place, file, fresh))
    merged = _Merging(names)
    for path in sorted(wanted):
        merged.add(path, _in_order(wanted[path], {place for place in names if path in known[place]}))
    present = {place for place, _ in given}
    for place, files in known.items():
        if place not in present:  # no task has this position now: its files stay
            for file in files.values():
                merged.keep(place, file)
    return merged.result()


def for_task(blobs: BlobStore, digest: str, place: int) -> str:
    """The tree as the task at this position sees it: with its own files where tasks differ, without the others'. The same
    digest if nothing differs. Only for trees that `merge` made: other trees may have their own `task-N/`."""
    tree = blobs.tree(digest)
    view = view_of(tree, place)
    return digest if view == tree else blobs.put_tree(view)


def together(blobs: BlobStore, digests: Sequence[str]) -> str:
    """One tree of several. If two have the same top-level name, the first one's counts."""
    found: list[TreeFile] = []
    taken: set[str] = set()
    for digest in digests:
        files = blobs.tree(digest).files
        found += [file for file in files if file.path.split("/")[0] not in taken]
        taken |= {file.path.split("/")[0] for file in files}
    return digests[0] if len(digests) == 1 else blobs.put_tree(Tree.of(found))


def view_of(tree: Tree, place: int) -> Tree:
    mine = _own(tree, place)
    rest = [file for file in plain_of(tree).files if file.path not in mine]
    hidden = _parents_of(mine)
    return Tree.of([file for file in rest if not _clashes(file.path, mine, hidden)] + list(mine.values()))


def plain_of(tree: Tree) -> Tree:
    """The tree without the files under `task-N/` that `merge` put there."""
    apart = {file.path for _, file, _ in _went_apart(tree)}
    return Tree(tuple(file for file in tree.files if file.path not in apart)) if apart else tree


class _Merging:
    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._files: dict[str, TreeFile] = {}
        self._parents: set[str] = set()
        self._apart: dict[str, None] = {}

    def add(self, path: str, files: Iterable[tuple[int, TreeFile]]) -> None:
        for place, file in files:
            there = self._files.get(path)
            if there is not None and _same(there, file):
                continue
            if there is not None or _clashes(path, self._files, self._parents):
                self.keep(place, file)
            else:
                self._put(path, file)

    def keep(self, place: int, file: TreeFile) -> None:
        self._apart[file.path] = None
        path = f"{self._names[place]}/{file.path}"
        if path not in self._files:
            self._put(path, _moved(file, path))

    def result(self) -> Merged:
        return Merged(Tree.of(self._files.values()), tuple(self._apart))

    def _put(self, path: str, file: TreeFile) -> None:
        self._files[path] = file
        self._parents.update(_parents(path))


def _in_order(files: Sequence[tuple[int, TreeFile, bool]], apart: set[int]) -> Iterable[tuple[int, TreeFile]]:
    """The files in the order in which they may take the plain path: changed files (without any: one unchanged file of
    the base), then files of tasks that had their own version before."""
    made = [(place, file) for place, file, fresh in files if fresh and place not in apart]
    own = [(place, file) for place, file, _ in files if place in apart]
    left = [(place, file) for place, file, fresh in files if not fresh and place not in apart]
    return [*made, *own] if made else [*left[:1], *own]


def _went_apart(tree: Tree) -> list[tuple[int, TreeFile, str]]:
    """(position, file, path without `task-N/`) of all files that `merge` put there: their own path is taken."""
    found = []
    paths = {file.path: file for file in tree.files}
    parents: set[str] | None = None
    for file in tree.files:
        top, _, rest = file.path.partition("/")
        match = _APART.fullmatch(top)
        if match is None or not rest:
            continue
        if parents is None:
            parents = {parent for path in paths for parent in _parents(path)}
        if rest in paths or _clashes(rest, paths, parents):
            found.append((int(match.group(1)), file, rest))
    return found


def _own(tree: Tree, place: int) -> dict[str, TreeFile]:
    return {path: _moved(file, path) for number, file, path in _went_apart(tree) if number == place}


def _places(tree: Tree) -> set[int]:
    return {place for place, _, _ in _went_apart(tree)}


def _directories(places: set[int], given: Given) -> dict[int, str]:
    """Names for `task-N/` that no task uses itself."""
    taken = {file.path.partition("/")[0] for _, tree in given for file in tree.files}
    tail = ""
    while any(f"task-{place}{tail}" in taken for place in places):
        tail += "~"
    return {place: f"task-{place}{tail}" for place in places}


def _clashes(path: str, files: Mapping[str, TreeFile], parents: set[str]) -> bool:
    """Whether a file is where another path needs a directory, or the other way round."""
    return path in parents or any(parent in files for parent in _parents(path))


def _parents_of(files: Mapping[str, TreeFile]) -> set[str]:
    return {parent for path in files for parent in _parents(path)}


def _parents(path: str) -> list[str]:
    found = []
    while "/" in path:
        path = path.rpartition("/")[0]
        found.append(path)
    return found


def _same(one: TreeFile, other: TreeFile) -> bool:
    return (one.sha256, one.size, one.link) == (other.sha256, other.size, other.link)


def _moved(file: TreeFile, path: str) -> TreeFile:
    return TreeFile(path, file.sha256, file.size, file.mode, file.link)
