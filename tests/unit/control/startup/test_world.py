"""The addresses and ports of a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.control.startup import world
from stoker.control.state import LiveRun, tasks_of
from stoker.engine.base import Observation, Presence
from stoker.frameworks.roles import parts_of
from stoker.settings import Home
from stoker.spec import Job
from stoker.store.placement import TaskPlacement
from stoker.store.rows import AttemptRow, RunRow


def live_of(placement: dict[str, dict[str, Any]]) -> LiveRun:
    job = Job.from_json({"name": "digits", "run": "train", "workers": len(placement)})
    row = RunRow(
        id="digits-7f3k",
        seq=1,
        key="key",
        name="digits",
        project="default",
        user="ada",
        state="running",
        desired="run",
        priority=0,
        tags=(),
        job=job.to_json(),
        command=["train"],
        code=None,
        record={},
        created_at=0.0,
    )
    places = {task: TaskPlacement(node="n0", **place) for task, place in placement.items()}
    attempt = AttemptRow(row.id, 1, engine="lab", generation=2, placement=places)
    live = LiveRun(row, job, parts_of(job), attempt, tasks_of(parts_of(job), attempt))
    for index, task in enumerate(live.tasks.values()):
        where = f"10.0.0.{index + 1}"
        task.seen = Observation(row.id, 1, task.name, 1, Presence.ALIVE, handle={}, address=where)
    return live


def ports(tmp_path: Path, live: LiveRun) -> list[tuple[int, ...]]:
    found = world.world(live, Home(tmp_path), 29400)
    assert found is not None
    return [member.ports for member in found.members]


def test_nobody_listens_where_a_member_that_was_given_up_would_knock(tmp_path: Path) -> None:
    """A surviving member keeps its address, but not the port at which a resumed old member would reach it."""
    first = ports(tmp_path, live_of({"worker-0": {}, "worker-1": {}}))
    moved = ports(tmp_path, live_of({"worker-0": {"moved": 1}, "worker-1": {"moved": 1, "given_up": True}}))
    assert first == [(29400,), (29400,)]
    assert not {port for found in first for port in found} & {port for found in moved for port in found}


@pytest.mark.parametrize("times", [1, 255, 256, 10_000])
def test_ports_stay_below_the_ephemeral_range(tmp_path: Path, times: int) -> None:
    for found in ports(tmp_path, live_of({"worker-0": {"moved": times}, "worker-1": {"moved": times}})):
        assert all(29400 <= port < 32768 for port in found)
