"""Checkpoints that are not kept any more give their bytes back soon, and only theirs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.control import chores
from stoker.spec.tree import Tree, TreeFile
from stoker.store import Store
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
    monkeypatch.setattr(chores, "_FREE_EVERY", 0.01)
    sweeper = chores.Sweeper(store, blobs)
    # The second is in the list although the store keeps it: the store decides.
    sweeper.dropped.update({trees[0][0], trees[1][0]})

    async def until_freed() -> None:
        sweeping = asyncio.create_task(sweeper.run())
        while blobs.has(trees[0][1]):
            await asyncio.sleep(0.01)
        sweeping.cancel()

    asyncio.run(asyncio.wait_for(until_freed(), 60))
    assert [blobs.has(digest) for _, digest in trees] == [False, True, True]
    store.close()
