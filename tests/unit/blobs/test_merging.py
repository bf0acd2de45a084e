"""Trees of several tasks are merged into one, and each task gets its own view back."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stoker.blobs import BlobStore
from stoker.spec.tree import Tree, TreeFile
from stoker.transfer.merge import for_task, merge, view_of


def tree(**files: str) -> Tree:
    return Tree.of([file(path.replace("__", "/"), text) for path, text in files.items()])


def file(path: str, text: str) -> TreeFile:
    return TreeFile(path, hashlib.sha256(text.encode()).hexdigest(), len(text))


def shown(merged: Tree) -> dict[str, str]:
    known = {hashlib.sha256(text.encode()).hexdigest(): text for text in ("a", "b", "c", "d")}
    return {entry.path: known[entry.sha256] for entry in merged.files}


def test_equal_files_are_merged_and_different_ones_are_kept_per_task() -> None:
    merged = merge([(0, tree(last="a", step__x="c")), (1, tree(last="b", step__x="c", step__y="d"))])
    assert shown(merged.tree) == {"last": "a", "step/x": "c", "step/y": "d", "task-1/last": "b"}
    assert merged.apart == ("last",)
    assert shown(view_of(merged.tree, 0)) == {"last": "a", "step/x": "c", "step/y": "d"}
    assert shown(view_of(merged.tree, 1)) == {"last": "b", "step/x": "c", "step/y": "d"}
    assert view_of(merged.tree, 7) == view_of(merged.tree, 0)


def test_a_file_and_a_directory_of_one_name() -> None:
    merged = merge([(0, tree(x="a")), (2, tree(x__y="b"))])
    assert shown(merged.tree) == {"x": "a", "task-2/x/y": "b"}
    merged.tree.validate()
    assert shown(view_of(merged.tree, 2)) == {"x/y": "b"}


def test_a_task_may_have_files_named_like_our_directories() -> None:
    own = tree(**{"task-1__x": "a", "last": "a"})
    merged = merge([(0, own), (1, tree(last="b"))])
    assert shown(merged.tree) == {"task-1/x": "a", "last": "a", "task-1~/last": "b"}
    assert shown(view_of(merged.tree, 1)) == {"task-1/x": "a", "last": "b"}
    assert view_of(own, 1) == own


def test_a_changed_file_replaces_an_unchanged_one() -> None:
    base = merge([(0, tree(log="a", mine="a", gone="d")), (1, tree(log="a", mine="b", gone="d"))]).tree
    first, second = view_of(base, 0), view_of(base, 1)
    assert shown(second)["mine"] == "b"
    grown = Tree.of([file("log", "c") if entry.path == "log" else entry for entry in second.files])
    again = merge(
        [(0, Tree.of([one for one in first.files if one.path != "gone"])), (1, grown)], base, parted=True
    )
    assert shown(again.tree) == {"log": "c", "mine": "a", "task-1/mine": "b", "gone": "d"}
    # A task that is missing this time keeps its files.
    alone = merge([(0, first)], base, parted=True)
    assert shown(alone.tree) == shown(base)


_names = st.sampled_from(["x", "x/y", "x/y/z", "task-1/q", "task-1~/q", "r", "task-2"])
_trees = st.dictionaries(_names, st.sampled_from("abcd"), max_size=5).map(
    lambda files: Tree.of(
        [file(path, text) for path, text in files.items() if not any(o.startswith(path + "/") for o in files)]
    )
)


@given(st.lists(_trees, min_size=1, max_size=4))
def test_each_task_gets_back_all_that_it_wrote(trees: list[Tree]) -> None:
    merged = merge(list(enumerate(trees))).tree.validate()
    stored = {entry.sha256 for entry in merged.files}
    for place, mine in enumerate(trees):
        assert {entry.sha256 for entry in mine.files} <= stored
        view = {entry.path: entry for entry in view_of(merged, place).validate().files}
        assert {path: view.get(path) for path in (entry.path for entry in mine.files)} == {
            entry.path: entry for entry in mine.files
        }


def test_equal_trees_need_no_new_tree_in_the_store(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    for text in "ab":
        blobs.put_stream([text.encode()])
    same = blobs.put_tree(merge([(0, tree(x="a")), (1, tree(x="a"))]).tree)
    assert for_task(blobs, same, 1) == same
    other = blobs.put_tree(merge([(0, tree(x="a")), (1, tree(x="b"))]).tree)
    assert shown(blobs.tree(for_task(blobs, other, 1))) == {"x": "b"}
