"""Checkpoints of a lost task, salvaged from a shared volume through another task's courier."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.control.startup.salvage import staged_of
from stoker.engine.kubernetes.courier_client import RemoteTaskDir
from stoker.errors import BlobDamaged
from stoker.launcher.checkpoints.scanner import Scanner
from stoker.task import layout
from stoker.task.layout import SharedPart
from stoker.testing.couriers import CourierProcess, remote_directory
from stoker.transfer import carry_checkpoint
from support.checkpoints.scanning import archive

LOST = SharedPart("digits-7f3k", 1, "worker-0", 1)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The volume of a lost task, whose other files are gone."""
    part = tmp_path / "volume" / LOST.name
    for name in layout.LASTING:
        (part / name).mkdir(parents=True)
    scanner = Scanner(str(part), lambda entry: None)
    scanner.begin(1)
    scanner.close()
    (part / "checkpoints/1/step-1.pt").write_bytes(archive("one"))
    (part / "checkpoints/1/step-2.pt").write_bytes(archive("two"))
    (part / "checkpoints/1/step-3.pt").write_bytes(archive("three")[:-30])
    for number in (1, 2, 3):
        os.utime(part / f"checkpoints/1/step-{number}.pt", (1000 + number, 1000 + number))
    return part.parents[1]


@pytest.fixture
def far(tmp_path: Path, volume: Path) -> Iterator[RemoteTaskDir]:
    root = tmp_path / "task"
    for name in layout.DIRECTORIES:
        (root / name).mkdir(parents=True)
    courier = CourierProcess(root, tmp_path / "keys", shared=volume)
    try:
        with remote_directory(courier, tmp_path / "mirror/worker-0", shares=True) as directory:
            Path(directory.root).mkdir(parents=True, exist_ok=True)
            yield directory
    finally:
        courier.kill()


def test_complete_checkpoints_are_salvaged_and_removed(
    far: RemoteTaskDir, volume: Path, tmp_path: Path
) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    assert far.shares
    (volume / "emptied-1a2b").mkdir()
    assert far.parts() == ([LOST], ["emptied-1a2b"])
    for _ in range(2):  # a server that died before it recorded this asks again
        entries = far.salvage(LOST, 1, [])
        found = staged_of(entries)
        assert [staged.name for staged in found] == ["step-1.pt", "step-2.pt"]
        assert [entry["name"] for entry in entries if entry["k"] == "rejected"] == ["step-3.pt"]
    digest, _ = carry_checkpoint(far, found[1], blobs, part=LOST)
    (file,) = blobs.tree(digest).files
    assert file.sha256 == hashlib.sha256(archive("two")).hexdigest()
    far.discard(LOST.path)
    far.discard("shared/emptied-1a2b")
    assert far.parts() == ([], []) and os.listdir(volume) == []


def test_what_a_task_that_still_lives_does_to_its_copies_is_noticed(
    far: RemoteTaskDir, volume: Path, tmp_path: Path
) -> None:
    (first, second) = staged_of(far.salvage(LOST, 1, []))
    spoiled = volume / LOST.name / layout.staged(second.number) / "step-2.pt"
    data = bytearray(spoiled.read_bytes())
    data[50] ^= 1
    spoiled.chmod(0o600)
    spoiled.write_bytes(data)
    blobs = BlobStore(tmp_path / "blobs")
    with pytest.raises(BlobDamaged):
        carry_checkpoint(far, second, blobs, part=LOST)
    assert carry_checkpoint(far, first, blobs, part=LOST)[1] == len(archive("one"))


def test_a_part_that_is_gone_and_one_that_cannot_be_read(far: RemoteTaskDir, volume: Path) -> None:
    with pytest.raises(FileNotFoundError):
        far.salvage(LOST._replace(attempt=7), 1, [])
    (volume / LOST.name / layout.SCAN).unlink()
    (volume / LOST.name / layout.SCAN).symlink_to("/etc/passwd")
    with pytest.raises(OSError) as caught:
        far.salvage(LOST, 1, [])
    assert json.dumps(caught.value.errno) and caught.value.errno != 5, "not the error of a missing answer"


def test_without_a_shared_volume_there_is_nothing_to_ask_for(tmp_path: Path) -> None:
    root = tmp_path / "task"
    root.mkdir()
    courier = CourierProcess(root, tmp_path / "keys")
    try:
        with remote_directory(courier, tmp_path / "mirror/worker-0", shares=True) as directory:
            assert directory.parts() == ([], [])
            with pytest.raises(FileNotFoundError):
                directory.salvage(LOST, 1, [])
        with remote_directory(courier, tmp_path / "mirror/worker-1", patience=0.1) as alone:
            courier.kill()
            assert alone.parts() == ([], []), "no request was sent"
    finally:
        courier.kill()
