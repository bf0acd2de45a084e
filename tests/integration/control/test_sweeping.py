"""The blobs of checkpoints that are no longer kept are deleted soon, and no others."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.control import maintenance, trash
from stoker.settings import Home
from stoker.spec.tree import Tree, TreeFile
from stoker.store import Store, home_contents
from stoker.store.rows import (
    AddAttempt,
    AddCheckpoint,
    AttemptRow,
    CheckpointRow,
    NewRun,
    UpdateCheckpoint,
    UpdateRun,
)


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


def test_removed_runs_are_deleted_after_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    blobs = BlobStore(home.blobs)
    monkeypatch.setattr(maintenance, "_FREE_EVERY", 0.01)
    with Store.open(home.database) as store:
        runs = {
            key: _ended(store, blobs, home, key, b"weights of " + key.encode()) for key in ("a", "b", "c")
        }
        _age(home.blobs)
        old = time.time() - trash.TRASH_FOR
        store.remove(runs["a"], now=old - 10, by="")
        store.remove(runs["b"], now=old + 3600, by="")
        sweeper = maintenance.Sweeper(store, blobs, home, set())
        # As a crash leaves it: the rows are deleted, the files are not.
        half = _ended(store, blobs, home, "half", b"half")
        store.remove(half, now=old - 20, by="")
        store.purge(half, old)

        async def until_deleted() -> None:
            sweeping = asyncio.create_task(sweeper.run())
            while any((home.runs / run).exists() for run in (runs["a"], half)):
                await asyncio.sleep(0.01)
            sweeping.cancel()

        asyncio.run(asyncio.wait_for(until_deleted(), 60))
        there = {key: blobs.has_tree(store_tree) for key, store_tree in _TREES.items()}
        assert there == {"a": False, "b": True, "c": True, "half": True}
        assert [(home.runs / runs[key]).exists() for key in ("b", "c")] == [True, True]
        assert store.restore(runs["b"], now=1.0, by="").removed_at is None
        _age(home.blobs)
        assert sweeper.sweep() is not None and not blobs.has_tree(_TREES["half"])


def test_a_blob_that_a_live_run_has_too_outlives_the_trash(tmp_path: Path) -> None:
    home = Home(tmp_path)
    blobs = BlobStore(home.blobs)
    with Store.open(home.database) as store:
        gone, stays = (_ended(store, blobs, home, key, b"the same weights") for key in ("a", "b"))
        store.remove(gone, now=1.0, by="")
        fresh = trash.Trash(store, blobs, home)
        _age(home.blobs)
        assert fresh.empty(math.inf).runs == [gone]
        assert blobs.has_tree(_TREES["b"]) and blobs.verify_tree(_TREES["b"]) == []
        store.remove(stays, now=2.0, by="")
        blobs.touch(_TREES["b"])
        emptied = fresh.empty(math.inf)
        assert (emptied.runs, emptied.later) == ([stays], {_TREES["b"]}), "used a moment ago"


def test_a_home_whose_trash_was_emptied_is_not_lost(tmp_path: Path) -> None:
    """Its ledger and its backups name runs that no list shows any more."""
    home = Home(tmp_path)
    blobs = BlobStore(home.blobs)
    with Store.open(home.database) as store:
        run = _ended(store, blobs, home, "a", b"weights")
        home.ledger.write_text(f'{{"id": "{run}", "name": "a", "t": 1.0}}\n')
        (home.backups / "auto").mkdir(parents=True)
        store.backup(home.backups / "auto" / "stoker-20260101-000000.db")
        store.remove(run, now=1.0, by="")
        assert trash.Trash(store, blobs, home).empty(math.inf).runs == [run]
        assert maintenance.Sweeper(store, blobs, home, set()).look() == []
    with Store.of_home(home, home.database) as store:
        assert store.runs() == [] and not any(store.counts().values())


_TREES: dict[str, str] = {}
"""The tree of the checkpoint of each run, by its key."""


def _ended(store: Store, blobs: BlobStore, home: Home, key: str, content: bytes) -> str:
    """An ended run with a checkpoint and a log."""
    run, _ = store.submit(NewRun(key=key, name="n", job={}, command=["true"]), now=0.0)
    digest, size = blobs.put_stream([content])
    _TREES[key] = blobs.put_tree(Tree.of([TreeFile("last.pt", digest, size, 0o644)]))
    row = CheckpointRow(f"{run.id}-1", run.id, 1, 1, "last.pt", _TREES[key], size, "rename", 0.0)
    store.apply([AddCheckpoint(row), UpdateRun(run.id, {"state": "succeeded"})])
    (home.runs / run.id / "logs").mkdir(parents=True)
    (home.runs / run.id / "logs" / "000000.log").write_bytes(b"line\n")
    return run.id


def _age(directory: Path) -> None:
    for path in directory.rglob("*"):
        os.utime(path, (0, 0))


def _old(blobs: BlobStore, content: bytes) -> str:
    digest, _ = blobs.put_stream([content])
    os.utime(blobs.path(digest), (0, 0))
    return digest
