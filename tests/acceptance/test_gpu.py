"""On a machine with an NVIDIA GPU and torch: a GPU is detected, measured, and given to one run at a time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.box import Box
from support.waiting import wait


def _gpus() -> int:
    if not Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.stdout.count("GPU ")


COUNT = _gpus()
pytestmark = pytest.mark.skipif(COUNT == 0, reason="no NVIDIA GPU on this machine")

TORCH = """
import os, sys, time, torch
print(os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count(), flush=True)
path = os.environ.get("STOKER_RESUME_FROM")
first = torch.load(path)["step"] + 1 if path else 0
print("from", first, flush=True)
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
for step in range(first, int(sys.argv[1])):
    for _ in range(50):
        y = x @ x
    torch.cuda.synchronize()
    target = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "last.pt")
    torch.save({"step": step, "y": y[:64].cpu()}, target + ".tmp")
    os.replace(target + ".tmp", target)
    print("step", step, flush=True)
    time.sleep(0.05)
"""


def test_doctor_and_nodes_name_the_gpus(box: Box) -> None:
    node = box.json("nodes")
    node = node["nodes"][0] if isinstance(node, dict) else node[0]
    assert len(node["gpus"]) == COUNT
    assert all(gpu["memory"] > 1 << 30 and gpu["healthy"] for gpu in node["gpus"])
    assert node["gpus"][0]["model"] in box("nodes").stdout + box("doctor", code=None).stdout


def test_a_gpu_run_is_seen_and_measured(box: Box) -> None:
    box.write("train.py", TORCH)
    run = box.submit("--gpu", "1", "train.py", "150")
    shown = box.ended(run, limit=280)
    assert shown["state"] == "succeeded", shown["reason"]
    visible, count = box("logs", run).stdout.splitlines()[0].split()
    assert visible and count == "1"
    usage = shown["attempts"][0]["usage"]
    assert usage["gpu_memory_peak"] > 100 << 20
    assert usage["gpu_peak"] > 0
    print(json.dumps(usage))


def test_a_run_without_gpus_sees_none(box: Box) -> None:
    box.write(
        "train.py",
        "import os, torch\nprint(repr(os.environ['CUDA_VISIBLE_DEVICES']), torch.cuda.is_available())\n",
    )
    assert box("run", "train.py").stdout == "'' False\n"


def test_more_than_there_are_is_refused_and_the_next_waits(box: Box) -> None:
    refused = box("run", "-d", "--gpu", str(COUNT + 1), "--", "true", code=2)
    assert "GPU" in refused.stderr
    first = box.submit("--gpu", str(COUNT), "--", "sleep", "600")
    box.until(first, "running")
    second = box.submit("--gpu", "1", "--", "true")
    assert "GPU" in box("why", second).stdout
    third = box.submit("--", "true")
    assert box.ended(third)["state"] == "succeeded", (
        "a run without GPUs must not wait behind one that needs them"
    )
    assert box.show(second)["state"] == "queued"
    box("stop", first, "--kill")
    assert box.ended(second)["state"] == "succeeded"


def test_a_killed_gpu_run_resumes_on_a_gpu_that_is_free_again(box: Box) -> None:
    box.write("train.py", TORCH)
    run = box.submit("--gpu", "1", "--retries", "3", "train.py", "200")
    for how in ("process", "launcher"):
        wait(
            lambda: any(
                line.startswith("step") for line in box("logs", run, "--tail", "3").stdout.splitlines()
            )
        )
        report = box("drill", run, "--how", how)
        print(report.stdout)
        box.until(run, "running", limit=280)
    shown = box.ended(run, limit=280)
    assert shown["state"] == "succeeded"
    assert [attempt["cause"] for attempt in shown["attempts"]] == ["user-error", "lost", "completed"]
    steps = [int(line.split()[1]) for line in box("logs", run).stdout.splitlines() if line.startswith("step")]
    assert sorted(set(steps)) == list(range(200))


def test_a_gpu_that_somebody_else_holds_is_not_handed_out(box: Box) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", "import torch, sys\nx = torch.zeros(1 << 30, device='cuda')\nprint('held', flush=True)\nsys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        box("server", "start")
        wait(lambda: not _node(box)["gpus"][0]["healthy"])
        assert _node(box)["gpus"][0]["reason"]
    finally:
        holder.kill()
        holder.communicate()
    wait(lambda: _node(box)["gpus"][0]["healthy"])
    box("run", "--gpu", "1", "--", "true")


def _node(box: Box) -> dict:
    return box.client().nodes()["nodes"][0]
