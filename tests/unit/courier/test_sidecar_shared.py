"""A volume that tasks share, seen by a courier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.courier.shared_volume import SharedVolume
from stoker.task import layout
from stoker.task.local_directory import UnsafePath

MINE = "digits-7f3k/1.worker-0.1"
OTHER = "digits-7f3k/12.my_role-3.2"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "home"
    for name in (MINE, OTHER, "digits-7f3k/notes", "lost+found/1.worker-0.1", "other-1a2b/a.b.c"):
        (root / name / "checkpoints/1").mkdir(parents=True)
        (root / name / "checkpoints/1/model").write_bytes(name.encode())
    (root / "emptied-1a2b").mkdir()
    return root


def tree(root: Path) -> list[str]:
    return sorted(str(found.relative_to(root)) for found in root.rglob("*"))


def test_parts_are_listed_and_runs_without_parts(root: Path) -> None:
    assert SharedVolume(str(root)).names() == [MINE, OTHER, "emptied-1a2b", "other-1a2b"]
    part = layout.part_of(OTHER)
    assert part == ("digits-7f3k", 12, "my_role-3", 2) and part.name == OTHER
    assert part.path == f"shared/{OTHER}"


def test_a_part_is_removed_whole_and_nothing_else(root: Path) -> None:
    shared = SharedVolume(str(root))
    (root / MINE / "staged/000001/deep").mkdir(parents=True)
    os.chmod(root / MINE / "staged/000001", 0o500)
    rest = [path for path in tree(root) if not path.startswith(MINE)]
    for _ in range(2):
        shared.discard(MINE)
        assert tree(root) == rest
    shared.discard(f"{OTHER}/checkpoints/1")
    assert os.listdir(root / OTHER / "checkpoints") == []


def test_the_directory_of_a_run_is_removed_with_its_last_part(root: Path) -> None:
    shared = SharedVolume(str(root))
    (root / "single-1a2b/1.worker-0.1/staged").mkdir(parents=True)
    shared.discard("single-1a2b/1.worker-0.1")
    assert not (root / "single-1a2b").exists()
    for run in ("emptied-1a2b", "other-1a2b", "gone-1a2b"):
        shared.discard(run)
    assert not (root / "emptied-1a2b").exists()
    assert (root / "other-1a2b/a.b.c/checkpoints/1/model").exists(), "only what is empty"


@pytest.mark.parametrize(
    "path",
    ["", "..", f"../home/{MINE}", "digits-7f3k/notes", "digits-7f3k/../x", "other-1a2b/a.b.c/checkpoints"],
)
def test_other_files_are_neither_read_nor_removed(root: Path, path: str) -> None:
    shared = SharedVolume(str(root))
    before = tree(root)
    for call in (shared.discard, shared.open, shared.path):
        with pytest.raises(UnsafePath):
            call(path)
    assert tree(root) == before


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    shared = SharedVolume(str(root))
    (tmp_path / "secret/1.worker-0.1").mkdir(parents=True)
    (tmp_path / "secret/1.worker-0.1/file").write_bytes(b"s")
    (root / MINE / "checkpoints/1/link").symlink_to(tmp_path / "secret/1.worker-0.1/file")
    (root / "linked").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePath):
        shared.open(f"{MINE}/checkpoints/1/link")
    for call in (shared.path, shared.discard):
        with pytest.raises(OSError):
            call("linked/1.worker-0.1")
    assert (tmp_path / "secret/1.worker-0.1/file").read_bytes() == b"s"


def test_a_missing_part(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SharedVolume(str(root)).path("gone-1a2b/1.worker-0.1")
