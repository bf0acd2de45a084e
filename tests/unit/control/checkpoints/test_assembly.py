"""Parts that single tasks committed become checkpoints of the run, also across a restart of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.control.checkpoints import retention
from stoker.control.checkpoints.assembly import how_it_ended
from stoker.control.ingest.journal_reader import Intake
from stoker.store.rows import AddEvent, CheckpointRow
from stoker.task.formats import Ending, Status
from stoker.transfer import merge_outputs, outputs_for
from support.control.assembly_rig import TWO, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_parts_become_one_checkpoint(rig: Rig) -> None:
    rig.take(rig.part("worker-0", "step-1", 1, {"step-1__w0": "a", "step-1__meta": "m"}, step=1))
    assert rig.rows() == [] and len(rig.store.blob_roots()) == 1
    rig.take(rig.part("worker-1", "step-1", 1, {"step-1__w1": "b", "step-1__meta": "m"}, step=1))
    (row,) = rig.rows()
    assert (row.name, row.step, row.world_size, row.generation, row.size) == ("step-1", 1, 2, 1, 3)
    assert rig.files(row) == ["step-1/meta", "step-1/w0", "step-1/w1"]
    assert [found.id for found in rig.done.checkpoints] == [row.id] and rig.warnings == []
    assert "checkpoint step-1 at step 1 kept" in [event.text for event in rig.store.events(rig.run)]


def test_different_files_of_one_name_are_kept_apart_with_one_warning(rig: Rig) -> None:
    for number in (1, 2):
        for task in TWO:
            rig.take(rig.part(task, "last.pt", number, {"last.pt": f"{task} {number}"}))
        rig.look(), rig.look()
    assert [rig.files(row) for row in rig.rows()] == [["last.pt", "task-1/last.pt"]] * 2
    assert len(rig.warnings) == 1 and "last.pt" in rig.warnings[0]


def test_parts_survive_a_restart(rig: Rig) -> None:
    rig.take(rig.part("worker-0", "step-1", 1, {"w0": "a"}, step=1))
    rig.again()
    assert rig.assembly.waiting == ["step-1"]
    rig.take(rig.part("worker-1", "step-1", 1, {"w1": "b"}, step=1))
    assert [rig.files(row) for row in rig.rows()] == [["w0", "w1"]]
    rig.again()
    rig.take(rig.part("worker-0", "step-2", 2, {"w0": "c"}, step=2)), rig.look(), rig.look()
    assert len(rig.rows()) == 1, "the writers are restored"
    rig.take(rig.part("worker-1", "step-2", 2, {"w1": "d"}, step=2))
    assert len(rig.rows()) == 2


def test_a_new_generation_forgets_the_old_one(rig: Rig) -> None:
    rig.take(rig.part("worker-0", "step-1", 1, {"w0": "a"}, step=1))
    done = rig.record(rig.assembly.begin(2, {"worker-0": 2, "worker-1": 2}))
    assert rig.store.checkpoint_parts(rig.run, 1) == [] and done.freed
    rig.take(rig.part("worker-1", "step-1", 1, {"w1": "b"}, step=1))
    assert rig.rows() == [] and rig.store.checkpoint_parts(rig.run, 1) == []
    found = {"worker-0": Intake(parts=[rig.part("worker-0", "step-9", 4, {"w0": "x"}, step=9, generation=2)])}
    rig.record(rig.assembly.take(found))
    assert [row.name for row in rig.store.checkpoint_parts(rig.run, 1)] == ["step-9"]


def test_a_checkpoint_is_withdrawn_when_another_part_arrives(rig: Rig) -> None:
    rig.take(rig.part("worker-0", "step-1", 1, {"w0": "a"}, step=1)), rig.look(), rig.look()
    (torn,) = rig.rows()
    rig.take(rig.part("worker-1", "step-1", 1, {"w1": "b"}, step=1))
    (whole,) = rig.rows()
    assert whole.id != torn.id and rig.files(whole) == ["w0", "w1"]
    assert len(rig.warnings) == 1


def test_when_all_have_ended(rig: Rig) -> None:
    rig.take(rig.part("worker-0", "final.pt", 1, {"final.pt": "a"}))
    assert rig.rows() == []
    ended = Ending(1, 1, "exit", code=0)
    rig.record(rig.assembly.take({task: Intake(ending=ended) for task in TWO}))
    assert [row.name for row in rig.rows()] == ["final.pt"]


def test_after_a_restart_the_status_shows_which_tasks_have_ended(rig: Rig) -> None:
    rig.take(rig.part("worker-0", "final.pt", 1, {"final.pt": "a"}))
    rig.again()
    ending = Ending(1, 1, "exit", code=0).to_json()
    status = Status("ended", generation=1, ending=ending)
    rig.record(rig.assembly.take({task: Intake(status=status, more=True) for task in TWO}))
    assert rig.rows() == []
    rig.record(rig.assembly.take({task: Intake(status=status) for task in TWO}))
    assert [row.name for row in rig.rows()] == ["final.pt"]


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (Ending(1, 1, "exit", code=0), "done"),
        (Ending(1, 1, "stopped", code=143), "stopped"),
        (Ending(1, 1, "stopped", signal=9), "lost"),
        (Ending(1, 1, "exit", code=1), "lost"),
        (Ending(1, 1, "oom"), "lost"),
    ],
)
def test_how_it_ended(ending: Ending, state: str) -> None:
    assert how_it_ended(ending) == state


def test_its_metrics_are_those_of_its_parts(rig: Rig) -> None:
    """Where the metrics of parts differ, those of the first part count."""
    rig.take(
        rig.part("worker-1", "step-1", 1, {"w": "a"}, step=1, metrics={"loss": 0.5, "acc": 0.1}),
        rig.part("worker-0", "step-1", 1, {"w": "a"}, step=1, metrics={"acc": 0.9}),
    )
    assert rig.rows()[0].metrics == {"loss": 0.5, "acc": 0.9}


def test_a_part_without_its_blobs_is_dropped(rig: Rig) -> None:
    row = rig.part("worker-0", "step-1", 1, {"w0": "a"}, step=1)
    rig.take(row)
    (rig.blobs.root / "trees" / row.digest[:2] / row.digest[2:]).unlink()
    rig.again()
    assert rig.assembly.waiting == [] and rig.store.checkpoint_parts(rig.run, 1) == []


def test_a_single_member_needs_no_other_parts(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.again(members={"worker-0": 1})
    rig.take(rig.part("worker-0", "last.pt", 1, {"last.pt": "a"}))
    assert [row.world_size for row in rig.rows()] == [1]
    assert not [
        change for change in rig.done.changes if isinstance(change, AddEvent) and change.row.kind == "warning"
    ]


def test_worlds_of_another_size() -> None:
    def row(number: int, size: int | None) -> CheckpointRow:
        return CheckpointRow(f"c{number}", "r", 1, 1, "n", "d", 1, "sdk", 1.0, seq=number, world_size=size)

    rows = [row(1, None), row(2, 2), row(3, 4)]
    fits, not_these = retention.restorable(rows, world_size=2, same=True)
    assert ([r.id for r in fits], [r.id for r in not_these]) == (["c2"], ["c3"])
    assert [r.id for r in retention.restorable(rows, world_size=1, same=True)[0]] == ["c1"]
    assert retention.restorable(rows, world_size=2, same=False) == (retention.newest(rows), [])


def test_outputs_of_several_tasks(rig: Rig) -> None:
    first, second = rig.tree(log="a", model="m")[0], rig.tree(log="b", model="m")[0]
    found = merge_outputs(rig.blobs, {0: first, 1: second})
    assert (found["files"], found["bytes"], found["apart"]) == (3, 3, ["log"])
    assert outputs_for(rig.blobs, found, 1) == second and outputs_for(rig.blobs, found, 0) == first
    again = merge_outputs(rig.blobs, {0: rig.tree(log="c", model="m")[0], 1: second}, found)
    assert outputs_for(rig.blobs, again, 1) == second
    assert "apart" not in merge_outputs(rig.blobs, {0: first})
