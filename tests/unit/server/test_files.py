"""What runs left behind, and attempts to get at something else."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from stoker.errors import NotFound
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
def test_paths_that_lead_elsewhere(shared: Any, path: str) -> None:
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
