"""Upload of code: only valid content is kept, and only missing content is sent."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from stoker.client import ship
from stoker.client.tree import Changed, Scan, scan
from stoker.errors import BlobDamaged, Conflict, SpecError, TooLarge
from stoker.spec.folder_extras import FolderExtras
from stoker.spec.tree import Tree, TreeFile
from support.blobs import place, stored

OCTETS = {"Content-Type": "application/octet-stream"}


def framed(*contents: bytes) -> bytes:
    return b"".join(b"%s %d\n%s" % (hashlib.sha256(c).hexdigest().encode(), len(c), c) for c in contents)


def test_blobs_in_any_pieces(rig: Any) -> None:
    contents = [b"", b"one\n", os.urandom(3_000_000), b"two"]
    body = framed(*contents)
    for step in (1 << 20, 100_000, len(body)):
        pieces = [body[at : at + step] for at in range(0, len(body), step)]
        assert rig.client.code_blobs(pieces) == {"stored": 4}
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    assert rig.client.code_missing([*digests, "0" * 64]) == {"missing": ["0" * 64]}


@pytest.mark.parametrize(
    "body",
    [
        b"junk",
        b"junk\n",
        b"x" * 10_000,
        b"0" * 64 + b" 3\nabc",
        b"0" * 64 + b" -3\n",
        b"0" * 64 + b" 99999999999999999999\n",
        b"../" + b"0" * 61 + b" 3\nabc",
        framed(b"abc")[:-1],
        framed(b"abc") + b"0",
    ],
)
def test_invalid_uploads(shared: Any, body: bytes) -> None:
    status, _, answer = shared.raw("POST", "/api/v1/code/blobs", OCTETS, body)
    assert status in (413, 422) and "error" in json.loads(answer)
    assert list((shared.blobs.root / "tmp").iterdir()) == [] if (shared.blobs.root / "tmp").exists() else True


def test_blobs_before_a_bad_one_are_kept(rig: Any) -> None:
    good, bad = framed(b"good"), b"0" * 64 + b" 3\nbad"
    with pytest.raises(BlobDamaged):
        rig.client.code_blobs([good + bad])
    assert rig.blobs.has(hashlib.sha256(b"good").hexdigest()) and stored(rig.blobs) == 1


def test_an_upload_cut_short_leaves_no_blob(rig: Any) -> None:
    with socket.create_connection(("127.0.0.1", rig.port), 10) as sock:
        head = f"POST /api/v1/code/blobs HTTP/1.1\r\nHost: 127.0.0.1:{rig.port}\r\nAuthorization: Bearer {rig.client._token}\r\n"
        sock.sendall(
            f"{head}Content-Length: 5000000\r\n\r\n".encode() + b"0" * 64 + b" 4000000\n" + b"x" * 1_000_000
        )
    assert rig.client.health()["status"] == "ok"
    assert stored(rig.blobs) == 0


def test_trees(rig: Any) -> None:
    tree = Tree((TreeFile("a.py", hashlib.sha256(b"a").hexdigest(), 1),))
    with pytest.raises(Conflict) as caught:
        rig.client.code_tree(tree.canonical())
    assert caught.value.details["missing"] == [tree.files[0].sha256]
    rig.client.code_blobs([framed(b"a")])
    assert rig.client.code_tree(tree.canonical()) == {"digest": tree.digest()}
    lying = Tree((TreeFile("a.py", hashlib.sha256(b"a").hexdigest(), 2),))
    with pytest.raises(SpecError, match="bytes"):
        rig.client.code_tree(lying.canonical())


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[" * 100_000,
        b"{}",
        b'{"files": [{"path": "../a", "link": "b"}]}',
        b'{"files": [{"path": "a", "link": "/etc"}]}',
        b'{"files": [{"path": "a", "link": "b"}, {"path": "a/b", "link": "c"}]}',
        b'{"files": [{"path": "b", "link": "c"}, {"path": "a", "link": "c"}]}',
    ],
)
def test_invalid_trees(shared: Any, manifest: bytes) -> None:
    with pytest.raises(SpecError):
        shared.client.code_tree(manifest)


def test_caps(rig: Any) -> None:
    huge = Tree(tuple(TreeFile(f"{n:07d}", link="x") for n in range(200_001)))
    with pytest.raises(TooLarge):
        rig.client.code_tree(huge.canonical())
    with pytest.raises(SpecError):
        rig.client.code_missing(["0" * 64] * 20_001)
    with pytest.raises(SpecError):
        rig.client.code_missing(["../../etc/passwd"])


def test_shipping_sends_only_what_is_missing(rig: Any, tmp_path: Path) -> None:
    work, cache = tmp_path / "work", tmp_path / "h" / "cache"
    (work / "pkg").mkdir(parents=True)
    (work / "train.py").write_text("print()")
    (work / "pkg" / "data.bin").write_bytes(os.urandom(2_000_000))
    told: list[tuple[int, int]] = []
    digest = ship.ship(rig.client, work, cache, lambda sent, total: told.append((sent, total)))
    assert told[-1] == (2_000_007, 2_000_007)
    place(rig.blobs, digest, tmp_path / "placed")
    assert (tmp_path / "placed" / "pkg" / "data.bin").read_bytes() == (work / "pkg" / "data.bin").read_bytes()
    (work / "train.py").write_text("print(2)")
    told.clear()
    assert ship.ship(rig.client, work, cache, lambda sent, total: told.append((sent, total))) != digest
    assert told == [(8, 8)]


def test_submitting_uploads_only_when_it_must(rig: Any, tmp_path: Path) -> None:
    work, cache = tmp_path / "work", tmp_path / "h" / "cache"
    work.mkdir()
    (work / "train.py").write_text("print()")
    sent: list[str] = []

    def submit() -> dict[str, Any]:
        def send(digest: str, extras: FolderExtras) -> dict[str, Any]:
            sent.append(digest)
            return rig.client.submit(key=f"k{len(sent)}", job={"name": "x"}, code=digest)

        return ship.submit_with_code(rig.client, work, cache, send)

    first = submit()
    assert len(sent) == 2, "refused once, uploaded, sent again"
    assert submit()["code"] == first["code"] and len(sent) == 3


def test_a_file_that_changes_while_it_is_sent_is_scanned_again(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, cache = tmp_path / "work", tmp_path / "h" / "cache"
    work.mkdir()
    (work / "a.py").write_text("old")
    asked = rig.client.code_missing

    def edit_meanwhile(digests: list[str]) -> Any:
        monkeypatch.undo()
        (work / "a.py").write_text("newer")
        return asked(digests)

    monkeypatch.setattr(rig.client, "code_missing", edit_meanwhile)
    digest = ship.ship(rig.client, work, cache)
    place(rig.blobs, digest, tmp_path / "placed")
    assert (tmp_path / "placed" / "a.py").read_text() == "newer"


def test_a_file_changed_without_its_times(rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client cannot detect this change; the server refuses the wrong bytes, and the client scans
    again."""
    work, cache = tmp_path / "work", tmp_path / "h" / "cache"
    work.mkdir()
    (work / "a.py").write_text("old")
    seen = scan(work, cache)
    (work / "a.py").write_text("new")
    monkeypatch.setattr(Scan, "same", lambda self, sha256, fd: True)
    with pytest.raises(Changed):
        ship.upload(rig.client, seen)
    assert stored(rig.blobs) == 0
