"""What several tasks left, as one tree.

The same path with the same bytes is one file. With other bytes the first task's (in the order of the ranks) stays where
it is and the others' go under `task-N/`, N being their place in that order. Whoever brings such a tree back gives each
task its own again: `for_task`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stoker.blobs import BlobStore
from stoker.spec.tree import Tree, TreeFile

_APART = re.compile(r"task-(\d{1,9})~*")
Given = Sequence[tuple[int, Tree]]
"""Places in the order of the ranks, and what each task has; ascending."""


@dataclass(frozen=True)
class Merged:
    tree: Tree
    apart: tuple[str, ...] = ()
    """Paths of which tasks had different bytes."""


def merge(given: Given, base: Tree = Tree(), *, parted: bool = False) -> Merged:
    """`base`: what each of them was given to begin with. A copy of that which a task has left alone yields to what
    another made of it. `parted`: some of it had gone apart, and each was given its own view (`for_task`)."""
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
        if place not in present:  # nobody has its place now: what it left stays
            for file in files.values():
                merged.keep(place, file)
    return merged.result()


def for_task(blobs: BlobStore, digest: str, place: int) -> str:
    """The tree as the task in this place of the order of the ranks is to see it: its own of what differs, nobody
    else's. The same digest where nothing does. Only for trees that `merge` made: others may have a `task-N/` of their
    own."""
    tree = blobs.tree(digest)
    view = view_of(tree, place)
    return digest if view == tree else blobs.put_tree(view)


def together(blobs: BlobStore, digests: Sequence[str]) -> str:
    """One tree of several. What two of them have at the same place is the first one's."""
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
    hidden = _around(mine)
    return Tree.of([file for file in rest if not _meets(file.path, mine, hidden)] + list(mine.values()))


def plain_of(tree: Tree) -> Tree:
    """Without what went apart: as the first task sees it."""
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
            if there is not None or _meets(path, self._files, self._parents):
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
    """Who comes first gets the plain path: those who made something of it before those who left it alone, and whoever
    had one of its own all along last. What was left alone and is not one's own yields altogether."""
    made = [(place, file) for place, file, fresh in files if fresh and place not in apart]
    own = [(place, file) for place, file, _ in files if place in apart]
    left = [(place, file) for place, file, fresh in files if not fresh and place not in apart]
    return [*made, *own] if made else [*left[:1], *own]


def _went_apart(tree: Tree) -> list[tuple[int, TreeFile, str]]:
    """(place, file, its path without the directory) of all that `merge` put apart: there is something in its way
    where it came from."""
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
        if rest in paths or _meets(rest, paths, parents):
            found.append((int(match.group(1)), file, rest))
    return found


def _own(tree: Tree, place: int) -> dict[str, TreeFile]:
    return {path: _moved(file, path) for number, file, path in _went_apart(tree) if number == place}


def _places(tree: Tree) -> set[int]:
    return {place for place, _, _ in _went_apart(tree)}


def _directories(places: set[int], given: Given) -> dict[int, str]:
    """Names that no task uses itself."""
    taken = {file.path.partition("/")[0] for _, tree in given for file in tree.files}
    tail = ""
    while any(f"task-{place}{tail}" in taken for place in places):
        tail += "~"
    return {place: f"task-{place}{tail}" for place in places}


def _meets(path: str, files: Mapping[str, TreeFile], parents: set[str]) -> bool:
    """A file where the other has a directory, or the other way round."""
    return path in parents or any(parent in files for parent in _parents(path))


def _around(files: Mapping[str, TreeFile]) -> set[str]:
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
