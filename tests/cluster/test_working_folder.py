"""Scripts that know nothing of Stoker, in pods: what they write into their working folder is kept and there again."""

from __future__ import annotations

import pytest
from boxes import ClusterBox
from faulting import box

from support.ordinary_script import TRAIN
from support.waiting import wait

__all__ = ["box"]

pytestmark = pytest.mark.timeout(900)

SMALL = ("--cluster", "lab", "--cpu", "0.1", "--memory", "128Mi", "--grace", "2s", "--retries", "1")


def begun(box: ClusterBox, run: str) -> list[str]:
    return sorted(line for line in box("logs", run).stdout.splitlines() if "from" in line)


def test_a_killed_script_goes_on_and_its_files_are_pulled(box: ClusterBox) -> None:
    box.write("train.py", TRAIN)
    run = box.submit(*SMALL, "--", "python3", "train.py", "--wait", "/nowhere")
    wait(lambda: box("logs", run).stdout, lambda text: "epoch 1" in text, limit=240)
    box.lose(run, "process", "worker-0")
    assert box.ended(run, limit=240)["state"] == "succeeded"
    assert begun(box, run) == ["from 0", "from 2"]
    box("pull", run)
    assert (box.work / run / "files/runs/exp/log.csv").read_text().split() == ["0", "1", "2", "3"]


def test_the_pods_of_a_world_start_again_from_the_files_of_the_first(box: ClusterBox) -> None:
    box.write("train.py", TRAIN)
    run = box.submit(*SMALL, "--workers", "2", "--", "python3", "train.py", "--wait", "/nowhere")
    wait(lambda: box("logs", run).stdout, lambda text: text.count("epoch 1") == 2, limit=240)
    box.lose(run, "process", "worker-1")
    assert box.ended(run, limit=240)["state"] == "succeeded"
    assert begun(box, run) == [
        "[worker-0] from 0",
        "[worker-0] from 2",
        "[worker-1] from 0",
        "[worker-1] from 2",
    ]
    kept = {file["path"] for file in box.client().files(run, what="files")["files"]}
    assert {"checkpoints/last.pkl", "plot.png", "up-1-1-0", "up-1-1-1"} <= kept
