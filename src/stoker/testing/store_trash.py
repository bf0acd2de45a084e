"""The part of the store suite about removed runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stoker.errors import Conflict, NotFound
from stoker.store import Store
from stoker.store.rows import (
    AddAttempt,
    AddCheckpoint,
    AddEvent,
    AddMetrics,
    AttemptRow,
    EventRow,
    MoveCursor,
    Point,
    PutPart,
    PutTask,
    PutTransfer,
    RunFilter,
    RunRow,
    RunSize,
    TaskRow,
    TransferRow,
    UpdateRun,
)
from stoker.store.schema import metadata
from stoker.testing.store_case import StoreCase, checkpoint, new_run, part

BY_STATE = RunFilter(states=("succeeded", "failed"))


def ended(store: Store, key: str, **changes: Any) -> RunRow:
    """An ended run with a row in every table."""
    new = new_run(key, code=f"code-{key}", tags=("a",), record={"host": "h"}, **changes)
    run, _ = store.submit(new, now=1.0)
    transfer = TransferRow(run.id, 1, 1, "worker-0", 3, 0, 10, "last.pt", 5, "rename", 5.0)
    store.apply(
        [
            AddAttempt(AttemptRow(run.id, 1, state="ended", removed=True)),
            PutTask(TaskRow(run.id, 1, "worker-0", phase="ended")),
            AddCheckpoint(checkpoint(run, 1, digest=f"tree-{key}", size=3 << 40)),
            AddCheckpoint(checkpoint(run, 2, digest=f"tree2-{key}", size=4 << 40)),
            AddCheckpoint(checkpoint(run, 3, kept=False)),
            PutPart(part(run, "worker-1", 4, digest=f"part-{key}")),
            PutTransfer(transfer),
            AddEvent(EventRow(run.id, 2.0, "ended", "ended")),
            AddMetrics(run.id, 1, [Point("loss", 1, 0.5, 1.0), Point("loss", 2, 0.25, 1.0)]),
            MoveCursor(run.id, 1, "worker-0", "metrics/1.jsonl", 42),
            UpdateRun(
                run.id,
                {
                    "state": "failed",
                    "attempt": 1,
                    "ended_at": 9.0,
                    "outputs": {"files": 1, "bytes": 10, "digest": f"out-{key}"},
                    "folder": {"files": 2, "bytes": 20, "digest": f"folder-{key}"},
                },
            ),
        ]
    )
    store.resume(run.id, key=f"again-{key}", now=3.0)
    store.apply([UpdateRun(run.id, {"state": "succeeded"})])
    return store.run(run.id)


def trees(key: str) -> set[str]:
    return {f"{kind}-{key}" for kind in ("code", "tree", "tree2", "part", "out", "folder")}


def rows_by_table(store: Store, run: RunRow) -> dict[str, int]:
    """How many rows of each table refer to the run."""

    def count(connection: Any) -> dict[str, int]:
        found = {}
        for table in metadata.sorted_tables:
            column = table.c.get("run", table.c.get("run_seq"))
            if column is not None:
                wanted = run.seq if column.name == "run_seq" else run.id
                found[table.name] = len(connection.execute(table.select().where(column == wanted)).all())
        return found

    return store._database.read(count)


class TrashTests(StoreCase):
    """Removing, restoring, purging."""

    def test_a_removed_run_is_in_no_list_and_comes_back_as_it_was(self, store: Store) -> None:
        old, run, other = ended(store, "1"), ended(store, "2"), ended(store, "3", name="mnist")
        before = rows_by_table(store, run)
        assert all(before.values()), before
        assert store.remove(run.id, now=50.0, by="ada").removed_at == 50.0
        assert store.remove(run.id, now=60.0, by="ada").removed_at == 50.0
        lists = (RunFilter(), BY_STATE, RunFilter(tags=("a",)), RunFilter(tags=("a",), states=("succeeded",)))
        for wanted in lists:
            assert [row.id for row in store.runs(wanted)] == [other.id, old.id], wanted
        assert [row.id for row in store.runs(RunFilter(name="digits"))] == [old.id]
        assert store.counts()["succeeded"] == 2 and store.total() == 3
        assert store.resolve("digits").id == old.id
        with pytest.raises(NotFound, match="was removed") as gone:
            store.resolve(run.id)
        assert f"stoker rm --undo {run.id}" in (gone.value.hint or "")
        with pytest.raises(NotFound):
            store.resolve(run.id[:-1] if run.id[:-1] != old.id[:-1] else run.id)
        with pytest.raises(NotFound) as typo:
            store.resolve(run.id + "!")
        assert run.id not in (typo.value.hint or "")
        for wanted in (RunFilter(trash=True), RunFilter(trash=True, name="digits", tags=("a",))):
            assert [(row.id, row.removed_at) for row in store.runs(wanted)] == [(run.id, 50.0)]
        assert store.runs(RunFilter(trash=True, name="mnist")) == []
        assert trees("2") <= store.blob_roots()
        for reference in (run.id, "digits", run.id[:-1]):
            assert store.resolve(reference, trash=True).id == run.id
        with pytest.raises(NotFound, match="in the trash"):
            store.resolve(old.id, trash=True)
        with pytest.raises(Conflict, match="in the trash"):
            store.resume(run.id, key="resume it", now=51.0)
        with pytest.raises(Conflict, match="was removed") as taken:
            store.submit(new_run("2", code="code-2"), now=51.0)
        assert run.id in (taken.value.hint or "")
        assert store.restore(run.id, now=70.0, by="ada") == run
        assert store.restore(run.id, now=71.0, by="ada") == run
        assert [row.id for row in store.runs()] == [other.id, run.id, old.id]
        assert store.counts()["succeeded"] == 3 and store.runs(RunFilter(trash=True)) == []
        assert [(row.kind, row.text) for row in store.events(run.id)][-2:] == [
            ("removed", "removed by ada"),
            ("restored", "taken out of the trash by ada"),
        ]
        assert rows_by_table(store, run) == {**before, "events": before["events"] + 2}

    @pytest.mark.parametrize("state", ["queued", "starting", "running", "stopping", "suspended"])
    def test_a_run_that_has_not_ended_is_not_removed(self, store: Store, run: RunRow, state: str) -> None:
        store.apply([UpdateRun(run.id, {"state": state})])
        with pytest.raises(Conflict, match=state) as refused:
            store.remove(run.id, now=50.0, by="")
        assert f"stoker stop {run.id}" in (refused.value.hint or "")
        assert store.run(run.id).removed_at is None
        with pytest.raises(NotFound):
            store.remove("nobody-0000", now=50.0, by="")

    def test_a_removed_run_that_goes_on_is_shown_again(self, store: Store) -> None:
        """A restored database may be older than a resume, whose tasks are then found."""
        run = ended(store, "1")
        store.remove(run.id, now=50.0, by="")
        store.apply([UpdateRun(run.id, {"reason": "looked at"}), UpdateRun(run.id, {"state": "failed"})])
        assert store.run(run.id).removed_at == 50.0
        store.apply([UpdateRun(run.id, {"state": "starting", "attempt": 2})])
        assert store.run(run.id).removed_at is None and store.resolve(run.id).id == run.id

    def test_purging_leaves_one_row_and_names_the_trees(self, store: Store) -> None:
        run, other = ended(store, "1"), ended(store, "2")
        untouched = rows_by_table(store, other)
        store.remove(run.id, now=50.0, by="")
        store.remove(other.id, now=60.0, by="")
        assert store.expired(49.0) == ([], []) and store.expired(50.0) == ([run.id], [])
        assert store.purge(run.id, 49.0) is None
        assert store.purge(run.id, 50.0) == trees("1") - {"code-1"}
        assert store.purge(run.id, 50.0) is None
        assert not any(rows_by_table(store, run).values())
        assert rows_by_table(store, other) == {**untouched, "events": untouched["events"] + 1}
        store.restore(other.id, now=61.0, by="")
        assert store.blob_roots() == trees("2")
        assert store.purged([run.id, other.id]) == {run.id}
        with pytest.raises(NotFound):
            store.run(run.id)
        with pytest.raises(NotFound):
            store.restore(run.id, now=70.0, by="")
        assert store.runs(RunFilter(trash=True)) == [] and [row.id for row in store.runs()] == [other.id]
        assert store.counts()["succeeded"] == 1
        # Nothing takes it for a run that the database has lost, and nothing starts under its key.
        assert not store.is_empty() and store.total() == 2
        assert store.missing_runs([{"id": run.id}]) == []
        with pytest.raises(Conflict, match="was removed"):
            store.submit(new_run("1", code="code-1"), now=51.0)
        assert store.check() == []

    def test_what_an_engine_still_holds_is_not_purged(self, store: Store, run: RunRow) -> None:
        store.apply(
            [UpdateRun(run.id, {"state": "failed"}), AddAttempt(AttemptRow(run.id, 1, state="ended"))]
        )
        store.remove(run.id, now=50.0, by="")
        assert store.expired(math.inf) == ([], [run.id])
        assert store.purge(run.id, math.inf) is None
        assert store.run(run.id).removed_at == 50.0

    def test_what_is_stored_of_runs(self, store: Store, run: RunRow) -> None:
        first, second = ended(store, "1"), ended(store, "2")
        sizes = {run.id: RunSize(run.id), first.id: RunSize(first.id, 7 << 40, 10, 20)}
        sizes[second.id] = RunSize(second.id, 7 << 40, 10, 20)
        assert {size.run: size for size in store.sizes()} == sizes
        store.remove(second.id, now=50.0, by="")
        assert {size.run for size in store.sizes()} == {run.id, first.id}
        assert store.sizes([second.id, "nobody-0000"]) == [sizes[second.id]]
        assert store.last_values([run.id, first.id, second.id], "loss") == {first.id: 0.25, second.id: 0.25}
        roots = store.roots()
        assert (roots.code, roots.outputs, roots.folder) == ({"code-1"}, {"out-1"}, {"folder-1"})
        assert roots.checkpoints == {"tree-1", "tree2-1", "part-1"}
        assert roots.trash == trees("2")
