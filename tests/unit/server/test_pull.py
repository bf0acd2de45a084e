"""`stoker pull` from a real server: many small files, large ones, interrupted transfers and damaged
content."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.blobs import BlobStore, files
from stoker.cli import download
from stoker.cli.context import Context
from stoker.cli.main import dispatch, guarded
from stoker.client import Client
from stoker.spec.tree import Tree, TreeFile
from stoker.store.rows import AddCheckpoint, CheckpointRow, UpdateRun

from .conftest import TOKEN

Pull = Callable[..., tuple[int, str]]


@pytest.fixture
def pull(rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pull:
    """Pulls into `there`: (exit status, output)."""
    monkeypatch.setenv("STOKER_URL", rig.services.url)
    monkeypatch.setenv("STOKER_TOKEN", TOKEN)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)

    def call(run: str, *argv: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        ctx = Context(out, err)
        code = guarded(ctx, lambda: dispatch(ctx, ["pull", run, "-o", "there", *argv]))
        return code, err.getvalue()

    return call


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The requests, by the last word of their route."""
    found: Counter[str] = Counter()
    real = Client._open

    def counting(self: Client, method: str, path: str, *rest: Any) -> Any:
        found[path.partition("?")[0].rpartition("/")[2]] += 1
        return real(self, method, path, *rest)

    monkeypatch.setattr(Client, "_open", counting)
    return found


def tree_of(rig: Any, contents: dict[str, bytes]) -> str:
    entries = [TreeFile(path, *rig.blobs.put_stream([d], durable=False)) for path, d in contents.items()]
    digest: str = rig.blobs.put_tree(Tree.of(entries), durable=False)
    return digest


def with_outputs(rig: Any, contents: dict[str, bytes]) -> str:
    run: str = rig.submit()["id"]
    rig.store.apply([UpdateRun(run, {"outputs": {"digest": tree_of(rig, contents), "files": 0, "bytes": 0}})])
    return run


def many(count: int) -> dict[str, bytes]:
    return {f"d{n % 13}/e{n % 3}/{n:05d}": b"%d" % n for n in range(count)}


def found_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def swap(rig: Any, data: bytes, by: bytes | None) -> None:
    path = rig.blobs.path(hashlib.sha256(data).hexdigest())
    path.chmod(0o600)
    path.write_bytes(by) if by is not None else path.unlink()


