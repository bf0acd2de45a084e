"""State that is lost while no server runs: task directories, and a database restored from a backup."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.engine.base import Node, Presence
from stoker.errors import NotFound
from stoker.task import layout
from stoker.task.local_directory import LocalTaskDir
from support.control.rigs import Rig, scripted
from support.waiting import wait


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, scripted, [Node("local", cpu=4, memory=8 << 30)])
    yield made
    made.close()


def _texts(rig: Rig, run: str) -> str:
    return " | ".join(event.text for event in rig.store.events(run))


def _directory(rig: Rig, run: str, attempt: int, task: str = "worker-0") -> Path:
    return rig.settings.home.tasks / run / str(attempt) / task


@pytest.mark.parametrize("lost", ["directory", "files"])
def test_a_lost_task_directory_is_a_lost_attempt_and_not_a_new_one(rig: Rig, lost: str) -> None:
    row = rig.submit(["hang", "train"])
    rig.until(row.id, "running")
    path = _directory(rig, row.id, 1)
    rig.close()
    shutil.rmtree(path)
    if lost == "files":
        path.mkdir()
    rig.restart(closed=True)
    done = rig.ended(row.id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 2, 0)
    assert rig.store.attempt(row.id, 1).cause == "lost"
    assert "attempt 2 starts" in _texts(rig, row.id)


def test_a_task_whose_order_is_lost_is_ended_and_that_is_said(rig: Rig) -> None:
    row = rig.submit(["hang", "train"])
    rig.until(row.id, "running")
    path = _directory(rig, row.id, 1)
    rig.close()
    (path / layout.ORDER).unlink()
    rig.restart(closed=True)
    done = rig.ended(row.id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 2, 0)
    assert _texts(rig, row.id).count(f"{layout.ORDER} is gone") == 1


def test_one_of_several_tasks_that_lost_its_directory_is_replaced(rig: Rig) -> None:
    row = rig.submit("hang", workers=2)
    rig.until(row.id, "running")
    rig.close()
    shutil.rmtree(_directory(rig, row.id, 1, "worker-1"))
    rig.restart(closed=True)
    wait(lambda: rig.store.attempt(row.id, 1).generation == 2)
    wait(
        lambda: (
            (order := LocalTaskDir(str(_directory(rig, row.id, 1, "worker-1"))).order())
            and order.generation == 2
        )
    )
    assert rig.store.attempt(row.id, 1).placement["worker-1"].incarnation == 2
    assert rig.store.run(row.id).attempt == 1


class Copy:
    """A backup of the database that is restored later."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.path = rig.settings.home.root / "copy.db"
        rig.store.backup(self.path)

    def restore(self) -> None:
        self.rig.close()
        for path in self.rig.settings.home.root.glob("stoker.db*"):
            path.unlink()
        shutil.copy(self.path, self.rig.settings.home.database)
        self.rig.restart(closed=True)


def test_a_run_that_started_after_the_copy_was_made_is_taken_over(rig: Rig) -> None:
    first = rig.submit("hang", resources={"cpu": 4})
    rig.until(first.id, "running")
    row = rig.submit("hang", resources={"cpu": 1})
    copy = Copy(rig)
    rig.controller.stop_run(first.id, kill=True, by="ada")
    rig.until(row.id, "running")
    copy.restore()
    wait(lambda: rig.store.run(row.id).state == "running")
    assert rig.store.run(row.id).attempt == 1
    assert "was taken over" in _texts(rig, row.id)
    journal = LocalTaskDir(str(_directory(rig, row.id, 1))).read(layout.JOURNAL)
    assert journal.count(b'"starting"') == 1
    rig.controller.stop_run(row.id, kill=True, by="ada")
    assert rig.ended(row.id).state == "stopped"


def test_a_later_attempt_than_the_copy_knows_is_taken_over(rig: Rig) -> None:
    row = rig.submit(["hang", "hang"])
    rig.until(row.id, "running")
    copy = Copy(rig)
    rig.engine.kill_launcher(row.id, 1, "worker-0")
    wait(lambda: rig.store.run(row.id).attempt == 2 and rig.store.run(row.id).state == "running")
    copy.restore()
    wait(lambda: (found := rig.store.run(row.id)).attempt == 2 and found.state == "running")
    assert rig.store.attempt(row.id, 1).cause == "lost"
    assert LocalTaskDir(str(_directory(rig, row.id, 2))).read(layout.JOURNAL).count(b'"starting"') == 1


