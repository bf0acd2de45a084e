"""Shared parts of the store suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from stoker.store import Store, submissions
from stoker.store.rows import CheckpointRow, NewRun, PartRow, RunRow


def new_run(key: str, name: str = "digits", **changes: Any) -> NewRun:
    return replace(
        NewRun(
            key=key,
            name=name,
            job={"name": name, "run": "python train.py"},
            command=["python", "train.py"],
            fingerprint=f"of {key}",
        ),
        **changes,
    )


def submit_all(store: Store, new: Sequence[NewRun]) -> list[RunRow]:
    """Submit in one transaction: for tests with thousands of runs, and for tests of atomicity."""

    def write(connection: Connection) -> list[RunRow]:
        return [submissions.submit(connection, one, 1.0)[0] for one in new]

    return store._database.write(write)


def checkpoint(run: RunRow, number: int, **changes: Any) -> CheckpointRow:
    row = CheckpointRow(
        id=f"{run.id}-c{number}",
        run=run.id,
        attempt=1,
        generation=1,
        name=f"step-{number}",
        digest=f"tree{number}",
        size=1 << 40,
        how="rename",
        created_at=5.0,
    )
    return replace(row, **changes)


def part(run: RunRow, task: str, number: int, **changes: Any) -> PartRow:
    row = PartRow(
        run=run.id,
        attempt=1,
        generation=1,
        task=task,
        number=number,
        name=f"step-{number}",
        digest=f"{task}-tree{number}",
        size=1 << 40,
        how="quiet",
        created_at=5.0,
    )
    return replace(row, **changes)


class StoreCase:
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        raise NotImplementedError("a store's tests say where its database is")

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        with Store.open(url) as store:
            yield store

    @pytest.fixture
    def run(self, store: Store) -> RunRow:
        return store.submit(new_run("the-run"), now=1.0)[0]
