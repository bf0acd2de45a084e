"""Blobs appear complete and verified or not at all; placing a tree never writes outside its destination."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.errors import BlobDamaged, DiskFull, NotFound, Refused, SpecError, TooLarge
from stoker.spec.tree import Tree, TreeFile
from support.blobs import place, stored


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(blobs: BlobStore, data: bytes) -> str:
    return blobs.put_stream([data])[0]


def tree_of(blobs: BlobStore, files: dict[str, bytes], links: dict[str, str] | None = None) -> str:
    entries = [TreeFile(path, put(blobs, data), len(data)) for path, data in files.items()]
    entries += [TreeFile(path, link=target) for path, target in (links or {}).items()]
    return blobs.put_tree(Tree.of(entries))


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_stored_blob_is_read_back(blobs: BlobStore) -> None:
    digest, size = blobs.put_stream([b"ab", b"", b"cd"])
    assert (digest, size) == (digest_of(b"abcd"), 4)
    with blobs.open(digest) as handle:
        assert handle.read() == b"abcd"
    assert blobs.path(digest).read_bytes() == b"abcd"
    assert blobs.has(digest) and blobs.verify(digest) and blobs.size(digest) == 4
    assert blobs.missing([digest, digest_of(b"x"), digest_of(b"x")]) == [digest_of(b"x")]


def test_the_empty_blob(blobs: BlobStore) -> None:
    assert put(blobs, b"") == digest_of(b"")
    assert blobs.has(digest_of(b""))


def test_an_empty_file_left_by_a_power_cut_is_replaced(blobs: BlobStore) -> None:
    digest = put(blobs, b"content")
    os.truncate(_force(blobs, digest), 0)
    assert not blobs.has(digest)
    put(blobs, b"content")
    assert blobs.verify(digest)


@pytest.mark.parametrize("wrong", [{"digest": "0" * 64}, {"size": 3}, {"size": 5}])
def test_wrong_bytes_are_not_kept(blobs: BlobStore, wrong: dict[str, object]) -> None:
    with pytest.raises(BlobDamaged):
        blobs.put_stream([b"abcd"], **wrong)  # type: ignore[arg-type]
    assert files_in(blobs.root) == []


def test_a_stream_that_breaks_leaves_nothing(blobs: BlobStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        blobs.put_stream(chunks())
    assert files_in(blobs.root) == []


def test_a_full_disk_is_named(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(blobs, b"before")

    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFull, match=str(blobs.root)):
        put(blobs, b"after")
    monkeypatch.undo()
    assert blobs.has(digest_of(b"before")) and not blobs.has(digest_of(b"after"))
    put(blobs, b"after")
    assert blobs.has(digest_of(b"after"))


@pytest.mark.parametrize("bad", ["../../etc/passwd", "", "A" * 64, "/" + "a" * 63, "a" * 63])
def test_digests_are_checked_before_they_are_paths(blobs: BlobStore, bad: str) -> None:
    for call in (blobs.has, blobs.open, blobs.path, blobs.tree, blobs.verify, blobs.touch):
        with pytest.raises(SpecError):
            call(bad)
    with pytest.raises(SpecError):
        blobs.place_at(bad, -1, "out")


def test_absent_is_not_found(blobs: BlobStore) -> None:
    for call in (blobs.open, blobs.path, blobs.tree, blobs.verify):
        with pytest.raises(NotFound):
            call("a" * 64)


def move(blobs: BlobStore, path: Path) -> str:
    with path.open("rb") as file:
        digest, _ = blobs.put_fd(file.fileno(), move=True)
    path.unlink()
    return digest


def test_moving_keeps_the_inode(blobs: BlobStore, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(b"x" * 100_000)
    inode = source.stat().st_ino
    digest = move(blobs, source)
    assert blobs.path(digest).stat().st_ino == inode
    assert stat.S_IMODE(blobs.path(digest).stat().st_mode) == 0o444


def test_a_file_that_is_open_or_has_another_link_is_copied(blobs: BlobStore, tmp_path: Path) -> None:
    written, linked = tmp_path / "written", tmp_path / "linked"
    written.write_bytes(b"one")
    linked.write_bytes(b"two")
    os.link(linked, tmp_path / "other")
    with written.open("r+b") as writer:
        first = move(blobs, written)
        writer.write(b"XXX")
    second = move(blobs, linked)
    (tmp_path / "other").write_bytes(b"YYY")
    assert blobs.verify(first) and blobs.verify(second)


def test_many_threads_putting_the_same(blobs: BlobStore) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for n in range(20):
                put(blobs, b"%d" % n * 1000)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert stored(blobs) == 20
    assert all(blobs.verify(digest_of(b"%d" % n * 1000)) for n in range(20))


def test_placing_a_tree(blobs: BlobStore, tmp_path: Path) -> None:
    script = put(blobs, b"#!/bin/sh")
    big = os.urandom(3 << 20)
    entries = [
        TreeFile("a/b/c.txt", put(blobs, b"c"), 1),
        TreeFile("a/link", link="b/c.txt"),
        TreeFile("a/up", link="../run.sh"),
        TreeFile("a.txt", put(blobs, b""), 0),
        TreeFile("big", put(blobs, big), len(big)),
        TreeFile("run.sh", script, 9, 0o755),
        TreeFile("sp ace/ünï", put(blobs, b"u"), 1),
    ]
    destination = tmp_path / "out"
    place(blobs, blobs.put_tree(Tree.of(entries)), destination)
    assert files_in(destination) == ["a.txt", "a/b/c.txt", "a/link", "a/up", "big", "run.sh", "sp ace/ünï"]
    assert (destination / "big").read_bytes() == big
    assert (destination / "a/link").read_bytes() == b"c" and (
        destination / "a/up"
    ).read_bytes() == b"#!/bin/sh"
    assert os.access(destination / "run.sh", os.X_OK) and not os.access(destination / "a.txt", os.X_OK)
    (destination / "run.sh").write_bytes(b"changed")
    assert blobs.verify(script), "a placed file must not be the stored one"


def test_placing_takes_over_an_empty_directory_and_refuses_a_full_one(
    blobs: BlobStore, tmp_path: Path
) -> None:
    digest = tree_of(blobs, {"a": b"1"})
    destination = tmp_path / "out"
    destination.mkdir()
    place(blobs, digest, destination)
    with pytest.raises(Refused, match="not empty"):
        place(blobs, digest, destination)
    other = tree_of(blobs, {"b": b"2"})
    place(blobs, other, destination, replace=True)
    assert files_in(destination) == ["b"]


def test_placing_is_all_or_nothing(blobs: BlobStore, tmp_path: Path) -> None:
    digest = tree_of(blobs, {"a": b"1", "b": b"22", "c": b"3"})
    blobs.path(digest_of(b"22")).unlink()
    (tmp_path / "here").mkdir()
    with pytest.raises(NotFound):
        place(blobs, digest, tmp_path / "here" / "out")
    assert list((tmp_path / "here").iterdir()) == []


def test_placing_verifies_where_asked(blobs: BlobStore, tmp_path: Path) -> None:
    big = bytes(2 << 20)
    for data in (b"small", big):
        digest = tree_of(blobs, {"f": data})
        with _force(blobs, digest_of(data)).open("r+b") as handle:
            handle.write(b"!")
        with pytest.raises(BlobDamaged, match="'f'"):
            place(blobs, digest, tmp_path / "out", verify=True)
        assert not (tmp_path / "out").exists()
        assert blobs.verify_tree(digest) == ["f"]
        _force(blobs, digest_of(data)).write_bytes(data[:-1])
        with pytest.raises(BlobDamaged, match="bytes instead of"):
            place(blobs, digest, tmp_path / "out")


def test_placing_does_not_follow_a_link_in_the_destination(blobs: BlobStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    digest = tree_of(blobs, {"a": b"1"})
    (tmp_path / "out").symlink_to(outside)
    with pytest.raises(Refused):
        place(blobs, digest, tmp_path / "out")
    place(blobs, digest, tmp_path / "out", replace=True)
    assert list(outside.iterdir()) == [] and (tmp_path / "out" / "a").read_bytes() == b"1"


def test_a_stored_tree_that_was_tampered_with_is_refused(blobs: BlobStore, tmp_path: Path) -> None:
    digest = tree_of(blobs, {"a": b"1"})
    path = blobs.root / "trees" / digest[:2] / digest[2:]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"../a"'))
    with pytest.raises(BlobDamaged):
        place(blobs, digest, tmp_path / "out")


def test_a_tree_with_a_path_outside_is_not_stored(blobs: BlobStore) -> None:
    with pytest.raises(SpecError):
        blobs.put_tree(Tree((TreeFile("../a", put(blobs, b"1"), 1),)))


def test_collecting_keeps_roots_and_the_fresh(blobs: BlobStore) -> None:
    kept = tree_of(blobs, {"a": b"kept", "s": b"shared"})
    gone = tree_of(blobs, {"a": b"gone", "s": b"shared"})
    loose = put(blobs, b"loose root")
    _age(blobs)
    fresh = tree_of(blobs, {"f": b"fresh", "o": b"old but asked for"})
    _age(blobs, digest_of(b"old but asked for"))
    freed = blobs.collect({kept, loose}, grace=3600)
    assert (freed.blobs, blobs.has(gone), blobs.has(digest_of(b"gone"))) == (2, False, False)
    for digest in (
        kept,
        loose,
        fresh,
        *(digest_of(d) for d in (b"kept", b"shared", b"fresh", b"old but asked for")),
    ):
        assert blobs.has(digest)


def test_a_requested_blob_is_not_collected(blobs: BlobStore) -> None:
    digest = put(blobs, b"old")
    _age(blobs)
    assert blobs.missing([digest]) == []
    assert blobs.collect(set(), grace=3600).blobs == 0
    _age(blobs)
    assert blobs.collect(set(), grace=3600).blobs == 1


def test_discarding_a_tree_frees_blobs_that_no_other_tree_has(blobs: BlobStore) -> None:
    dropped = tree_of(blobs, {"a": b"only here", "s": b"shared"})
    other = tree_of(blobs, {"s": b"shared"})
    wanted_again = tree_of(blobs, {"a": b"a root by now"})
    assert blobs.discard({dropped}, {other})[1] == {dropped}, "fresh: left for another time"
    _age(blobs)
    freed, left = blobs.discard({dropped, wanted_again}, {other, wanted_again}, grace=60)
    assert (freed.blobs, left) == (2, set())
    assert not blobs.has_tree(dropped) and not blobs.has(digest_of(b"only here"))
    assert blobs.has(digest_of(b"shared")) and blobs.has_tree(wanted_again)
    assert blobs.discard({dropped}, set())[0].blobs == 0


def test_collecting_stops_at_a_damaged_root(blobs: BlobStore) -> None:
    root = tree_of(blobs, {"a": b"1"})
    put(blobs, b"loose")
    _age(blobs)
    path = blobs.root / "trees" / root[:2] / root[2:]
    path.chmod(0o600)
    path.write_bytes(b"{}")
    _age(blobs)
    with pytest.raises(BlobDamaged):
        blobs.collect({root}, grace=3600)
    assert blobs.has(digest_of(b"loose")) and blobs.has(digest_of(b"1"))


def test_collecting_removes_leftovers_of_killed_writers(blobs: BlobStore) -> None:
    put(blobs, b"1")
    (blobs.root / "tmp" / "abandoned").write_bytes(b"x")
    _age(blobs)
    blobs.collect({digest_of(b"1")}, grace=3600)
    assert files_in(blobs.root / "tmp") == []


def test_a_limit_on_what_is_read(blobs: BlobStore, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as handle:
        handle.truncate(1 << 40)
    fd = os.open(sparse, os.O_RDONLY)
    try:
        with pytest.raises(TooLarge):
            blobs.put_fd(fd, limit=1 << 20)
    finally:
        os.close(fd)
    assert files_in(blobs.root) == []


def _force(blobs: BlobStore, digest: str) -> Path:
    path = blobs.root / "objects" / digest[:2] / digest[2:]
    path.chmod(0o600)
    return path


def _age(blobs: BlobStore, only: str | None = None) -> None:
    for path in blobs.root.rglob("*"):
        if path.is_file() and (only is None or path.parent.name + path.name == only):
            os.utime(path, (1, 1))