def test_two_thousand_small_files_and_a_large_one(
    rig: Any, pull: Pull, requests: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifests: list[str] = []
    tree = BlobStore.tree
    monkeypatch.setattr(BlobStore, "tree", lambda self, name: (manifests.append(name), tree(self, name))[1])
    large = os.urandom(1 << 20) * 50
    contents = {
        **many(2000), "empty": b"", "also/empty": b"", "the/same": b"7", "model ü.bin": large, ".hidden/a\nb": b"!",
    }  # fmt: skip
    run = with_outputs(rig, contents)
    requests.clear()
    code, said = pull(run)
    assert (code, said.split(",")[0]) == (0, "2005 files")
    assert found_in(tmp_path / "there") == contents
    assert requests == {run: 1, "files": 1, "contents": 1, "content": 1}
    assert len(manifests) == 1
    code, said = pull(run)
    assert code == 0 and "(0 B fetched)" in said
    assert requests == {run: 2, "files": 2, "contents": 1, "content": 1}


@pytest.mark.parametrize("old", [False, True])
def test_requests_and_manifests_grow_with_the_files_and_not_with_their_square(
    old: bool, rig: Any, pull: Pull, requests: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`old`: a server without the route for many files."""
    manifests: list[str] = []
    tree = BlobStore.tree
    monkeypatch.setattr(BlobStore, "tree", lambda self, name: (manifests.append(name), tree(self, name))[1])
    monkeypatch.setattr(download, "BATCH_FILES", 10)
    if old:
        real = Client.contents
        monkeypatch.setattr(Client, "contents", lambda self, run, *a, **k: real(self, "no/such", *a, **k))
    for count in (40, 80):
        contents = {f"{count}/{path}": data for path, data in many(count).items()}
        run = with_outputs(rig, contents)
        requests.clear()
        manifests.clear()
        assert pull(run)[0] == 0
        assert (requests["contents"], requests["content"]) == ((1, count) if old else (count // 10, 0))
        assert len(manifests) == 1
        assert {f"{count}/{p}": d for p, d in found_in(tmp_path / f"there/{count}").items()} == contents


def test_a_checkpoint_by_name(rig: Any, pull: Pull, requests: Counter[str], tmp_path: Path) -> None:
    run = rig.submit()["id"]
    for number in (1, 2):
        digest = tree_of(rig, {f"{n}": b"%d of %d" % (n, number) for n in range(70)})
        row = CheckpointRow(f"c{number}", run, 1, 1, f"step-{number}", digest, 7, "sdk", float(number))
        rig.store.apply([AddCheckpoint(row)])
    assert pull(run, "--checkpoint", "step-1")[0] == 0
    assert found_in(tmp_path / "there") == {f"{n}": b"%d of 1" % n for n in range(70)}
    assert requests["contents"] == 1 and requests["content"] == 0


def test_an_answer_that_is_cut_in_its_middle_goes_on(
    rig: Any, pull: Pull, requests: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contents = {f"{n:03d}": os.urandom(5000) for n in range(200)}
    run = with_outputs(rig, contents)
    framed, cuts = BlobStore.framed, iter([0, 100_000, 300_000, 500, 0, 0])

    def cut(self: BlobStore, wanted: Any) -> Iterator[bytes]:
        at = next(cuts, None)
        data = b"".join(framed(self, wanted))
        yield data[:at]
        if at is not None:
            raise OSError("the connection is cut")

    monkeypatch.setattr(BlobStore, "framed", cut)
    code, said = pull(run)
    assert code == 0 and found_in(tmp_path / "there") == contents, said
    assert requests["contents"] == 7


def test_what_has_arrived_stays_when_the_connection_stays_away(
    rig: Any, pull: Pull, requests: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contents = {f"{n:03d}": b"%03d" % n for n in range(100)}
    run = with_outputs(rig, contents)
    framed = BlobStore.framed
    begun: list[int] = []

    def once(self: BlobStore, wanted: Any) -> Iterator[bytes]:
        begun.append(1)
        if len(begun) == 1:
            yield b"".join(framed(self, list(wanted)[:70]))
        raise OSError("the connection is cut")

    with monkeypatch.context() as broken:
        broken.setattr(BlobStore, "framed", once)
        code, said = pull(run)
    assert code == 4 and "cannot be reached" in said
    assert len(begun) == download.TRIES
    assert found_in(tmp_path / "there") == {name: contents[name] for name in list(contents)[:70]}
    code, said = pull(run)
    assert code == 0 and "(90 B fetched)" in said
    assert found_in(tmp_path / "there") == contents


def test_an_interrupted_pull_is_continued(
    rig: Any, pull: Pull, requests: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed before the files of a batch were synced: their parts remain, and only the missing bytes are
    sent."""
    contents = {**many(100), "large": os.urandom(3 << 20)}
    run = with_outputs(rig, contents)
    there = tmp_path / "there"
    with monkeypatch.context() as power:
        power.setattr(files, "sync_file_system", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        assert pull(run)[0] == 130
    assert len(list(there.rglob("*.part"))) == 100 and not (there / "large").exists()
    (there / "large.part").write_bytes(contents["large"][: 2 << 20])
    (there / "d5/e2/00005.part").write_bytes(b"")
    requests.clear()
    code, said = pull(run)
    assert code == 0 and "(1 MiB fetched)" in said, said
    assert (requests["contents"], requests["content"]) == (0, 2)
    assert found_in(there) == contents


def test_damaged_and_missing_contents_do_not_keep_the_others_from_coming(
    rig: Any, pull: Pull, tmp_path: Path
) -> None:
    contents = {**many(100), "large": b"l" * (2 << 20), "zz": b"last"}
    run = with_outputs(rig, contents)
    swap(rig, b"17", b"71")
    swap(rig, b"18", b"181")
    swap(rig, b"19", None)
    swap(rig, contents["large"], b"L" * (2 << 20))
    code, said = pull(run)
    assert code == 1
    assert "4 of 102 files did not arrive: " in said and "; and 1 more" in said
    assert "'d4/e2/00017' arrived damaged: its SHA-256 differs" in said
    assert "'d5/e0/00018' is stored, but damaged" in said
    lost = {"d4/e2/00017", "d5/e0/00018", "d6/e1/00019", "large"}
    assert found_in(tmp_path / "there") == {path: data for path, data in contents.items() if path not in lost}
    for data in (b"17", b"18", b"19", contents["large"]):
        rig.blobs.where(hashlib.sha256(data).hexdigest()).unlink(missing_ok=True)
        rig.blobs.put_stream([data])
    assert pull(run)[0] == 0
    assert found_in(tmp_path / "there") == contents


def test_a_server_that_sends_no_file_is_not_asked_for_all(
    rig: Any, pull: Pull, requests: Counter[str]
) -> None:
    run = with_outputs(rig, {f"{n}": b"%d" % n * (1 << 20) for n in range(100, 130)})
    for n in range(100, 130):
        swap(rig, b"%d" % n * (1 << 20), None)
    code, said = pull(run)
    assert code == 3 and requests["content"] == download.GIVE_UP, said


def test_a_full_disk_is_said_and_what_fits_stays(
    rig: Any, pull: Pull, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contents = {f"{n:03d}": b"%03d" % n for n in range(100)}
    run = with_outputs(rig, contents)
    write = os.write
    left = [80 * 3]

    def full(fd: int, data: Any) -> int:
        if bytes(data).isdigit() and len(data) == 3:
            left[0] -= 3
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        code, said = pull(run)
    assert code == 1 and "no space left for 'there/080'" in said and "it continues" in said
    placed = {path: data for path, data in found_in(tmp_path / "there").items() if path in contents}
    assert placed == {name: contents[name] for name in list(contents)[:80]}
    assert pull(run)[0] == 0
    assert found_in(tmp_path / "there") == contents


def test_names_that_look_like_parts(rig: Any, pull: Pull, tmp_path: Path) -> None:
    """A partial file never has the name of another file, and a name may have the maximum length."""
    contents = {
        "w": b"w" * (2 << 20), "w.part": b"small", "w.part~": b"tiny", "w.part.part": b"p" * (3 << 20),
        "s": b"1", "s.part": b"2", "n" * 255: b"3", "ö" * 127: b"4" * (2 << 20), "W": b"5",
    }  # fmt: skip
    run = with_outputs(rig, contents)
    there = tmp_path / "there"
    assert pull(run)[0] == 0
    assert found_in(there) == contents
    (there / "w").unlink()
    assert pull(run)[0] == 0
    assert found_in(there) == contents


def test_a_link_in_the_place_of_a_part_is_not_followed(rig: Any, pull: Pull, tmp_path: Path) -> None:
    contents = {**many(70), "large": b"l" * (2 << 20)}
    run = with_outputs(rig, contents)
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    for name in ("d0/e0/00000", "large"):
        part = tmp_path / "there" / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.symlink_to(outside)
        code, said = pull(run)
        assert code == 1 and "cannot write" in said
        assert outside.read_bytes() == b""
        part.unlink()
    assert pull(run)[0] == 0
    assert found_in(tmp_path / "there") == contents


@pytest.mark.parametrize(
    "answer",
    [
        [("0" * 64, b"not asked for")],
        [],
        "other",
        "twice",
    ],
)
def test_a_server_that_sends_something_else(
    answer: Any, rig: Any, pull: Pull, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contents = {"a": b"one", "b": b"two"}
    run = with_outputs(rig, contents)
    a, b = (hashlib.sha256(data).hexdigest() for data in contents.values())
    sent = {"other": [(a, b"two"), (b, b"one")], "twice": [(a, b"one"), (a, b"one"), (b, b"two")]}
    given = answer if isinstance(answer, list) else sent[answer]

    def contents_of(self: Client, *args: Any, **named: Any) -> Iterator[Any]:
        yield from given

    monkeypatch.setattr(Client, "contents", contents_of)
    code, said = pull(run)
    assert code == 1 and said.startswith("error: ")
    assert found_in(tmp_path / "there") == ({"a": b"one"} if answer == "twice" else {})


def test_a_file_in_the_place_of_a_directory(rig: Any, pull: Pull, tmp_path: Path) -> None:
    run = with_outputs(rig, {"a/b": b"1", "a/c": b"2", "d": b"3"})
    (tmp_path / "there").mkdir()
    (tmp_path / "there/a").write_bytes(b"mine")
    code, said = pull(run)
    assert code == 1 and "cannot write 'there/a/b'" in said
    assert found_in(tmp_path / "there") == {"a": b"mine"}
