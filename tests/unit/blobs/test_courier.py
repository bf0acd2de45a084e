"""Transfers into and out of a task directory that belongs to a hostile user."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.errors import BlobDamaged, NotFound, SpecError, TooLarge
from stoker.spec.tree import Tree, TreeFile
from stoker.task import layout
from stoker.task.formats import StagedCheckpoint
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.transfer import bring_code, carry_checkpoint, carry_outputs, restore_checkpoint
from support.blobs import stored


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "task"
    root.mkdir()
    for name in layout.DIRECTORIES:
        (root / name).mkdir()
    return root


def stage(root: Path, files: dict[str, bytes], number: int = 1) -> StagedCheckpoint:
    listed = []
    for path, data in files.items():
        target = root / layout.staged(number) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        sha = hashlib.sha256(data).hexdigest()
        listed.append({"path": path, "size": len(data), "sha256": sha, "mode": 0o600})
    return StagedCheckpoint(number=number, generation=1, name="step-1", how="sdk", files=listed)


def test_code_is_brought_once(blobs: BlobStore, root: Path) -> None:
    digest = blobs.put_tree(Tree((TreeFile("train.py", *blobs.put_stream([b"print()"])),)))
    bring_code(blobs, digest, LocalTaskDir(str(root)))
    (root / "code" / "train.py").write_bytes(b"changed by the task")
    bring_code(blobs, digest, LocalTaskDir(str(root)))
    assert (root / "code" / "train.py").read_bytes() == b"changed by the task"


def test_code_is_not_brought_through_a_link(blobs: BlobStore, root: Path, tmp_path: Path) -> None:
    digest = blobs.put_tree(Tree((TreeFile("train.py", *blobs.put_stream([b"print()"])),)))
    (root / "code").rmdir()
    (tmp_path / "outside").mkdir()
    (root / "code").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafePath):
        bring_code(blobs, digest, LocalTaskDir(str(root)))
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_checkpoint_is_stored_and_restored(blobs: BlobStore, root: Path) -> None:
    task = LocalTaskDir(str(root))
    files = {"step-1/model.pt": os.urandom(100_000), "step-1/shards/0": b"zero", "step-1/empty": b""}
    digest, size = carry_checkpoint(task, stage(root, files), blobs)
    assert size == 100_004
    assert not (root / layout.staged(1)).exists(), "what was carried away takes no room"
    (root / "checkpoints" / "2").mkdir()
    (root / "checkpoints" / "2" / "stale").write_text("of a try before")
    restore_checkpoint(blobs, digest, task, 2)
    restored = root / "checkpoints" / "2"
    assert {str(p.relative_to(restored)): p.read_bytes() for p in restored.rglob("*") if p.is_file()} == files
    assert os.access(restored / "step-1" / "model.pt", os.W_OK)


def test_a_repeated_transfer_after_a_crash_gives_the_same_tree(blobs: BlobStore, root: Path) -> None:
    task = LocalTaskDir(str(root))
    staged = stage(root, {"a": b"1", "b": b"2", "c": b"3"})
    # The first try has stored two files and unlinked one of them.
    (root / layout.staged(1) / "a").unlink()
    blobs.put_stream([b"1"])
    blobs.put_stream([b"2"])
    first = carry_checkpoint(task, staged, blobs)
    assert carry_checkpoint(task, staged, blobs) == first


def test_changed_bytes_are_refused(blobs: BlobStore, root: Path) -> None:
    task = LocalTaskDir(str(root))
    staged = stage(root, {"model": b"good weights"})
    path = root / layout.staged(1) / "model"
    for wrong in (b"evil weights", b"good", b"good weights and more"):
        path.write_bytes(wrong)
        with pytest.raises(BlobDamaged):
            carry_checkpoint(task, staged, blobs)
    path.unlink()
    with pytest.raises(NotFound, match="gone"):
        carry_checkpoint(task, staged, blobs)
    assert stored(blobs, "trees") == 0


def unhashed(staged: StagedCheckpoint, *paths: str) -> StagedCheckpoint:
    for file in staged.files:
        if file["path"] in paths:
            file["sha256"] = ""
    return staged


def test_files_that_the_launcher_did_not_hash_are_hashed_here(blobs: BlobStore, root: Path) -> None:
    task = LocalTaskDir(str(root))
    files = {"step-1/model.pt": b"weights", "step-1/copy.pt": b"weights", "step-1/config": b"{}"}
    hashed = carry_checkpoint(task, stage(root, files), blobs)
    staged = unhashed(stage(root, files, 2), "step-1/model.pt", "step-1/copy.pt")
    assert carry_checkpoint(task, staged, blobs) == hashed
    assert not (root / layout.staged(2)).exists()
    assert carry_checkpoint(task, staged, blobs) == hashed, "a server that died had taken them out already"


def test_unhashed_files_survive_a_crash_between_two_of_them(
    blobs: BlobStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = LocalTaskDir(str(root))
    staged = unhashed(stage(root, {"a": b"1", "b": b"2", "c": b"3"}), "a", "b", "c")
    appended = LocalTaskDir.append
    left = iter([True, False])

    def dies_at_the_second(self: LocalTaskDir, path: str, value: dict[str, object]) -> None:
        if not next(left):
            raise OSError("the power is cut")
        appended(self, path, value)

    monkeypatch.setattr(LocalTaskDir, "append", dies_at_the_second)
    with pytest.raises(OSError, match="power"):
        carry_checkpoint(task, staged, blobs)
    assert not (root / layout.staged(1) / "a").exists() and (root / layout.staged(1) / "b").exists()
    monkeypatch.setattr(LocalTaskDir, "append", appended)
    digest, size = carry_checkpoint(task, staged, blobs)
    found = [blobs.path(file.sha256).read_bytes() for file in blobs.tree(digest).files]
    assert (size, found) == (3, [b"1", b"2", b"3"])


def test_recorded_hashes_are_read_once_for_any_number_of_missing_files(
    blobs: BlobStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = LocalTaskDir(str(root))
    files = {f"{n}": b"%d" % n for n in range(40)}
    staged = unhashed(stage(root, files), *files)
    carried = carry_checkpoint(task, staged, blobs)
    read: list[str] = []
    lines = LocalTaskDir.lines
    monkeypatch.setattr(
        LocalTaskDir, "lines", lambda self, path, offset: (read.append(path), lines(self, path, offset))[1]
    )
    assert carry_checkpoint(task, staged, blobs) == carried
    assert read == [layout.SUMS] * 2, "to its end, and to see that it is the end"


def test_an_unhashed_file_that_is_gone_is_refused(blobs: BlobStore, root: Path, tmp_path: Path) -> None:
    task = LocalTaskDir(str(root))
    staged = unhashed(stage(root, {"m": b"weights"}), "m")
    (root / layout.staged(1) / "m").unlink()
    with pytest.raises(NotFound, match="gone"):
        carry_checkpoint(task, staged, blobs)
    (root / layout.SUMS).write_text('{"path":"staged/000001/m","sha256":"../../secret"}\n')
    with pytest.raises(SpecError):
        carry_checkpoint(task, staged, blobs)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_hashes_are_recorded_only_in_a_regular_file(
    blobs: BlobStore, root: Path, tmp_path: Path, kind: str
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    sums = root / layout.SUMS
    if kind == "link":
        sums.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(sums)
    else:
        sums.mkdir()
    staged = unhashed(stage(root, {"m": b"weights"}), "m")
    with pytest.raises(OSError):
        carry_checkpoint(LocalTaskDir(str(root)), staged, blobs)
    assert outside.read_bytes() == b""
    assert (root / layout.staged(1) / "m").read_bytes() == b"weights", "it stays until its hash is recorded"


@pytest.mark.parametrize("kind", ["file link", "directory link", "staged link", "pipe"])
def test_links_and_pipes_are_never_followed(blobs: BlobStore, root: Path, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "f").write_bytes(b"private")
    staged = stage(root, {"d/f": b"private"})
    path = root / layout.staged(1) / "d" / "f"
    path.unlink()
    if kind == "file link":
        path.symlink_to(secret / "f")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory link":
        path.parent.rmdir()
        path.parent.symlink_to(secret)
    else:
        path.parent.rmdir()
        (root / layout.staged(1)).rmdir()
        (root / "staged").rmdir()
        (tmp_path / "away" / "000001").mkdir(parents=True)
        (tmp_path / "away" / "000001" / "d").symlink_to(secret)
        (root / "staged").symlink_to(tmp_path / "away")
    with pytest.raises(UnsafePath):
        carry_checkpoint(LocalTaskDir(str(root)), staged, blobs)
    assert (secret / "f").read_bytes() == b"private"
    assert stored(blobs) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../../../etc/passwd"},
        {"path": "/etc/passwd"},
        {"path": 7},
        {"sha256": "../x"},
        {"size": -1},
        {"size": "12"},
    ],
)
def test_a_forged_journal_is_refused(blobs: BlobStore, root: Path, change: dict[str, object]) -> None:
    staged = stage(root, {"f": b"data"})
    staged.files[0].update(change)
    with pytest.raises(SpecError):
        carry_checkpoint(LocalTaskDir(str(root)), staged, blobs)


@pytest.mark.parametrize("number", ["../../x", -1, 10**12, True])
def test_the_number_of_a_checkpoint_is_a_number(blobs: BlobStore, root: Path, number: object) -> None:
    staged = stage(root, {"f": b"data"})
    staged.number = number  # type: ignore[assignment]
    with pytest.raises(SpecError):
        carry_checkpoint(LocalTaskDir(str(root)), staged, blobs)


def test_a_damaged_checkpoint_is_not_restored(blobs: BlobStore, root: Path) -> None:
    task = LocalTaskDir(str(root))
    digest, _ = carry_checkpoint(task, stage(root, {"m": b"weights"}), blobs)
    path = blobs.path(hashlib.sha256(b"weights").hexdigest())
    path.chmod(0o600)
    path.write_bytes(b"Weights")
    with pytest.raises(BlobDamaged):
        restore_checkpoint(blobs, digest, task, 2)
    assert list((root / "checkpoints").iterdir()) == []


def test_restoring_does_not_follow_links(blobs: BlobStore, root: Path, tmp_path: Path) -> None:
    task = LocalTaskDir(str(root))
    digest, _ = carry_checkpoint(task, stage(root, {"m": b"weights"}), blobs)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("keep")
    (root / "checkpoints" / "2").symlink_to(victim)
    restore_checkpoint(blobs, digest, task, 2)
    (root / "checkpoints" / "2" / "m").unlink()
    (root / "checkpoints" / "2").rmdir()
    (root / "checkpoints").rmdir()
    (root / "checkpoints").symlink_to(victim)
    with pytest.raises(UnsafePath):
        restore_checkpoint(blobs, digest, task, 3)
    assert [path.name for path in victim.iterdir()] == ["precious"]


def test_restoring_over_a_directory_without_permissions(blobs: BlobStore, root: Path) -> None:
    task = LocalTaskDir(str(root))
    digest, _ = carry_checkpoint(task, stage(root, {"m": b"weights"}), blobs)
    locked = root / "checkpoints" / "2" / "locked" / "deeper"
    locked.mkdir(parents=True)
    (locked / "f").write_text("x")
    locked.chmod(0)
    locked.parent.chmod(0)
    restore_checkpoint(blobs, digest, task, 2)
    assert [path.name for path in (root / "checkpoints" / "2").iterdir()] == ["m"]


def test_outputs(blobs: BlobStore, root: Path, tmp_path: Path) -> None:
    out = root / "output"
    (out / "plots").mkdir()
    (out / "plots" / "loss.png").write_bytes(b"png")
    (out / "model.bin").write_bytes(b"weights")
    (out / "latest").symlink_to("model.bin")
    (out / "passwd").symlink_to("/etc/passwd")
    (out / "up").symlink_to("../secrets.json")
    os.mkfifo(out / "pipe")
    with open(os.fsencode(out) + b"/caf\xe9", "wb") as handle:
        handle.write(b"latin")
    digest, files, size = carry_outputs(LocalTaskDir(str(root)), blobs)
    tree = blobs.tree(digest)
    assert [file.path for file in tree.files] == ["caf\\xe9", "latest", "model.bin", "plots/loss.png"]
    assert (files, size) == (4, 15)
    assert carry_outputs(LocalTaskDir(str(root)), blobs)[0] == digest, "a second try finds the same"


def test_no_outputs(blobs: BlobStore, root: Path, tmp_path: Path) -> None:
    task = LocalTaskDir(str(root))
    assert carry_outputs(task, blobs)[1:] == (0, 0)
    (root / "output").rmdir()
    assert carry_outputs(task, blobs)[1:] == (0, 0)
    (root / "output").symlink_to("/etc")
    assert carry_outputs(task, blobs)[1:] == (0, 0)


def test_outputs_are_capped(blobs: BlobStore, root: Path) -> None:
    task = LocalTaskDir(str(root))
    for n in range(12):
        (root / "output" / f"d{n}").mkdir()
    with pytest.raises(TooLarge, match="entries"):
        carry_outputs(task, blobs, max_entries=10)
    with (root / "output" / "sparse").open("wb") as handle:
        handle.truncate(1 << 42)
    with pytest.raises(TooLarge, match="'sparse'"):
        carry_outputs(task, blobs)
    assert stored(blobs) == 0


def test_outputs_nested_too_deep(blobs: BlobStore, root: Path) -> None:
    here = os.open(root / "output", os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    with pytest.raises(TooLarge, match="nested"):
        carry_outputs(LocalTaskDir(str(root)), blobs)
