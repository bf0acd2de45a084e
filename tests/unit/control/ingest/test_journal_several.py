"""A look at one of several tasks: parts, keys with the name of their task, and the step rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.control.ingest.journal_reader import Intake, speaker
from stoker.control.ingest.step_rate import StepRate
from stoker.settings import Home
from stoker.store.rows import AddCheckpoint, Point
from stoker.task import layout
from stoker.task.formats import Ending, Status
from support.control.ingesting import InlineTransfers, TaskFiles, ingester, take_in

OTHERS = {"loss@worker-1", "acc@worker-1"}


class Task(TaskFiles):
    def __init__(self, tmp_path: Path, **more: Any) -> None:
        home = Home(tmp_path / "home")
        super().__init__(tmp_path / "task")
        self.phase("running")
        self.pump = ingester(home, self.root, InlineTransfers(), task="worker-1", **more)

    def report(self, name: str, *lines: tuple[int, float]) -> None:
        with open(self.root / layout.METRICS / name, "a") as file:
            file.writelines(
                json.dumps({"step": s, "t": t, "v": {"loss": 1.0, "acc": 0.5}}) + "\n" for s, t in lines
            )

    def keys(self, found: Intake) -> set[str]:
        return {point.key for point in found.points}


def test_a_single_task_has_plain_keys(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.report("1-7-ab.jsonl", (1, 1.0), (2, 2.0))
    task.report("1-8-cd-1.jsonl", (1, 1.0))
    found = task.pump.look()
    assert task.keys(found) == {"loss", "acc"}
    assert found.status is not None and found.status.usage == {}


@pytest.mark.parametrize(("speaks", "expected"), [(True, {"loss", "acc"}), (False, OTHERS), (None, OTHERS)])
def test_keys_of_other_tasks_have_the_name_of_their_task(
    tmp_path: Path, speaks: bool | None, expected: set[str]
) -> None:
    task = Task(tmp_path, alone=False, speaks=speaks)
    task.report("1-7-ab.jsonl", (1, 1.0))
    assert task.keys(task.pump.look()) == expected
    task.report("1-8-cd-3.jsonl", (1, 1.0))
    assert task.keys(task.pump.look()) == {"loss@worker-1.3", "acc@worker-1.3"}


@pytest.mark.parametrize(
    ("tasks", "first"),
    [
        (["worker-0", "worker-1", "ps-0"], "worker-0"),
        (["chief-0", "worker-0", "ps-0"], "chief-0"),
        (["launcher-0", "worker-0"], "worker-0"),
        (["scheduler-0", "worker-0", "client-0"], "client-0"),
        (["scheduler-0", "actor-0", "learner-0"], "actor-0"),
        (["ps-0"], "ps-0"),
    ],
)
def test_the_task_whose_metrics_have_plain_keys(tasks: list[str], first: str) -> None:
    assert speaker(tasks) == first


def test_the_usage_has_the_step_rate(tmp_path: Path) -> None:
    task = Task(tmp_path, alone=False)
    task.report("1-7-ab.jsonl", *((step, step * 0.25) for step in range(1, 9)))
    task.report("1-8-cd-3.jsonl", (500, 1.0), (501, 9.0))
    found = task.pump.look()
    assert found.status is not None and found.status.usage == {"step": 8, "step_seconds": 0.25}


def test_the_step_rate_is_a_moving_median() -> None:
    pace = StepRate()
    assert pace.usage() == {}
    pace.take([Point("loss", 10, 1.0, 100.0)])
    assert pace.usage() == {"step": 10}
    pace.take(
        [Point(key, step, 1.0, 100.0 + (step - 10)) for step in range(20, 60, 10) for key in ("a", "b")]
    )
    pace.take([Point("loss", 60, 1.0, 500.0)])
    assert pace.usage() == {"step": 60, "step_seconds": 1.0}
    pace.take([Point("loss", step, 1.0, 500.0 + 2 * (step - 60)) for step in range(61, 90)])
    assert pace.usage() == {"step": 89, "step_seconds": 2.0}
    pace.take([Point("loss", 5, 1.0, 900.0)])
    assert pace.usage() == {"step": 5}


def test_checkpoints_are_parts_and_damaged_ones_are_named(tmp_path: Path) -> None:
    task = Task(tmp_path, alone=False)
    staged = task.root / layout.staged(4)
    staged.mkdir(parents=True)
    (staged / "w.pt").write_bytes(b"x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    entry = {"k": "checkpoint", "number": 4, "generation": 1, "name": "w.pt", "how": "rename", "step": 3}
    task.journal({**entry, "files": [{"path": "w.pt", "size": 1, "sha256": digest}]})
    task.journal(
        {**entry, "number": 5, "name": "gone.pt", "files": [{"path": "g", "size": 1, "sha256": "0" * 64}]}
    )
    task.journal({"k": "rejected", "generation": 1, "name": "torn.pt", "reason": "torn"})
    found = take_in(task.pump)
    assert [(row.task, row.number, row.name, row.step) for row in found.parts] == [("worker-1", 4, "w.pt", 3)]
    assert found.rejected == ["gone.pt", "torn.pt"] and found.visible
    assert not [change for change in found.changes if isinstance(change, AddCheckpoint)]


def test_two_looks_are_one() -> None:
    first = Intake(status=Status("running"), started_at=1.0, rejected=["a"], log_bytes=3)
    last = Intake(
        status=Status("ended"), ending=Ending(1, 1, "lost"), rejected=["b"], log_bytes=4, visible=True
    )
    first.join(last)
    assert first.status is last.status and first.ending is last.ending and first.started_at == 1.0
    assert first.rejected == ["a", "b"] and first.log_bytes == 7 and first.visible and not first.more
