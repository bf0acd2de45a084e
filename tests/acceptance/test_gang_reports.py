"""The output of commands for a run with several tasks."""

from __future__ import annotations

import json
import re

import pytest

from support.box import Box
from support.waiting import wait

TRAIN = """\
import os, sys, time
import stoker

rank, size = int(os.environ.get("STOKER_RANK", 0)), int(os.environ.get("STOKER_WORLD_SIZE", 1))
found = os.environ.get("STOKER_RESUME_FROM")
first = int(open(found).read()) if found else 0
for step in range(first, int(sys.argv[1])):
    own = 0.03 if rank == 1 else 0.01
    time.sleep(0.03)
    stoker.report(step=step, loss=1.0 / (step + 1), compute_seconds=own, samples_per_second=300.0 if size == 1 else 225.0)
    if rank == 0 and step % 10 == 9:
        path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "last.txt")
        with open(path + ".tmp", "w") as file:
            file.write(str(step + 1))
        os.rename(path + ".tmp", path)
"""


@pytest.mark.shared_server
def test_show_of_several_tasks(box: Box) -> None:
    box.write("train.py", TRAIN)
    alone = box.submit("--name", "both", "--", "python", "train.py", "20")
    assert box.ended(alone)["state"] == "succeeded"
    run = box.submit(
        "--name", "both", "--workers", "2", "--framework", "none", "--", "python", "train.py", "100000"
    )
    shown = wait(
        lambda: box.show(run),
        lambda seen: (
            seen["scaling"] is not None
            and seen["attempts"][-1]["straggler"] is not None
            and all(task["usage"].get("step_seconds") for task in seen["attempts"][-1]["tasks"])
        ),
    )
    attempt = shown["attempts"][-1]
    assert [task["name"] for task in attempt["tasks"]] == ["worker-0", "worker-1"]
    assert (attempt["placed"], attempt["up"]) == (2, 2)
    assert attempt["world"]["text"] == "world of 2, generation 1"
    assert (attempt["straggler"]["task"], attempt["straggler"]["source"]) == ("worker-1", "compute")
    assert (shown["scaling"]["against"], shown["scaling"]["basis"]) == (alone, "samples")
    # Two tasks with 225 samples per second each, against one with 300.
    assert 0.5 < shown["scaling"]["efficiency"] < 1.0
    page = box("show", run).stdout
    assert re.search(r"worker-1 +local +1 +running ", page), page
    assert (
        "straggler  worker-1 is 3.0x slower than the others' median (from the compute time it reports)"
        in page
    )
    assert re.search(rf"{run} +running .* 2/2 ", box("ps").stdout)
    assert f"{run} worker-1" in box("top").stdout
    assert "it runs with all 2 tasks" in box("why", run).stdout
    box("stop", run, "--kill")


def test_a_task_is_drilled_and_the_world_comes_back(box: Box) -> None:
    box.write("train.py", TRAIN)
    run = box.submit("--workers", "2", "--framework", "none", "--", "python", "train.py", "100000")
    wait(lambda: box.show(run)["checkpoints"])
    wrong = box("drill", run, "--task", "worker-7", code=None)
    assert wrong.returncode != 0 and "There are: worker-0, worker-1." in wrong.stderr
    report = json.loads(box("drill", run, "--task", "worker-1", "--how", "launcher", "--json").stdout)
    assert (report["resumed"], report["attempt"], report["generation"]) == (True, 1, 2)
    assert report["from_checkpoint"] and report["did"].endswith(" of worker-1")
    page = box("show", run).stdout
    assert "world      of 2, generation 2; worker-1 was replaced once" in page
    assert "worker-1" in box("shell", "--json", run, "--task", "worker-1").stdout
    box("stop", run, "--kill")


@pytest.mark.shared_server
def test_a_dry_run_of_several_tasks(box: Box) -> None:
    box.write(
        "stoker.yaml", "run: python train.py\nworkers: 2\nframework: none\nroles: {ps: {run: python ps.py}}\n"
    )
    said = box("submit", "stoker.yaml", "--dry-run").stdout
    assert "would start 3 tasks" in said and re.search(r"ps-0 .* comes back alone +python ps.py", said), said
    refused = box("run", "--workers", "1000", "--cpu", "1", "--", "true", code=None)
    assert "it asks for 1000 tasks of 1 CPU at once; all nodes together hold" in refused.stderr
