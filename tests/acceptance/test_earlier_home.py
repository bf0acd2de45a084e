"""This version takes over a home of an earlier Stoker with active runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import earlier
from support.box import Box
from support.waiting import wait

TRAIN = """
import json, os, sys, time
import stoker
first = 0
if "STOKER_RESUME_FROM" in os.environ:
    with open(os.environ["STOKER_RESUME_FROM"]) as file:
        first = json.load(file)["step"] + 1
print("from", first, flush=True)
for step in range(first, 6):
    while step >= 3 and not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
        if first == 0 and os.environ.get("STOKER_RANK") == "1" and os.path.exists(sys.argv[1] + ".die"):
            os.kill(os.getpid(), 9)
    stoker.report(step=step, loss=1.0 / (step + 1))
    print("step", step, flush=True)
    stoker.checkpoint.save(f"state-{step}.json", json.dumps({"step": step}), step=step)
with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], "result.txt"), "w") as file:
    file.write("complete")
"""


@pytest.mark.long
def test_a_home_of_an_earlier_version_with_runs_under_way(tmp_path: Path) -> None:
    before = Box(tmp_path, env={"PYTHONPATH": str(earlier.source(tmp_path / "earlier"))})
    box = Box(tmp_path)
    go = tmp_path / "go"
    box.write("train.py", TRAIN)
    try:
        go.touch()
        done = before.submit("--name", "done", "--cpu", "0.2", "train.py", str(go))
        assert before.ended(done)["state"] == "succeeded"
        go.unlink()
        single = before.submit("--name", "single", "--cpu", "0.2", "train.py", str(go))
        gang = before.submit(
            "--name", "gang", "--workers", "2", "--retries", "1", "--cpu", "0.2", "train.py", str(go)
        )
        ended = before.submit("--name", "ended", "--cpu", "0.2", "train.py", str(tmp_path / "other"))
        queued = before.submit("--name", "queued", "--cpu", str(os.cpu_count()), "train.py", str(go))
        for run in (single, gang, ended):
            wait(
                lambda run=run: before.show(run)["checkpoints"],
                lambda kept: "state-2.json" in [one["name"] for one in kept],
            )
        before.kill_server()
        (tmp_path / "other").touch()  # its body ends while no server runs
        assert {run["id"]: run["state"] for run in box.json("ps", "--all")} == {
            done: "succeeded",
            single: "running",
            gang: "running",
            ended: box.show(ended)["state"],
            queued: "queued",
        }
        assert box.show(done)["outputs"]["files"] == 1
        assert box.ended(ended)["state"] == "succeeded"
        Path(f"{go}.die").touch()
        wait(lambda: box.show(gang)["attempts"], lambda attempts: attempts[-1]["generation"] == 2)
        go.touch()
        for run in (single, gang, queued):
            assert box.ended(run)["state"] == "succeeded", box("why", run).stdout
        assert [len(box.show(run)["attempts"]) for run in (single, gang, ended)] == [1, 1, 1]
        assert box("logs", single, "--stdout").stdout.splitlines() == [
            "from 0",
            *(f"step {n}" for n in range(6)),
        ]
        assert "from 3" in box("logs", gang, "--stdout").stdout
        assert [point[0] for point in box.client().metric(single, "loss")["points"]] == list(range(6))
        for run in (single, gang, ended):
            assert "state-5.json" in [one["name"] for one in box.show(run)["checkpoints"] if one["kept"]]
        box("pull", done, "-o", "here")
        assert (box.work / "here" / "result.txt").read_text() == "complete"
    finally:
        box.close()
