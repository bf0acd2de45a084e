"""The parallel examples that need only numpy, through Stoker: they succeed, also when a worker dies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from support.box import Box
from support.frameworks.worlds import PARALLEL, final
from support.processes import of_task
from support.waiting import wait


def kill(box: Box, run: str, task: str) -> None:
    """Kill the training process of a task, found by its environment."""
    directory = box.home.tasks / run / "1" / task

    def killed() -> list[int]:
        """Another process of the body may have ended meanwhile."""
        hit = []
        for pid in of_task(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                hit.append(pid)
        return hit

    assert wait(killed)


@pytest.mark.shared_server
@pytest.mark.long
@pytest.mark.parametrize("staleness", ["4", "inf"])
def test_the_parameter_server_when_not_in_step(box: Box, staleness: str) -> None:
    command = f"run=python train.py --staleness {staleness} --steps 1000"
    done = box("submit", "stoker.yaml", "--set", command, cwd=PARALLEL / "parameter-server", timeout=280)
    loss, accuracy, steps = final(done.stdout, by_all=True)
    assert steps == 1000
    assert loss < 0.1
    assert accuracy > 0.93
    ahead = [int(gap) for gap in re.findall(r"1000 steps, never more than (\d+) ahead", done.stdout)]
    assert len(ahead) == 2
    assert max(ahead) <= float(staleness)


@pytest.mark.shared_server
@pytest.mark.long
@pytest.mark.parametrize("task", ["worker-1", "ps-0"])
def test_the_parameter_server_loses_no_step_with_a_task(box: Box, task: str) -> None:
    """Synchronous: the result equals that of one worker, so it shows a lost or repeated step."""
    folder = PARALLEL / "parameter-server"
    words = ["--staleness", "0", "--steps", "600"]
    alone = subprocess.run(
        [sys.executable, str(folder / "train.py"), *words],
        cwd=box.work, env=box.env, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    command = f"run=python train.py {' '.join(words)} --delay 0.01"
    run = box("submit", "stoker.yaml", "-d", "--set", command, cwd=folder).stdout.split()[0]
    wait(lambda: [each for each in box.show(run)["checkpoints"] if each["step"]])
    kill(box, run, task)
    assert box.ended(run)["state"] == "succeeded"
    said = box("logs", run).stdout
    assert final(said, by_all=True) == final(alone.stdout, by_all=True)
    if task == "worker-1":
        assert re.search(r"worker 1 begins at step [1-9]", said), said


@pytest.mark.shared_server
def test_gossip_resumes_from_the_parts_of_all_workers(box: Box) -> None:
    command = "run=python train.py --steps 3000 --save-every 100"
    run = box("submit", "stoker.yaml", "-d", "--set", command, cwd=PARALLEL / "gossip").stdout.split()[0]
    wait(lambda: box.show(run)["checkpoints"])
    kill(box, run, "worker-1")
    assert box.ended(run)["state"] == "succeeded"
    said = box("logs", run).stdout
    _, accuracy, steps = final(said, by_all=True)
    assert (steps, accuracy > 0.95) == (3000, True)
    for worker in (0, 1):
        assert re.search(rf"worker {worker}: going on after step [1-9]", said), said


@pytest.mark.shared_server
@pytest.mark.long
def test_the_scaling_benchmark_measures_what_show_says(box: Box) -> None:
    script = str(PARALLEL.parent / "scaling" / "scaling.py")
    small = ["--workers", "1", "2", "--set", "run=python train.py --epochs 8 --batch 1347", "--json"]
    done = subprocess.run(
        [sys.executable, script, *small],
        cwd=box.work, env=box.env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)
    assert (one["workers"], one["efficiency"], two["workers"]) == (1, 1.0, 2)
    assert two["unit"] == "samples"
    assert two["efficiency"] == pytest.approx(two["rate"] / one["rate"] / 2)
    shown = box.json("show", two["run"])["scaling"]
    assert (shown["against"], shown["basis"]) == (one["run"], "samples")
    assert shown["efficiency"] == pytest.approx(two["efficiency"], abs=0.001)
