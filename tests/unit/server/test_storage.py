"""Removed runs, sizes and the use of the disk over HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stoker.errors import Conflict, NotFound, StokerError
from stoker.spec.tree import Tree, TreeFile
from stoker.store.rows import AddCheckpoint, AddMetrics, CheckpointRow, Point, UpdateRun

WEEK = 7 * 86400.0


def with_checkpoint(rig: Any, content: bytes) -> str:
    """An ended run with a stored checkpoint of this content, and a log."""
    run = str(rig.submit()["id"])
    digest, size = rig.blobs.put_stream([content])
    tree = rig.blobs.put_tree(Tree.of([TreeFile("last.pt", digest, size, 0o644)]))
    row = CheckpointRow(f"{run}-1", run, 1, 1, "last.pt", tree, size, "rename", 0.0)
    rig.store.apply([AddCheckpoint(row), AddMetrics(run, 1, [Point("loss", 1, 0.5, 1.0)])])
    rig.log(run, "x" * 9000)
    rig.end(run)
    return run


def test_a_removed_run_is_answered_by_no_route_until_it_is_restored(
    rig: Any, refused: Callable[..., StokerError]
) -> None:
    live = rig.submit("live")["id"]
    run = with_checkpoint(rig, b"x" * 5000)
    before = rig.client.run(run)
    error = refused(rig.client.remove, live)
    assert isinstance(error, Conflict) and f"stoker stop {live}" in (error.hint or "")
    answer = rig.client.remove(run)
    assert set(answer) == {"id", "name", "state", "removed_at", "until", "bytes"}
    assert answer["until"] == answer["removed_at"] + WEEK
    logs = answer["bytes"]["logs"]
    assert logs >= 9000
    stored = {"checkpoints": 5000, "outputs": 0, "folder": 0, "logs": logs, "total": 5000 + logs}
    assert answer["bytes"] == stored
    for ask in (rig.client.run, rig.client.remove, rig.client.events, rig.client.metrics, rig.client.stop):
        error = refused(ask, run)
        assert isinstance(error, NotFound) and f"stoker rm --undo {run}" in (error.hint or "")
    assert [one["id"] for one in rig.client.runs()["runs"]] == [live]
    (listed,) = rig.client.runs(trash=True)["runs"]
    assert (listed["id"], listed["until"]) == (run, answer["until"])
    assert rig.client.server()["counts"]["succeeded"] == 0
    assert rig.client.sizes([run, "nobody"], metric="loss")["runs"] == {run: {"bytes": stored, "metric": 0.5}}
    assert rig.client.restore(run)["id"] == run
    assert rig.client.run(run) == before and "removed_at" not in before
    assert rig.client.runs(trash=True)["runs"] == []


def test_what_takes_the_room(rig: Any) -> None:
    """What two runs share counts once; what only removed runs have is in the trash."""
    kept, same = with_checkpoint(rig, b"x" * 5000), with_checkpoint(rig, b"x" * 5000)
    removed = with_checkpoint(rig, b"y" * 7000)
    rig.blobs.put_stream([b"z" * 600])
    folder = {"files": 1, "bytes": 10, "digest": "0" * 64}
    rig.store.apply([UpdateRun(kept, {"folder": folder})])  # its tree is missing
    (rig.home.setups / "env").mkdir(parents=True)
    (rig.home.setups / "env" / "lib").write_bytes(os.urandom(20000))
    rig.client.remove(removed)
    found = rig.client.disk()
    kinds = found["kinds"]
    manifest = 300
    assert 5000 < kinds["checkpoints"] < 5000 + manifest
    assert kinds["folder"] == kinds["outputs"] == kinds["code"] == 0
    assert kinds["rest"] >= 600
    logs = rig.client.sizes([kept, removed])["runs"]
    assert kinds["trash"] > 7000 + logs[removed]["bytes"]["logs"]
    assert kinds["trash"] < 7000 + logs[removed]["bytes"]["logs"] + manifest
    assert kinds["logs"] >= 2 * logs[kept]["bytes"]["logs"]
    assert kinds["setups"] >= 20000 and kinds["database"] > 0
    assert found["total"] == sum(kinds.values()) and found["free"] > 0 and found["removed"] == 1
    assert {run["id"] for run in found["runs"]} == {kept, same}
    assert found["runs"][0]["id"] == kept and found["runs"][0]["bytes"]["folder"] == 10