def test_several_tasks_that_the_copy_does_not_know_end_before_others_start(rig: Rig) -> None:
    first = rig.submit("hang", resources={"cpu": 4})
    rig.until(first.id, "running")
    row = rig.submit("hang", workers=2)
    copy = Copy(rig)
    rig.controller.stop_run(first.id, kill=True, by="ada")
    rig.until(row.id, "running")
    copy.restore()
    rig.controller.stop_run(first.id, kill=True, by="ada")
    wait(lambda: (found := rig.store.run(row.id)).attempt == 2 and found.state == "running")
    seen = {
        (one.attempt, str(one.presence)) for one in asyncio.run(rig.engine.observe()) if one.run == row.id
    }
    assert (1, "alive") not in seen and (2, "alive") in seen


def test_a_generation_that_the_copy_does_not_know_is_taken_over(rig: Rig) -> None:
    row = rig.submit("hang", workers=2)
    rig.until(row.id, "running")
    copy = Copy(rig)
    rig.engine.kill_launcher(row.id, 1, "worker-1")
    wait(lambda: rig.store.attempt(row.id, 1).generation == 2)
    wait(
        lambda: (
            (order := LocalTaskDir(str(_directory(rig, row.id, 1, "worker-1"))).order())
            and order.generation == 2
        )
    )
    copy.restore()
    wait(lambda: rig.store.attempt(row.id, 1).generation == 2)
    assert "generation 2 is running" in _texts(rig, row.id)
    for task in ("worker-0", "worker-1"):
        journal = LocalTaskDir(str(_directory(rig, row.id, 1, task))).read(layout.JOURNAL)
        assert journal.count(b'"generation":2') and not journal.count(b'"generation":3')
    rig.controller.stop_run(row.id, kill=True, by="ada")
    assert rig.ended(row.id).state == "stopped"


def test_a_run_that_was_resumed_after_the_copy_was_made_is_taken_over(rig: Rig) -> None:
    row = rig.submit(["fail", "hang"])
    assert rig.ended(row.id).state == "failed"
    copy = Copy(rig)
    rig.controller.resume(row.id, key="again", secrets={}, changes=())
    rig.until(row.id, "running")
    copy.restore()
    found = rig.until(row.id, "running")
    assert (found.attempt, found.cause, found.ended_at, found.desired) == (2, None, None, "run")
    assert LocalTaskDir(str(_directory(rig, row.id, 2))).read(layout.JOURNAL).count(b'"starting"') == 1
    rig.controller.stop_run(row.id, kill=True, by="ada")
    assert rig.ended(row.id).state == "stopped"


def test_a_run_that_the_copy_does_not_know_at_all_is_left_alone_until_it_is_forgotten(rig: Rig) -> None:
    copy = Copy(rig)
    row = rig.submit("hang")
    other = rig.submit("hang")
    for one in (row, other):
        rig.until(one.id, "running")
    copy.restore()
    wait(lambda: {one["id"] for one in rig.controller.unknown() if one["tasks"]} == {row.id, other.id})
    with pytest.raises(NotFound):
        rig.controller.forget(["nothing-1"])
    known = rig.submit("train")
    assert rig.ended(known.id).state == "succeeded", "the loop has observed the tasks many times by then"
    wait(lambda: _alive(rig) == {row.id, other.id})
    (forgotten,) = rig.controller.forget([row.id])
    assert (forgotten["name"], len(forgotten["tasks"])) == (row.name, 1)
    wait(lambda: _alive(rig) == {other.id})
    assert _directory(rig, row.id, 1).is_dir()
    rig.restart()
    wait(lambda: [one["id"] for one in rig.controller.unknown()] == [other.id])
    rig.controller.forget([])
    wait(lambda: not rig.controller.unknown())


def _alive(rig: Rig) -> set[str]:
    return {one.run for one in asyncio.run(rig.engine.observe()) if one.presence is Presence.ALIVE}
