"""Parts that are on their way: waited for as long as it takes, and by nobody else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from stoker.control.ingest.journal_reader import Behind, Intake
from stoker.store.rows import PartRow, Point
from stoker.task.formats import Status
from support.control.assembly_rig import Rig


class Slow(Rig):
    """Each look finds new statuses of both."""

    def said(
        self,
        parts: Iterable[PartRow] = (),
        *,
        behind: Iterable[str] = (),
        pending: Iterable[str] = (),
        points: Iterable[Point] = (),
    ) -> Intake:
        self.scans += 1
        return Intake(
            status=Status("running", generation=1, scans=self.scans, pending=list(pending)),
            generation=1,
            parts=list(parts),
            points=list(points),
            behind=[Behind(name, number) for number, name in enumerate(behind, 1)],
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


def test_one_that_has_never_written_any_and_now_does(rig: Slow) -> None:
    """It has been seen not to write any for so long that nobody would wait for it."""
    for number in range(6):
        rig.both(rig.said([rig.step(0, number)]), rig.said())
        for _ in range(3):
            rig.both(rig.said(), rig.said())
    assert len(rig.kept()) == 6
    rig.both(rig.said(), rig.said(behind=["step-6"]))
    rig.both(rig.said([rig.step(0, 6)]), rig.said(behind=["step-6"]))
    for _ in range(10):
        rig.both(rig.said(), rig.said(behind=["step-6"]))
    assert len(rig.kept()) == 6
    rig.both(rig.said(), rig.said([rig.step(1, 6)]))
    assert rig.kept()["step-6"] == ["w0", "w1"] and rig.warnings == []


@pytest.mark.parametrize("looks", [0, 3])
def test_one_whose_part_takes_as_long_as_many_of_the_others(rig: Slow, looks: int) -> None:
    """Whether or not its launcher was seen at work on it, and while it goes on."""
    for number in (1, 2):
        rig.both(rig.said([rig.step(0, number)]), rig.said([rig.step(1, number)]))
    rig.both(rig.said([rig.step(0, 3)]), rig.said(pending=["step-3"]))
    for _ in range(looks):
        rig.both(rig.said(), rig.said(pending=["step-3"]))
    for number in range(4, 20):
        behind = [f"step-{older}" for older in range(3, number)]
        rig.both(rig.said([rig.step(0, number)]), rig.said(behind=behind, pending=[f"step-{number}"]))
    assert list(rig.kept()) == ["step-1", "step-2"]
    rig.both(rig.said(), rig.said([rig.step(1, number) for number in range(3, 20)]))
    assert rig.kept() == {f"step-{number}": ["w0", "w1"] for number in range(1, 20)}
    assert rig.warnings == []


def test_one_that_always_has_something_on_its_way(rig: Slow) -> None:
    """Where names speak of ranks, who writes has to be learnt from what launchers say of their looks."""

    def name(number: int, rank: int) -> str:
        return f"step-{number}-rank{rank}.pt"

    for number in range(1, 31):
        parts = [
            rig.part(f"worker-{rank}", name(number, rank), number, {f"r{rank}": str(number)}, step=number)
            for rank in (0, 1)
        ]
        looks = [
            [rig.said([part], behind=[name(number + 1, rank)]) for rank, part in enumerate(parts)],
            *([rig.said(behind=[name(number + 1, rank)]) for rank in (0, 1)] for _ in range(3)),
        ]
        for look in looks:
            rig.both(*look)
    assert len(rig.kept()) == 30


def test_one_that_is_at_its_first_of_another_kind_meanwhile(rig: Slow) -> None:
    for number in (1, 2, 3):
        rig.both(
            rig.said([rig.part("worker-0", f"opt-{number}", number, {"o0": "x"}, step=number)]), rig.said()
        )
        for _ in range(3):
            rig.both(rig.said(), rig.said())
    assert len(rig.kept()) == 3
    rig.both(rig.said(), rig.said(behind=["big-4"], pending=["opt-4"]))
    mine = rig.part("worker-0", "opt-4", 4, {"o0": "x"}, step=4)
    rig.both(rig.said([mine]), rig.said(behind=["big-4"], pending=["opt-4"]))
    assert len(rig.kept()) == 3


def test_a_part_is_judged_by_what_had_been_reported_when_it_was_seen(rig: Slow) -> None:
    def point(number: int, loss: float) -> Point:
        return Point("loss", number, loss, float(number))

    others = [rig.step(1, number, written_at=number + 0.5) for number in (1, 2)]
    rig.both(rig.said(behind=["step-1"], points=[point(1, 0.9)]), rig.said(others))
    rig.both(rig.said(behind=["step-1", "step-2"], points=[point(2, 0.5)]), rig.said())
    rig.both(rig.said(behind=["step-1", "step-2"], points=[point(3, 0.1)]), rig.said())
    rig.both(rig.said([rig.step(0, number, written_at=number + 0.5) for number in (1, 2)]), rig.said())
    assert [(row.name, row.metrics) for row in rig.rows()] == [
        ("step-1", {"loss": 0.9}),
        ("step-2", {"loss": 0.5}),
    ]


def test_nothing_is_remembered_of_what_was_refused(rig: Slow) -> None:
    for number in range(5):
        rig.both(rig.said(behind=[f"step-{number}"], points=[Point("loss", number, 0.1, 1.0)]), rig.said())
        refused = rig.said()
        refused.rejected.append(f"step-{number}")
        rig.both(refused, rig.said())
    assert rig.assembly._reported == {}
