"""Files of runs, and attempts to read other files."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from stoker.blobs import BlobStore
from stoker.errors import NotFound, ServerUnreachable, SpecError, TooLarge
from stoker.server.routes import files as routes
from stoker.server.routes.files import byte_range, disposition
from stoker.spec.tree import Tree, TreeFile
from stoker.store.rows import AddCheckpoint, CheckpointRow, UpdateRun

NASTY = 'a"; evil=1\r\nSet-Cookie: x\n.html'


def with_outputs(rig: Any, files: dict[str, bytes]) -> str:
    run: str = rig.submit()["id"]
    digest = rig.blobs.put_tree(Tree.of([TreeFile(p, *rig.blobs.put_stream([d])) for p, d in files.items()]))
    outputs = {"digest": digest, "files": len(files), "bytes": 0}
    rig.store.apply([UpdateRun(run, {"outputs": outputs})])
    return run


def test_listing_and_getting(rig: Any) -> None:
    big = bytes(range(256)) * 20_000
    run = with_outputs(rig, {"model.bin": big, "plots/loss ü.png": b"png", "empty": b""})
    listed = rig.client.files(run)["files"]
    assert [(file["path"], file["size"]) for file in listed] == [
        ("empty", 0),
        ("model.bin", len(big)),
        ("plots/loss ü.png", 3),
    ]
    assert b"".join(rig.client.content(run, "model.bin")) == big
    assert b"".join(rig.client.content(run, "model.bin", offset=len(big) - 5)) == big[-5:]
    assert b"".join(rig.client.content(run, "plots/loss ü.png")) == b"png"
    assert b"".join(rig.client.content(run, "empty")) == b""
    assert rig.client.files(rig.submit()["id"])["files"] == []


def test_ranges(rig: Any) -> None:
    run = with_outputs(rig, {"f": b"0123456789"})
    path = f"/api/v1/runs/{run}/files/content?path=f"
    for given, status, content, sent in [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=2-999", 206, b"23456789", "bytes 2-9/10"),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
    ]:
        answer = rig.raw("GET", path, {"Range": given})
        assert (answer[0], answer[2], answer[1].get("content-range")) == (status, content, sent), given
    for given in ("bytes=10-", "bytes=5-2", "bytes=-0", "bytes=99999-"):
        answer = rig.raw("GET", path, {"Range": given})
        assert (answer[0], answer[1]["content-range"]) == (416, "bytes */10")
    assert byte_range(None, 0) == (0, 0, False)


@pytest.mark.parametrize(
    "path",
    [
        "../../token",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/../f",
        "f/",
        "f\0",
        "%2e%2e/token",
        "..%2f..%2ftoken",
        "f/.",
        "x" * 5000,
        "\\..\\f",
    ],
)
def test_paths_that_lead_outside(shared: Any, path: str) -> None:
    run = with_outputs(shared, {"f": b"data"})
    for what in ("outputs", "logs"):
        status, _, body = shared.raw(
            "GET", f"/api/v1/runs/{run}/files/content?what={what}&path={quote(path, safe='')}"
        )
        assert status in (400, 404, 422), (path, body)
        assert shared.raw(
            "GET", f"/api/v1/runs/{run}/files/content?what={what}&path={quote(path, safe='%/')}"
        )[0] in (400, 404, 422)


def test_names_cannot_add_headers(rig: Any) -> None:
    run = with_outputs(rig, {NASTY: b"<script>alert(1)</script>", "x.svg": b"<svg/>"})
    status, sent, _ = rig.raw("GET", f"/api/v1/runs/{run}/files/content?path={quote(NASTY)}")
    assert status == 200 and "set-cookie" not in sent and "evil" not in {part.strip() for part in sent}
    assert sent["content-disposition"] == disposition(NASTY)
    assert "\n" not in disposition(NASTY) and '"' not in disposition(NASTY)
    _, sent, _ = rig.raw("GET", f"/api/v1/runs/{run}/files/content?path=x.svg")
    assert sent["content-type"] == "application/octet-stream" and sent["content-disposition"].startswith(
        "attachment"
    )


def test_checkpoints_belong_to_their_run(rig: Any) -> None:
    mine, other = rig.submit()["id"], rig.submit()["id"]
    digest = rig.blobs.put_tree(Tree((TreeFile("step-1/m.pt", *rig.blobs.put_stream([b"weights"])),)))
    rows = [
        CheckpointRow("c1", mine, 1, 1, "step-1", digest, 7, "sdk", 1.0),
        CheckpointRow("c0", mine, 1, 1, "step-0", "1" * 64, 7, "sdk", 0.5, kept=False),
    ]
    rig.store.apply([AddCheckpoint(row) for row in rows])
    for chosen in (None, "c1"):
        files = rig.client.files(mine, what="checkpoints", checkpoint=chosen)["files"]
        assert [file["path"] for file in files] == ["step-1/m.pt"]
    assert b"".join(rig.client.content(mine, "step-1/m.pt", what="checkpoints")) == b"weights"
    for run, checkpoint in ((other, "c1"), (other, None), (mine, "c0"), (mine, digest), (mine, "nothing")):
        with pytest.raises(NotFound):
            rig.client.files(run, what="checkpoints", checkpoint=checkpoint)


def test_logs_as_files(rig: Any) -> None:
    run = rig.submit()["id"]
    rig.log(run, "hello")
    (file,) = rig.client.files(run, what="logs")["files"]
    assert b"hello" in b"".join(rig.client.content(run, file["path"], what="logs"))


def test_a_damaged_blob_is_not_sent_as_if_it_were_whole(rig: Any) -> None:
    run = with_outputs(rig, {"f": b"0123456789"})
    path = rig.blobs.path(rig.client.files(run)["files"][0]["sha256"])
    path.chmod(0o600)
    path.write_bytes(b"0123")
    status, _, body = rig.raw("GET", f"/api/v1/runs/{run}/files/content?path=f")
    assert status == 500 and json.loads(body)["error"]["code"] == "blob-damaged"
    path.unlink()
    assert rig.raw("GET", f"/api/v1/runs/{run}/files/content?path=f")[0] == 404


# -- many files ------------------------------------------------------------------------------------------------


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def damage(rig: Any, data: bytes, by: bytes | None) -> None:
    """Replace the bytes of a blob; None removes it."""
    path = rig.blobs.path(sha(data))
    path.chmod(0o600)
    if by is None:
        path.unlink()
    else:
        path.write_bytes(by)


def test_many_files_in_one_answer(rig: Any) -> None:
    files = {
        "a": b"first",
        "b/c": os.urandom(700_000),
        "d": b"",
        "e": b"first",
        "f\n": b"1\n2\n",
        "g": b"gone",
    }
    run = with_outputs(rig, files)
    other = with_outputs(rig, {"secret": b"of another run"})
    damage(rig, b"gone", None)
    wanted = [*map(sha, files.values()), sha(b"of another run"), "0" * 64]
    got = list(rig.client.contents(run, wanted))
    assert got == [
        *((sha(data), data) for data in dict.fromkeys(files.values()) if data != b"gone"),
        *((digest, "missing") for digest in (sha(b"gone"), sha(b"of another run"), "0" * 64)),
    ]
    assert list(rig.client.contents(other, wanted[-2:-1])) == [(wanted[-2], b"of another run")]
    assert list(rig.client.contents(run, [])) == []
    assert list(rig.client.contents(run, wanted[:1], what="logs")) == [(wanted[0], "missing")]
    with pytest.raises(NotFound):
        list(rig.client.contents(run, wanted[:1], what="checkpoints"))


def test_a_blob_of_another_size_is_reported_and_the_others_are_sent(rig: Any) -> None:
    run = with_outputs(rig, {"a": b"0123", "b": b"4567", "c": b"89"})
    damage(rig, b"4567", b"45")
    got = list(rig.client.contents(run, [sha(b"0123"), sha(b"4567"), sha(b"89")]))
    assert got == [(sha(b"0123"), b"0123"), (sha(b"4567"), "damaged"), (sha(b"89"), b"89")]


def test_an_answer_that_breaks_off_is_an_error(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_outputs(rig, {"a": b"0123", "b": b"4567"})
    framed = BlobStore.framed

    def breaks(self: BlobStore, wanted: Any) -> Iterator[bytes]:
        yield b"".join(framed(self, wanted))[:-1]
        raise OSError("the disk is gone")

    monkeypatch.setattr(BlobStore, "framed", breaks)
    got = []
    with pytest.raises(ServerUnreachable):
        got.extend(rig.client.contents(run, [sha(b"0123"), sha(b"4567")]))


def test_one_answer_is_bounded(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_outputs(rig, {"a": b"0123", "b": b"4567"})
    digests = [sha(b"0123"), sha(b"4567")]
    monkeypatch.setattr(routes, "CONTENTS_BYTES", 7)
    assert list(rig.client.contents(run, digests[:1] * 9)) == [(digests[0], b"0123")]
    with pytest.raises(TooLarge):
        list(rig.client.contents(run, digests))
    for wrong in (["0" * 64] * 20_001, ["../../token"], ["A" * 64]):
        with pytest.raises(SpecError):
            list(rig.client.contents(run, wrong))


def test_the_manifest_is_read_once_for_any_number_of_files(rig: Any, reads: list[str]) -> None:
    files = {f"d{n % 7}/{n}": b"%d" % n for n in range(60)}
    run = with_outputs(rig, files)
    assert len(rig.client.files(run)["files"]) == 60
    for path, data in files.items():
        assert b"".join(rig.client.content(run, path)) == data
    for data in files.values():
        assert list(rig.client.contents(run, [sha(data)])) == [(sha(data), data)]
    assert len(reads) == 1


def test_a_listing_is_dropped_with_its_tree(rig: Any, reads: list[str]) -> None:
    run = with_outputs(rig, {"f": b"data"})
    rig.client.files(run)
    digest = reads[0]
    (rig.blobs.root / "trees" / digest[:2] / digest[2:]).unlink()
    for call in (rig.client.files, lambda run: list(rig.client.content(run, "f"))):
        with pytest.raises(NotFound, match="no tree"):
            call(run)
    rig.blobs.put_tree(Tree((TreeFile("f", sha(b"data"), 4),)))
    assert len(rig.client.files(run)["files"]) == 1


def test_a_log_is_found_without_listing_all_of_them(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rig.submit()["id"]
    for task in range(20):
        rig.log(run, f"hello {task}", task=f"worker-{task}")
    listed = [file["path"] for file in rig.client.files(run, what="logs")["files"]]
    assert len(listed) == 20
    seen: list[Any] = []
    real: Callable[..., Any] = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (seen.append(path), real(path))[1])
    for path in listed:
        assert b"hello" in b"".join(rig.client.content(run, path, what="logs"))
    assert len(seen) == 3 * 20
    for wrong in (
        "1/worker-0",
        "1/worker-0/dropped",
        "2/worker-0/000001.log",
        "1/worker-0/000002.log",
        "a/b/c",
    ):
        with pytest.raises(NotFound):
            list(rig.client.content(run, wrong, what="logs"))


def test_simultaneous_requests_share_one_read(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_outputs(rig, {"f": b"data"})
    count, go = [0], threading.Event()
    tree = BlobStore.tree

    def slow(self: BlobStore, digest: str) -> Tree:
        count[0] += 1
        go.wait(30)
        return tree(self, digest)

    monkeypatch.setattr(BlobStore, "tree", slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(rig.client.files(run))) for _ in range(5)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 5 and count == [1]
