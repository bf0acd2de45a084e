"""An error at one task does not lose what was read from the others."""

from __future__ import annotations

import asyncio
import errno
import time
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.control.ingest.journal_reader import Intake
from stoker.control.runs.task_reader import TaskReader
from stoker.task.formats import Status


class Pump:
    """An ingester, and its reader."""

    def __init__(self, found: Intake | Exception) -> None:
        self.found = found
        self.reader: Any = self

    def look(self, *, final: bool) -> Intake:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Loop:
    """A context that records its wake-ups."""

    def __init__(self) -> None:
        self.later: list[float] = []
        self.wakeups = self

    def kick_later(self, live: Any, delay: float) -> None:
        self.later.append(delay)


def task(name: str, found: Intake | Exception) -> Any:
    return SimpleNamespace(
        name=name, ingester=Pump(found), generation=1, ordered=True, over=False, touched=True, gone=None
    )


def look(loop: Loop, *tasks: Any) -> dict[str, Intake]:
    row = SimpleNamespace(desired="kill")
    live = SimpleNamespace(id="digits-1", row=row, tasks={one.name: one for one in tasks})
    return asyncio.run(TaskReader(loop).look(live))  # type: ignore[arg-type]


def test_results_of_the_other_tasks_count() -> None:
    loop = Loop()
    good = Intake(status=Status("running", generation=1), generation=1, visible=True)
    away = task("worker-1", OSError(errno.EIO, "the courier does not answer"))
    found = look(loop, task("worker-0", good), away)
    assert found["worker-0"] is good
    assert found["worker-1"].status is None and found["worker-1"].changes == []
    assert away.touched and len(loop.later) == 1, "it is looked at again"


def test_an_unexpected_error_is_raised() -> None:
    with pytest.raises(PermissionError):
        look(Loop(), task("worker-0", PermissionError(errno.EPERM, "no")))


class Flooded(Pump):
    """Each look finds more."""

    spoiled, said = True, 0

    def __init__(self) -> None:
        super().__init__(
            Intake(
                status=Status("ended", generation=1, ending=ENDED),
                generation=1,
                visible=True,
                more=True,
                heard=False,
            )
        )

    def leave_unread(self, found: Intake) -> None:
        self.said += 1

    def look_round(self, *, had_status: bool) -> list[Any]:
        return []

    def read_before(self) -> None:
        return None


ENDED = {"generation": 1, "seq": 1, "kind": "stopped", "signal": 9}


def test_who_kills_a_run_does_not_wait_for_all_that_it_writes() -> None:
    """The training is dead; reading all that it wrote may never end."""
    for killed, over in ((None, False), (-1.0, False), (-60.0, True)):
        pump = Flooded()
        one = task("worker-0", Intake())
        one.ingester, one.stop_sent, one.stopped = pump, "kill", True
        one.killed_at = None if killed is None else time.monotonic() + killed
        one.unjournalled_since, one.reported, one.place = None, "ended", SimpleNamespace(ports=())

        def judge(verdict: Any, at: float, event: Any, one: Any = one) -> None:
            one.over = True

        one.judge = judge
        look(Loop(), one)
        assert (one.over, pump.said) == (over, int(over)), killed
