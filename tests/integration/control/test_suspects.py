"""A node with too many failures is avoided until a run succeeds there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.base import Node
from stoker.task.formats import Order, TaskInfo
from stoker.testing.fake_engine import Behaviour
from support.control.rigs import Rig
from support.waiting import wait


def scripted(info: TaskInfo, order: Order) -> Behaviour:
    return Behaviour(launcher_dies=True) if order.argv == ["die"] else Behaviour(hang=order.argv == ["hang"])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    nodes = [Node("bad", cpu=1, memory=8 << 30), Node("good", cpu=1, memory=8 << 30)]
    made = Rig(tmp_path, scripted, nodes)
    yield made
    made.close()


def aside(rig: Rig, name: str) -> list[dict[str, Any]]:
    return next(list(one["set_aside"]) for one in rig.controller.nodes() if one["name"] == name)


def node(rig: Rig, run: str) -> str:
    wait(lambda: rig.store.run(run).attempt)
    return str(rig.store.attempt(run, rig.store.run(run).attempt).placement["worker-0"].node)


def test_a_node_on_which_runs_are_lost_again_and_again_is_set_aside(rig: Rig) -> None:
    blocker = rig.submit("hang", name="blocker", resources={"cpu": 1})
    rig.until(blocker.id, "running")
    free = next(one["name"] for one in rig.controller.nodes() if not one["runs"])
    rig.ended(rig.submit("die", resources={"cpu": 1}).id)
    assert not aside(rig, free), "a single run may crash every machine it uses"
    second = rig.submit("die", resources={"cpu": 1})
    wait(lambda: aside(rig, free))
    for one in (second, blocker):
        rig.controller.stop_run(one.id, kill=True, by="ada")
        rig.engine.advance(5)
        rig.ended(one.id)
    assert "lost" in aside(rig, free)[0]["reason"]
    shown = [one["name"] for one in rig.controller.nodes()]
    other = next(name for name in shown if name != free)
    run = rig.submit("train", resources={"cpu": 1})
    rig.ended(run.id)
    assert node(rig, run.id) == other
