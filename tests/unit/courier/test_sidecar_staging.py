"""Content arrives in pieces and in any order, at couriers that are killed, and becomes a directory."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.courier import placement
from stoker.courier.handlers import Handlers, Request
from stoker.courier.placement import Incomplete, TreePlacement
from stoker.courier.staging import HOME, Damaged, Piece, Staging, slot_name, stage_of
from stoker.spec.tree import Tree, TreeFile
from stoker.task import courier_protocol, formats, layout
from stoker.task.courier_protocol import Malformed
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.testing.taskdir_suite import contents


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Place:
    """A task directory, and the server's part in placing a tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.files: dict[str, bytes] = {}
        self.restart()

    def restart(self) -> None:
        """A courier that knows only the directory."""
        self.staging = Staging(str(self.root), lasting=True)
        self.staging.recover()
        self.placing = TreePlacement(str(self.root), self.staging)

    def tree(self, files: dict[str, bytes], links: dict[str, str] | None = None) -> str:
        entries = [
            TreeFile(path, sha(data), len(data), 0o755 if path.endswith(".sh") else 0o644)
            for path, data in files.items()
        ]
        entries += [TreeFile(path, link=target) for path, target in (links or {}).items()]
        return self.manifest(Tree.of(entries).canonical(), files)

    def manifest(self, raw: bytes, files: dict[str, bytes]) -> str:
        self.files |= {sha(data): data for data in [raw, *files.values()]}
        return sha(raw)

    def send(self, path: str, manifest: str, digests: list[str]) -> None:
        for digest in digests:
            data = self.files[digest]
            self.staging.receive(path, manifest, [Piece(digest, len(data), 0, len(data))], memoryview(data))

    def place(self, path: str, manifest: str, *, replace: bool = True) -> None:
        self.placing.place(path, manifest, replace=replace)

    def all(self, path: str, manifest: str) -> None:
        self.send(path, manifest, list(self.files))
        self.place(path, manifest)


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return Place(tmp_path / "task")


