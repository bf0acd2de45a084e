"""Which checkpoints of lost attempts are recorded, and what is removed from a shared volume."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.blobs import BlobStore
from stoker.control.ingest.redaction import NOTHING
from stoker.control.startup.salvage import Salvage, carried, over, remove, staged_of
from stoker.errors import NotFound
from stoker.store.rows import AddCheckpoint, AddEvent, AttemptRow, CheckpointRow
from stoker.task import layout
from stoker.task.formats import StagedCheckpoint
from stoker.task.layout import SharedPart
from stoker.task.local_directory import LocalTaskDir

LOST = SharedPart("digits-7f3k", 1, "worker-0", 1)


class Shared(LocalTaskDir):
    """A remote task directory with a volume beside it, in one process."""

    def __init__(self, root: Path) -> None:
        (root / "mirror").mkdir(parents=True)
        super().__init__(str(root / "mirror"))
        self.volume = root / "volume"
        self.volume.mkdir()
        self.shares = True
        self.entries: list[dict[str, Any]] = []
        self.asked: list[tuple[SharedPart, int, list[int]]] = []
        self.fails: OSError | None = None

    def stage(self, part: SharedPart, number: int, data: bytes) -> None:
        path = self.volume / part.name / layout.staged(number) / "last.pt"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        file = {
            "path": "last.pt",
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "mode": 0o600,
        }
        staged = StagedCheckpoint(
            number=number, generation=2, name="last.pt", how="rename", files=[file], step=number
        )
        self.entries.append({"k": "checkpoint", **staged.to_json()})

    @property
    def left(self) -> list[SharedPart]:
        return self.parts()[0]

    def parts(self) -> tuple[list[SharedPart], list[str]]:
        names = [str(path.relative_to(self.volume)) for path in sorted(self.volume.glob("*/*"))]
        empty = [path.name for path in self.volume.iterdir() if not any(path.iterdir())]
        return [part for part in map(layout.part_of, names) if part], sorted(empty)

    def salvage(self, part: SharedPart, generation: int, carried: Sequence[int]) -> list[dict[str, Any]]:
        self.asked.append((part, generation, list(carried)))
        if self.fails is not None:
            raise self.fails
        return self.entries

    def fetch(self, path: str, offset: int, limit: int) -> bytes:
        data = (self.volume / path.removeprefix("shared/")).read_bytes()
        return data[offset : offset + limit]

    def discard(self, path: str) -> None:
        if self.fails is not None:
            raise self.fails
        target = self.volume / path.removeprefix("shared/")
        for found in sorted(target.rglob("*"), reverse=True):
            found.rmdir() if found.is_dir() else found.unlink()
        if target.exists():
            target.rmdir()

    def place(self, *_: Any, **__: Any) -> None: ...
    def walk(self, *_: Any, **__: Any) -> list[dict[str, Any]]: ...
    def settle(self, generation: int) -> None: ...
    def catch_up(self, timeout: float) -> bool: ...
    def abandon(self, reason: str) -> None: ...


class Rows:
    """A store with only the rows that these tests need."""

    def __init__(self) -> None:
        self.rows: list[CheckpointRow] = []
        self.states = {"digits-7f3k": "queued"}
        self.ended = True

    def run(self, run: str) -> Any:
        if run not in self.states:
            raise NotFound(run)
        return SimpleNamespace(state=self.states[run], attempt=1)

    def attempt(self, run: str, number: int) -> AttemptRow:
        return AttemptRow(run, number, generation=2, state="ended" if self.ended else "running")

    def checkpoints(self, run: str) -> list[CheckpointRow]:
        return self.rows

    def latest_metrics(self, run: str) -> dict[str, float]:
        return {"loss": 0.5}


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    found = Shared(tmp_path)
    assert found.shares
    return found


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def salvage(tmp_path: Path, rows: Rows) -> Salvage:
    return Salvage(rows, BlobStore(tmp_path / "blobs"))  # type: ignore[arg-type]


def live(*, number: int = 2, keep: int = 3, alone: bool = True) -> Any:
    job = SimpleNamespace(checkpoint=SimpleNamespace(keep=keep))
    attempt = AttemptRow("digits-7f3k", number)
    return SimpleNamespace(id="digits-7f3k", alone=alone, attempt=attempt, job=job, redaction=NOTHING)


def task(shared: Shared) -> Any:
    return SimpleNamespace(name="worker-0", directory=shared)


def row(number: int) -> CheckpointRow:
    return CheckpointRow(
        f"ck-digits-7f3k-1-{number}", "digits-7f3k", 1, 2, "last.pt", "0" * 64, 1, "rename", 1.0
    )


def test_a_checkpoint_that_was_not_transferred_is_recorded_for_the_lost_attempt(
    salvage: Salvage, shared: Shared, rows: Rows
) -> None:
    rows.rows = [row(1), row(2)]
    for number in (2, 3, 4):
        shared.stage(LOST, number, b"state %d" % number)
    shared.entries.append({"k": "rejected", "generation": 2, "name": "torn.pt", "reason": "no end"})
    changes, taken = salvage.take(live(), task(shared))
    assert shared.asked == [(LOST, 2, [1, 2])]
    added = [change.row for change in changes if isinstance(change, AddCheckpoint)]
    assert [(one.id, one.attempt, one.generation, one.step) for one in added] == [
        ("ck-digits-7f3k-1-3", 1, 2, 3),
        ("ck-digits-7f3k-1-4", 1, 2, 4),
    ]
    assert added[0].metrics == {"loss": 0.5}
    warned = [
        change.row.text for change in changes if isinstance(change, AddEvent) and change.row.kind == "warning"
    ]
    assert warned == ["checkpoint torn.pt of a lost attempt is not offered: no end"]
    assert taken == [LOST]


def test_a_checkpoint_with_a_known_digest_is_not_recorded(
    salvage: Salvage, shared: Shared, rows: Rows
) -> None:
    """The lost attempt was resumed from this checkpoint and has made no progress."""
    shared.stage(LOST, 1, b"state")
    (first,) = [
        change.row for change in salvage.take(live(), task(shared))[0] if isinstance(change, AddCheckpoint)
    ]
    rows.rows = [replace(first, id="ck-digits-7f3k-0-9", attempt=0)]
    assert salvage.take(live(), task(shared)) == ([], [LOST])


def test_only_as_many_as_are_kept_are_transferred_newest_first(salvage: Salvage, shared: Shared) -> None:
    for number in range(1, 6):
        shared.stage(LOST, number, b"state %d" % number)
    (shared.volume / LOST.name / layout.staged(5) / "last.pt").write_bytes(b"spoiled")
    changes, _ = salvage.take(live(keep=2), task(shared))
    added = [change.row.step for change in changes if isinstance(change, AddCheckpoint)]
    assert added == [3, 4], "a spoiled one does not count"


def test_only_earlier_attempts_of_the_same_task_are_read(salvage: Salvage, shared: Shared) -> None:
    for part in (LOST._replace(run="other-1a2b"), LOST._replace(task="ps-0"), LOST._replace(attempt=2)):
        (shared.volume / part.name).mkdir(parents=True)
    assert salvage.take(live(), task(shared)) == ([], [])
    (shared.volume / LOST.name).mkdir(parents=True)
    assert salvage.take(live(alone=False), task(shared)) == ([], [])
    assert salvage.take(live(number=1), task(shared)) == ([], [])
    shared.shares = False
    assert salvage.take(live(), task(shared)) == ([], [])
    assert shared.asked == []


def test_an_unreadable_volume_does_not_delay_the_run(salvage: Salvage, shared: Shared) -> None:
    (shared.volume / LOST.name).mkdir(parents=True)
    shared.fails = OSError(errno.EACCES, "permission denied")
    changes, taken = salvage.take(live(), task(shared))
    assert [change.row.kind for change in changes if isinstance(change, AddEvent)] == ["warning"]
    assert taken == [], "and it is left where it is"
    shared.fails = OSError(errno.EIO, "the courier does not answer")
    with pytest.raises(OSError):
        salvage.take(live(), task(shared))


def test_only_parts_that_no_run_needs_are_swept(salvage: Salvage, shared: Shared, rows: Rows) -> None:
    rows.states |= {"over-2a2b": "failed", "waits-2a2b": "queued"}
    rows.states |= {"over-1a2b": "failed", "waits-1a2b": "suspended", "lives-1a2b": "succeeded"}
    names = ["over-1a2b", "waits-1a2b", "lives-1a2b", "unknown-1a2b"]
    current = LOST._replace(attempt=3)
    untaken = LOST._replace(attempt=2)
    for part in (LOST, untaken, current, *(LOST._replace(run=name) for name in names)):
        (shared.volume / part.name).mkdir(parents=True)
    (shared.volume / "digits-7f3k/something").mkdir()
    for name in ("over-2a2b", "waits-2a2b", "unknown-2a2b"):
        (shared.volume / name).mkdir()
    salvage.sweep(live(number=3), task(shared), [LOST], ["lives-1a2b", "digits-7f3k"])
    left = {part.run for part in shared.left}
    assert left == {"digits-7f3k", "waits-1a2b", "lives-1a2b", "unknown-1a2b"}
    assert [part for part in shared.left if part.run == "digits-7f3k"] == [untaken, current]
    assert (shared.volume / "digits-7f3k/something").is_dir()
    assert shared.parts()[1] == ["over-1a2b", "unknown-2a2b", "waits-2a2b"], (
        "empty, and of a run that is over"
    )
    salvage.sweep(live(number=3, alone=False), task(shared), [], [])
    assert [part for part in shared.left if part.run == "digits-7f3k"] == [current], (
        "a part of several tasks is not salvaged"
    )


def test_when_a_run_is_over(rows: Rows) -> None:
    ended = AttemptRow("digits-7f3k", 1, state="ended")
    for state, wanted in (("succeeded", True), ("stopped", True), ("queued", False), ("suspended", False)):
        assert over(SimpleNamespace(state=state), ended) is wanted  # type: ignore[arg-type]
    failed: Any = SimpleNamespace(state="failed")
    assert not over(failed, AttemptRow("digits-7f3k", 1, state="running"))
    assert not over(failed, AttemptRow("digits-7f3k", 1, state="ended", evidence={"kept_until": 1e12}))


def test_removing_needs_a_courier_and_permission(shared: Shared) -> None:
    (shared.volume / LOST.name).mkdir(parents=True)
    shared.fails = OSError(errno.EACCES, "permission denied")
    remove(shared, LOST)
    shared.fails = OSError(errno.EIO, "the courier does not answer")
    with pytest.raises(OSError):
        remove(shared, LOST)
    shared.fails = None
    remove(shared, LOST)
    assert shared.left == []
    remove(LocalTaskDir(shared.root), LOST)


def test_invalid_numbers_and_entries() -> None:
    assert carried([row(7)]) == [7]
    assert staged_of([{"k": "checkpoint", "number": "x"}, {"k": "checkpoint", "number": 3, "files": 7}]) == []
