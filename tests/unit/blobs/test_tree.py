"""A tree refuses every path that could be written outside, and equal content has one digest."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import SpecError, TooLarge
from stoker.spec.tree import Tree, TreeFile, check_digest

A = hashlib.sha256(b"a").hexdigest()


def file(path: str, **more: object) -> TreeFile:
    return TreeFile(path, A, 1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../up",
        "a/../b",
        "a//b",
        "",
        ".",
        "a/.",
        "a/",
        "nul\0name",
        "x" * 256,
        "é" * 128,
        "/".join(["d" * 200] * 21),
        "bad\udcff",
    ],
)
def test_names_that_no_tree_may_have(path: str) -> None:
    with pytest.raises(SpecError):
        Tree((file(path),)).validate()


@pytest.mark.parametrize(
    "path", ["a", "a/b", "..a", "a..", "...", "x" * 255, "é" * 127, "sp ace/ünï", "a\nb", "-rf"]
)
def test_valid_names(path: str) -> None:
    Tree((file(path),)).validate()


def test_case_is_kept() -> None:
    Tree.of([file("README"), file("readme")]).validate()


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("l", "/etc"),
        ("l", ".."),
        ("a/l", "../.."),
        ("l", "a/../.."),
        ("l", "deep/../x"),
        ("l", ""),
        ("l", "x\0"),
        ("a/b/l", "../../../x"),
        ("l", "t" * 5000),
    ],
)
def test_links_that_could_lead_outside(path: str, target: str) -> None:
    with pytest.raises(SpecError, match=r"link"):
        Tree((TreeFile(path, link=target),)).validate()


@pytest.mark.parametrize(
    ("path", "target"), [("l", "a"), ("a/l", "../x"), ("a/b/l", "../.."), ("l", "missing/still")]
)
def test_links_that_stay_inside(path: str, target: str) -> None:
    Tree((TreeFile(path, link=target),)).validate()


def test_nothing_lies_beneath_a_file_or_a_link() -> None:
    with pytest.raises(SpecError, match="both as a file and as a directory"):
        Tree.of([file("a"), file("a/b/c")]).validate()
    with pytest.raises(SpecError, match="both as a file and as a directory"):
        Tree.of([TreeFile("a", link="b"), file("a/x"), file("a-")]).validate()


def test_twice_unsorted_sizes_and_modes() -> None:
    with pytest.raises(SpecError, match="twice"):
        Tree((file("a"), file("a"))).validate()
    with pytest.raises(SpecError, match="not sorted"):
        Tree((file("b"), file("a"))).validate()
    with pytest.raises(SpecError, match="mode"):
        Tree((file("a", mode=0o4755),)).validate()
    with pytest.raises(SpecError, match="size"):
        Tree((TreeFile("a", A, -1),)).validate()
    with pytest.raises(SpecError, match="two sizes"):
        Tree((TreeFile("a", A, 1), TreeFile("b", A, 2))).validate()


def test_caps() -> None:
    tree = Tree.of([file(str(n)) for n in range(11)])
    with pytest.raises(TooLarge, match="11 files"):
        tree.validate(max_files=10)
    with pytest.raises(TooLarge, match="11 bytes"):
        tree.validate(max_bytes=10)
    tree.validate(max_files=11, max_bytes=11)


@pytest.mark.parametrize("value", ["", "A" * 64, "g" * 64, "../" + "a" * 61, A + "\n", A[:-1], None, 7])
def test_invalid_digests(value: object) -> None:
    with pytest.raises(SpecError, match="not a SHA-256 digest"):
        check_digest(value)


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {"files": {}},
        {"files": [], "owner": "me"},
        {"files": ["a"]},
        {"files": [{"path": 1}]},
        {"files": [{"path": "a", "sha256": A, "size": "1", "mode": 420}]},
        {"files": [{"path": "a", "sha256": A, "size": True, "mode": 420}]},
        {"files": [{"path": "a", "sha256": A, "size": 1, "mode": 420, "uid": 0}]},
        {"files": [{"path": "a", "link": "b", "mode": 420}]},
    ],
)
def test_manifests_of_the_wrong_shape(raw: object) -> None:
    with pytest.raises(SpecError):
        Tree.from_json(raw)


names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda name: name not in (".", ".."))


@given(st.lists(names, unique=True, max_size=8))
def test_one_content_one_digest(paths: list[str]) -> None:
    forward = Tree.of([file(path) for path in paths]).validate()
    backward = Tree.of([file(path) for path in reversed(paths)])
    assert forward.digest() == backward.digest() == hashlib.sha256(forward.canonical()).hexdigest()
    assert Tree.from_json(json.loads(forward.canonical())) == forward
