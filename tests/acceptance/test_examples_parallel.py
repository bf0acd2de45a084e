"""The parallel examples that need numpy only, through Stoker: they end, and end right when a worker dies."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from box import Box, wait

PARALLEL = Path(__file__).parents[2] / "examples" / "parallel"


def final(text: str) -> tuple[float, float, int]:
    """Loss, accuracy, steps; said once, or by all alike."""
    found = set(re.findall(r"final loss ([0-9.]+) accuracy ([0-9.]+) after (\d+) steps", text))
    assert len(found) == 1, text
    loss, accuracy, steps = found.pop()
    return float(loss), float(accuracy), int(steps)


def kill(box: Box, run: str, task: str) -> None:
    """The training process of a task, by its environment."""
    mark = f"STOKER_TASK_DIR={box.home.tasks / run / '1' / task}\0".encode()

    def pids() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    for pid in wait(pids):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("staleness", ["0", "4", "inf"])
def test_the_parameter_server_with_any_staleness(box: Box, staleness: str) -> None:
    command = f"run=python train.py --staleness {staleness} --steps 1000"
    done = box("submit", "stoker.yaml", "--set", command, cwd=PARALLEL / "parameter-server", timeout=280)
    loss, accuracy, steps = final(done.stdout)
    assert steps == 1000
    assert loss < 0.1
    assert accuracy > 0.93
    ahead = [int(gap) for gap in re.findall(r"1000 steps, never more than (\d+) ahead", done.stdout)]
    assert len(ahead) == 2
    assert max(ahead) <= float(staleness)


@pytest.mark.parametrize("task", ["worker-1", "ps-0"])
def test_the_parameter_server_loses_no_step_with_a_task(box: Box, task: str) -> None:
    """Synchronous: then the result is known, and any step that is lost or counted twice shows in it."""
    command = "run=python train.py --staleness 0 --steps 600"
    folder = PARALLEL / "parameter-server"
    calm = box("submit", "stoker.yaml", "--set", command, cwd=folder, timeout=280)
    slow = f"{command} --delay 0.01"
    run = box("submit", "stoker.yaml", "-d", "--set", slow, cwd=folder).stdout.split()[0]
    wait(lambda: [each for each in box.show(run)["checkpoints"] if each["step"]])
    kill(box, run, task)
    assert box.ended(run)["state"] == "succeeded"
    said = box("logs", run).stdout
    assert final(said) == final(calm.stdout)
    if task == "worker-1":
        assert re.search(r"worker 1 begins at step [1-9]", said), said


def test_gossip_goes_on_from_everybodys_part(box: Box) -> None:
    command = "run=python train.py --steps 3000 --save-every 100"
    run = box("submit", "stoker.yaml", "-d", "--set", command, cwd=PARALLEL / "gossip").stdout.split()[0]
    wait(lambda: box.show(run)["checkpoints"])
    kill(box, run, "worker-1")
    assert box.ended(run)["state"] == "succeeded"
    said = box("logs", run).stdout
    _, accuracy, steps = final(said)
    assert (steps, accuracy > 0.95) == (3000, True)
    for worker in (0, 1):
        assert re.search(rf"worker {worker}: going on after step [1-9]", said), said
