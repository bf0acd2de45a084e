"""Parts in transfer: the assembly awaits them for any time, and delays no other checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from stoker.control.ingest.journal_reader import Intake, Transfer
from stoker.store.rows import PartRow, Point, TransferRow
from stoker.task.formats import Ending, Status
from support.control.assembly_rig import Rig


class Slow(Rig):
    """Each call makes a newer status of a task."""

    def said(
        self,
        parts: Iterable[PartRow] = (),
        *,
        untaken: Iterable[str] = (),
        pending: Iterable[str] = (),
        points: Iterable[Point] = (),
    ) -> Intake:
        self.scans += 1
        return Intake(
            status=Status("running", generation=1, scans=self.scans, pending=list(pending)),
            generation=1,
            parts=list(parts),
            points=list(points),
            untaken=list(untaken),
        )

    def both(self, first: Intake, second: Intake) -> None:
        self.record(self.assembly.take({"worker-0": first, "worker-1": second}))

    def step(self, rank: int, number: int, **more: float) -> PartRow:
        files = {f"w{rank}": str(number)}
        return self.part(f"worker-{rank}", f"step-{number}", number, files, step=number, **more)

    def kept(self) -> dict[str, list[str]]:
        return {row.name: self.files(row) for row in self.rows()}


@pytest.fixture
def rig(tmp_path: Path) -> Slow:
    return Slow(tmp_path)


def test_the_first_part_of_a_task_that_never_wrote_is_awaited(rig: Slow) -> None:
    """The task has written none for so long that without the announcement its part would not be awaited."""
    for number in range(6):
        rig.both(rig.said([rig.step(0, number)]), rig.said())
        for _ in range(3):
            rig.both(rig.said(), rig.said())
    assert len(rig.kept()) == 6
    rig.both(rig.said(), rig.said(untaken=["step-6"]))
    rig.both(rig.said([rig.step(0, 6)]), rig.said(untaken=["step-6"]))
    for _ in range(10):
        rig.both(rig.said(), rig.said(untaken=["step-6"]))
    assert len(rig.kept()) == 6
    rig.both(rig.said(), rig.said([rig.step(1, 6)]))
    assert rig.kept()["step-6"] == ["w0", "w1"] and rig.warnings == []


@pytest.mark.parametrize("looks", [0, 3])
def test_a_part_is_awaited_while_others_finish_many(rig: Slow, looks: int) -> None:
    """Also if its launcher was seen at work on the part, and while other parts arrive."""
    for number in (1, 2):
        rig.both(rig.said([rig.step(0, number)]), rig.said([rig.step(1, number)]))
    rig.both(rig.said([rig.step(0, 3)]), rig.said(pending=["step-3"]))
    for _ in range(looks):
        rig.both(rig.said(), rig.said(pending=["step-3"]))
    for number in range(4, 20):
        untaken = [f"step-{older}" for older in range(3, number)]
        rig.both(rig.said([rig.step(0, number)]), rig.said(untaken=untaken, pending=[f"step-{number}"]))
    assert list(rig.kept()) == ["step-1", "step-2"]
    rig.both(rig.said(), rig.said([rig.step(1, number) for number in range(3, 20)]))
    assert rig.kept() == {f"step-{number}": ["w0", "w1"] for number in range(1, 20)}
    assert rig.warnings == []


def test_a_task_that_always_has_a_part_in_transfer(rig: Slow) -> None:
    """Where names contain ranks, the scans of the launchers show which tasks write."""

    def name(number: int, rank: int) -> str:
        return f"step-{number}-rank{rank}.pt"

    for number in range(1, 31):
        parts = [
            rig.part(f"worker-{rank}", name(number, rank), number, {f"r{rank}": str(number)}, step=number)
            for rank in (0, 1)
        ]
        looks = [
            [rig.said([part], untaken=[name(number + 1, rank)]) for rank, part in enumerate(parts)],
            *([rig.said(untaken=[name(number + 1, rank)]) for rank in (0, 1)] for _ in range(3)),
        ]
        for look in looks:
            rig.both(*look)
    assert len(rig.kept()) == 30


def test_a_task_with_a_part_of_another_name_in_transfer_is_awaited(rig: Slow) -> None:
    for number in (1, 2, 3):
        rig.both(
            rig.said([rig.part("worker-0", f"opt-{number}", number, {"o0": "x"}, step=number)]), rig.said()
        )
        for _ in range(3):
            rig.both(rig.said(), rig.said())
    assert len(rig.kept()) == 3
    rig.both(rig.said(), rig.said(untaken=["big-4"], pending=["opt-4"]))
    mine = rig.part("worker-0", "opt-4", 4, {"o0": "x"}, step=4)
    rig.both(rig.said([mine]), rig.said(untaken=["big-4"], pending=["opt-4"]))
    assert len(rig.kept()) == 3


def test_the_metrics_of_a_part_are_those_reported_before_it_was_seen(rig: Slow) -> None:
    """Also by another task, and before the server that takes it in was started."""
    own = TransferRow(rig.run, 1, 1, "worker-1", 1, 0, 9, "step-1", 4, "rename", 1.0, 1.5, 1, {"own": 2.0})
    seen = rig.said(untaken=["step-1"])
    seen.seen.append(Transfer(own))
    rig.both(rig.said(points=[Point("loss", 1, 0.9, 1.0)]), seen)
    assert seen.seen[0].row.metrics == {"loss": 0.9, "own": 2.0}
    late = rig.said()
    late.seen.append(Transfer(own))
    rig.both(rig.said(points=[Point("loss", 2, 0.1, 9.0)]), late)
    assert late.seen[0].row.metrics == {"loss": 0.9, "own": 2.0}


def test_a_task_has_ended_after_its_last_part_has_arrived(rig: Slow) -> None:
    rig.both(rig.said([rig.step(0, 1)]), rig.said())
    last = rig.said(untaken=["step-1"])
    last.ending = Ending(1, 1, "exit", code=0)
    rig.both(rig.said(), last)
    assert not rig.kept()
    rig.both(rig.said(), Intake(generation=1, parts=[rig.step(1, 1)]))
    assert rig.kept() == {"step-1": ["w0", "w1"]}
