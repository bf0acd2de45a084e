"""What takes the room in a home: by kind, and by run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from stoker import disks
from stoker.blobs import BlobStore
from stoker.errors import NotFound
from stoker.settings import Home
from stoker.store import Store
from stoker.store.rows import RunFilter, RunSize

Json = dict[str, Any]

LARGEST = 10
"""How many runs are named."""
_PAGE = 1000


def sizes(store: Store, home: Home, run_ids: Sequence[str]) -> dict[str, Json]:
    """By run: `checkpoints`, `outputs`, `folder`, `logs` and their `total`, in bytes. Content that several runs share
    counts for each of them, so less may become free."""
    return {size.run: _view(size, home) for size in store.sizes(run_ids)}


def report(store: Store, blobs: BlobStore, home: Home) -> Json:
    """Every kind in bytes of the disk; what several kinds share counts for the first. The largest runs, as `sizes` shows
    them, with their task directories."""
    roots = store.roots()
    trees = {
        "checkpoints": roots.checkpoints,
        "outputs": roots.outputs,
        "folder": roots.folder,
        "code": roots.code,
        "trash": roots.trash,
    }
    kinds: Json = blobs.usage(trees)
    kinds["rest"] += disks.used(home.blobs / "tmp")
    removed = _trash(store)
    logs_in_trash = sum(disks.used(home.runs / run) for run in removed)
    kinds["trash"] += logs_in_trash
    seen: set[tuple[int, int]] = set()
    kinds["logs"] = max(0, disks.used(home.runs) - logs_in_trash)
    files = [path for path in home.root.glob(f"{home.database.name}*") if path.is_file()]
    kinds["database"] = sum(disks.used(path) for path in files) if store.kind == "sqlite" else None
    for kind, path in (("tasks", home.tasks), ("setups", home.setups), ("backups", home.backups)):
        kinds[kind] = disks.used(path, seen)
    others = [home.mirrors, home.cache, home.engine, home.ledger, *home.root.glob("server*.log")]
    kinds["other"] = sum(disks.used(path, seen) for path in others)
    return {
        "home": str(home.root),
        "kinds": kinds,
        "total": sum(size for size in kinds.values() if size is not None),
        "free": disks.free(home.root),
        "removed": len(removed),
        "runs": _largest(store, home),
    }


def _largest(store: Store, home: Home) -> list[Json]:
    views = ((size.run, _view(size, home, tasks=True)) for size in store.sizes())
    found = []
    for run_id, view in heapq.nlargest(LARGEST, views, key=lambda one: int(one[1]["total"])):
        try:
            run = store.run(run_id)
        except NotFound:
            continue
        found.append({"id": run.id, "name": run.name, "state": run.state, "bytes": view})
    return found


def _view(size: RunSize, home: Home, *, tasks: bool = False) -> Json:
    view = {
        "checkpoints": size.checkpoints,
        "outputs": size.outputs,
        "folder": size.folder,
        "logs": disks.used(home.runs / size.run),
    }
    if tasks:
        view["tasks"] = disks.used(home.tasks / size.run)
    return {**view, "total": sum(view.values())}


def _trash(store: Store) -> list[str]:
    found: list[str] = []
    before: int | None = None
    while rows := store.runs(RunFilter(trash=True, before=before, limit=_PAGE), records=False):
        found += [row.id for row in rows]
        before = rows[-1].seq
    return found
