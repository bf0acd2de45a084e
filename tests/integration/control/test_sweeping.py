"""The blobs of checkpoints that are no longer kept are deleted soon, and no others."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.control import maintenance
from stoker.settings import Home
from stoker.spec.tree import Tree, TreeFile
from stoker.store import Store, home_contents
from stoker.store.rows import AddAttempt, AddCheckpoint, AttemptRow, CheckpointRow, NewRun, UpdateCheckpoint


def test_what_retention_dropped_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "stoker.db")
    blobs = BlobStore(tmp_path / "blobs")
    run, _ = store.submit(NewRun(key="k", name="n", job={}, command=["true"]), now=0.0)
    trees = []
    store.apply([AddAttempt(AttemptRow(run.id, 1))])
    for number in range(3):
        digest, size = blobs.put_stream([b"weights %d" % number])
        tree = blobs.put_tree(Tree.of([TreeFile("last.pt", digest, size, 0o644)]))
        row = CheckpointRow(f"ck-{number}", run.id, 1, 1, "last.pt", tree, size, "rename", 0.0)
        store.apply([AddCheckpoint(row)])
        trees.append((tree, digest))
    for path in (tmp_path / "blobs").rglob("*"):
        os.utime(path, (0, 0))
    store.apply([UpdateCheckpoint("ck-0", {"kept": False})])
    monkeypatch.setattr(maintenance, "_FREE_EVERY", 0.01)
    # The second is in the list although the store keeps it: the store decides.
    sweeper = maintenance.Sweeper(store, blobs, Home(tmp_path), {trees[0][0], trees[1][0]})

    async def until_freed() -> None:
        sweeping = asyncio.create_task(sweeper.run())
        while blobs.has(trees[0][1]):
            await asyncio.sleep(0.01)
        sweeping.cancel()

    asyncio.run(asyncio.wait_for(until_freed(), 60))
    assert [blobs.has(digest) for _, digest in trees] == [False, True, True]
    store.close()


def test_nothing_is_swept_that_a_lost_run_may_need(tmp_path: Path) -> None:
    home = Home(tmp_path)
    blobs = BlobStore(home.blobs)
    with Store.open(home.database) as store:
        store.submit(NewRun(key="known", name="known", job={}, command=["true"]), now=0.0)
        weights = _old(blobs, b"weights of the lost run")
        home.ledger.write_text('{"id": "lost-1", "name": "lost", "t": 1.0}\n{"torn')
        (home.tasks / "older-1").mkdir(parents=True)  # its line in the ledger is the torn one
        sweeper = maintenance.Sweeper(store, blobs, home, set())
        assert sweeper.sweep() is None and blobs.has(weights)
        assert [entry["id"] for entry in sweeper.unknown] == ["older-1", "lost-1"]
        home.ledger.write_text('{"id": "lost-1", "name": "lost", "t": 1.0}\n')
        home_contents.forget(home, ["older-1"], 2.0)
        assert sweeper.sweep() is None and blobs.has(weights)
        home_contents.forget(home, ["lost-1"], 2.0)
        freed = sweeper.sweep()
        assert freed is not None and freed.blobs == 1 and not blobs.has(weights)


def test_a_database_without_runs_sweeps_nothing(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    weights = _old(blobs, b"weights")
    with Store.open(tmp_path / "stoker.db") as store:
        assert maintenance.Sweeper(store, blobs, Home(tmp_path), set()).sweep() is None and blobs.has(weights)


def _old(blobs: BlobStore, content: bytes) -> str:
    digest, _ = blobs.put_stream([content])
    os.utime(blobs.path(digest), (0, 0))
    return digest