def test_a_tree_is_placed(here: Place) -> None:
    files: dict[str, bytes] = {"a": b"1", "d/e/run.sh": b"2", "d/empty": b"", "same": b"1"}
    manifest = here.tree(files, {"d/link": "../a"})
    here.all("checkpoints/3", manifest)
    root = here.root / "checkpoints/3"
    assert contents(root) == {**files, "d/link": "../a"}
    assert stat.S_IMODE((root / "d/e/run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o644
    assert {path.stat().st_nlink for path in root.rglob("*") if path.is_file() and not path.is_symlink()} == {
        1
    }
    (root / "a").write_bytes(b"changed")
    assert (root / "same").read_bytes() == b"1"
    assert list((here.root / stage_of(here.staging.home("checkpoints/3"))).iterdir()) == []


def test_pieces_in_any_order(here: Place) -> None:
    data = random.Random(1).randbytes(100_000)
    manifest = here.tree({"a": data})
    cuts = [0, 1, 30_000, 30_001, 99_999, 100_000]
    pieces = [(begin, data[begin:end]) for begin, end in itertools.pairwise(cuts)]
    pieces += [(20_000, data[20_000:50_000]), (0, data[:10])]
    random.Random(2).shuffle(pieces)
    threads = [
        threading.Thread(
            target=here.staging.receive,
            args=("code", manifest, [Piece(sha(data), len(data), begin, len(part))], memoryview(part)),
        )
        for begin, part in pieces
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert here.staging.here("code", manifest, [sha(data)]) == ([sha(data)], {})


def test_a_gap_is_refused(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.courier.staging._PREDECESSOR", 0.01)
    manifest = here.tree({"a": b"0123456789"})
    piece = Piece(sha(b"0123456789"), 10, 5, 5)
    assert here.staging.receive("code", manifest, [piece], memoryview(b"56789")) == ([], {piece.digest: 0})


def test_wrong_content_is_refused(here: Place) -> None:
    manifest = here.tree({"a": b"0123456789"})
    piece = Piece(sha(b"0123456789"), 10, 0, 10)
    with pytest.raises(Damaged):
        here.staging.receive("code", manifest, [piece], memoryview(b"012345678X"))
    assert here.staging.here("code", manifest, [piece.digest]) == ([], {})
    with pytest.raises(Incomplete):
        here.place("code", manifest)
    here.all("code", manifest)
    assert contents(here.root / "code") == {"a": b"0123456789"}


def test_what_a_killed_courier_received_is_verified(here: Place) -> None:
    data = b"0123456789" * 1000
    manifest = here.tree({"a": data})
    here.staging.receive("code", manifest, [Piece(sha(data), len(data), 0, 4000)], memoryview(data[:4000]))
    here.restart()
    assert here.staging.here("code", manifest, [sha(data)]) == ([], {sha(data): 4000})
    rest = Piece(sha(data), len(data), 4000, 6000)
    answer = here.staging.receive("code", manifest, [rest], memoryview(data[4000:]))
    assert answer == ([], {sha(data): 10_000}), "it must be read again before it counts"
    here.staging.verify("code", manifest, sha(data), len(data))
    here.all("code", manifest)
    assert contents(here.root / "code") == {"a": data}


def test_content_damaged_between_two_couriers_is_found(here: Place) -> None:
    data = b"0123456789" * 1000
    manifest = here.tree({"a": data})
    here.staging.receive("code", manifest, [Piece(sha(data), len(data), 0, 4000)], memoryview(data[:4000]))
    part = here.root / stage_of(HOME) / slot_name("code", manifest) / f"{sha(data)}.part"
    here.restart()
    with part.open("r+b") as file:
        file.write(b"X")
    rest = Piece(sha(data), len(data), 4000, 6000)
    here.staging.receive("code", manifest, [rest], memoryview(data[4000:]))
    with pytest.raises(Damaged):
        here.staging.verify("code", manifest, sha(data), len(data))
    assert not part.exists()


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("call", ["mkdir", "link", "symlink", "rename", "fchmod", "open"])
def test_killed_at_any_call_of_a_placing(here: Place, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is then the old one, absent, or the new one, and a repetition succeeds."""
    old = here.tree({"old": b"old"})
    here.all("output", old)
    files = {"a": b"1", "b/c": b"22", "b/d": b"22", "e": b"333"}
    manifest = here.tree(files, {"b/l": "c"})
    real = getattr(os, call)
    at = 0
    while True:
        at += 1
        left = [at]

        def killed(*args: object, left: list[int] = left, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise _Killed
            return real(*args, **kwargs)

        here.send("output", manifest, list(here.files))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, killed)
            try:
                here.place("output", manifest)
            except _Killed:
                pass
            else:
                break
        here.restart()
        output = here.root / "output"
        found = contents(output) if output.exists() else None
        assert found in ({"old": b"old"}, None, {**files, "b/l": "c"})
        if found != {**files, "b/l": "c"}:
            complete, _ = here.staging.here("output", manifest, [sha(b"1"), sha(b"22"), sha(b"333")])
            assert len(complete) == 3, "what was verified stays"
        here.all("output", old)
    assert at > 1
    assert contents(here.root / "output") == {**files, "b/l": "c"}


def test_files_of_a_placed_tree_are_not_used_as_content(here: Place) -> None:
    """Killed between the last rename and the removal of the slot: training may have changed the files."""
    manifest = here.tree({"a": b"1"})
    here.send("code", manifest, list(here.files))
    slot = here.root / stage_of(HOME) / slot_name("code", manifest)
    (here.root / "code").mkdir()
    os.link(slot / sha(b"1"), here.root / "code" / "a")
    (here.root / "code" / "a").write_bytes(b"!")
    here.restart()
    assert here.staging.here("code", manifest, [sha(b"1")]) == ([], {})
    assert contents(here.root / "code") == {"a": b"!"}


def test_another_manifest_takes_the_slot(here: Place) -> None:
    first, second = here.tree({"a": b"1"}), here.tree({"a": b"2"})
    here.staging.receive("code", first, [Piece(sha(b"long"), 4, 0, 2)], memoryview(b"lo"))
    here.staging.here("code", second, [])
    assert [path.name for path in (here.root / stage_of(HOME)).iterdir()] == [slot_name("code", second)]
    here.staging.here("output", first, [])
    assert len(list((here.root / stage_of(HOME)).iterdir())) == 2


def test_a_repeated_placing_needs_no_content(here: Place) -> None:
    manifest = here.tree({"a": b"1"})
    here.all("output", manifest)
    here.restart()
    assert here.placing.settled("output", manifest, replace=True)
    here.place("output", manifest)
    near = LocalTaskDir(str(here.root))
    near.write_order(formats.Order(seq=1, generation=1, verb="run"))
    assert not here.placing.settled("output", manifest, replace=True), "something may have run since"
    assert not here.placing.settled("output", here.tree({"a": b"2"}), replace=True)


def test_a_directory_that_is_not_empty_is_left_alone(here: Place) -> None:
    manifest = here.tree({"a": b"1"})
    (here.root / "code").mkdir()
    assert not here.placing.settled("code", manifest, replace=False)
    (here.root / "code" / "mine").write_bytes(b"m")
    assert here.placing.settled("code", manifest, replace=False)
    here.place("code", manifest, replace=False)
    assert contents(here.root / "code") == {"mine": b"m"}


@pytest.mark.parametrize(
    "path", ["", ".", "..", "a/../b", "/a", f"{HOME}/stage", HOME, f"checkpoints/{HOME}", "a\0"]
)
def test_places_outside_are_refused(here: Place, path: str) -> None:
    with pytest.raises(UnsafePath):
        here.place(path, here.tree({"a": b"1"}))


def test_a_place_behind_a_link_is_refused(here: Place, tmp_path: Path) -> None:
    manifest = here.tree({"a": b"1"})
    (tmp_path / "outside").mkdir()
    (here.root / layout.CHECKPOINTS).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafePath):
        here.send("checkpoints/1", manifest, list(here.files))
    with pytest.raises(UnsafePath):
        here.place("checkpoints/1", manifest)
    assert list((tmp_path / "outside").iterdir()) == []


def test_checkpoints_may_be_on_a_separate_volume(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be renamed or linked between two volumes."""

    def volume(fd: int, name: str) -> str:
        where = Path(os.readlink(f"/proc/self/fd/{fd}")) / name
        return where.relative_to(here.root).parts[0]

    def kept_apart(call: Callable[..., None]) -> Callable[..., None]:
        def checked(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, **more: bool) -> None:
            ends = {volume(src_dir_fd, source), volume(dst_dir_fd, target)}
            if len(ends) > 1 and ends & set(layout.LASTING):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            call(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more)

        return checked

    monkeypatch.setattr(os, "rename", kept_apart(os.rename))
    monkeypatch.setattr(os, "link", kept_apart(os.link))
    for text in (b"1", b"2"):
        manifest = here.tree({"model/a": text})
        here.all("checkpoints/1", manifest)
        here.restart()
        assert contents(here.root / "checkpoints/1") == {"model/a": text}
    for path in ("staged/000001", "checkpoints/1"):
        (here.root / path).mkdir(parents=True, exist_ok=True)
        reply = Handlers(str(here.root), shared=str(here.root / "volume")).handle(
            courier_protocol.DISCARD, Request({"path": path}, memoryview(b""), lambda _: memoryview(b""))
        )
        assert reply.status == 200 and not (here.root / path).exists()
    left = [path for home in here.staging.homes for path in (here.root / home).rglob("*") if path.is_file()]
    assert [path.parent.name for path in left] == ["placed"]


def test_a_staging_area_behind_a_link_is_not_used(here: Place, tmp_path: Path) -> None:
    manifest = here.tree({"a": b"1"})
    (tmp_path / "outside").mkdir()
    here.send("code", manifest, [manifest])
    os.rename(here.root / HOME, here.root / "moved")
    (here.root / HOME).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafePath):
        here.send("code", manifest, list(here.files))
    assert list((tmp_path / "outside").iterdir()) == []


def test_content_that_was_swapped_for_a_link_is_not_content(here: Place, tmp_path: Path) -> None:
    manifest = here.tree({"a": b"1"})
    here.send("code", manifest, list(here.files))
    slot = here.root / stage_of(HOME) / slot_name("code", manifest)
    (tmp_path / "key").write_bytes(b"k")
    (slot / sha(b"1")).unlink()
    (slot / sha(b"1")).symlink_to(tmp_path / "key")
    with pytest.raises(Incomplete):
        here.place("code", manifest)
    (slot / f"{sha(b'2')}.part").symlink_to(tmp_path / "key")
    with pytest.raises(OSError):
        here.staging.receive("code", manifest, [Piece(sha(b"2"), 1, 0, 1)], memoryview(b"2"))
    assert (tmp_path / "key").read_bytes() == b"k"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b'{"files":[',
        b'{"files":[{}]}',
        b'{"files":[{"path":"../a","link":"b"}]}',
        b'{"files":[{"path":"a","link":"../b"}]}',
        b'{"files":[{"path":"a","link":"/b"}]}',
        b'{"files":[{"path":"d/a","link":"../../b"}]}',
        b'{"files":[{"path":"d/a","link":"x/../b"}]}',
        b'{"files":[{"path":"b","link":"c"},{"path":"a","link":"c"}]}',
        b'{"files":[{"path":"a","link":"c"},{"path":"a","link":"c"}]}',
        b'{"files":[{"path":"a","sha256":"00","size":1,"mode":420}]}',
        b'{"files":[{"path":"a","link":"c"}',
        b'{"files":[{"path":"\xff","link":"c"}]}',
        b'{"files":[' + b"[" * 100_000,
    ],
)
def test_what_is_not_a_manifest(here: Place, raw: bytes) -> None:
    manifest = here.manifest(raw, {})
    here.send("code", manifest, [manifest])
    with pytest.raises(Malformed):
        here.place("code", manifest)
    assert not (here.root / "code").exists()


def test_nothing_lies_beneath_a_link(here: Place, tmp_path: Path) -> None:
    raw = Tree((TreeFile("a", link="b"), TreeFile("a/x", sha(b"1"), 1))).canonical()
    manifest = here.manifest(raw, {"": b"1"})
    here.send("code", manifest, list(here.files))
    with pytest.raises(OSError):
        here.place("code", manifest)
    assert not (here.root / "code").exists()


def test_a_manifest_of_any_size_is_read_in_pieces(here: Place) -> None:
    files = {f"d/{number:05}-{'ü' * 50}": b"%d" % (number % 10) for number in range(2500)}
    manifest = here.tree(files)
    here.all("code", manifest)
    assert contents(here.root / "code") == files


def test_without_hard_links_it_is_copied(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_link", lambda *_: False)
    files = {"a": b"1", "b.sh": b"22"}
    here.all("code", here.tree(files))
    assert contents(here.root / "code") == files
    assert stat.S_IMODE((here.root / "code" / "b.sh").stat().st_mode) == 0o755


def test_the_staging_area_is_outside_the_checkpoints_on_the_same_volume(tmp_path: Path) -> None:
    assert Staging(str(tmp_path)).home("checkpoints/3") == HOME
    assert Staging(str(tmp_path), lasting=True).home("checkpoints/3") == f"checkpoints/{HOME}"
