"""The same job here and in the cluster: same states, causes, checkpoints, outputs, metrics and lines."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
from boxes import CLUSTER, ClusterBox, box

from support.gangs import WORLDS
from support.waiting import wait

__all__ = ["box"]

pytestmark = pytest.mark.timeout(600)

TRAIN = """
import json, os, sys, time
import stoker

mode = sys.argv[1]
start = 0
if os.environ.get("STOKER_RESUME_FROM"):
    start = json.load(open(os.environ["STOKER_RESUME_FROM"]))["step"] + 1
    print("goes on at", start, flush=True)
for step in range(start, 5):
    stoker.report(step=step, loss=1.0 / (step + 1))
    path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], f"step-{step}.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step}, file)
    os.replace(path + ".tmp", path)
    print("step", step, flush=True)
    if mode == "fail" and step == 2:
        sys.exit(3)
    if mode == "once" and step == 2 and start == 0:
        time.sleep(4)
        sys.exit(4)
    if mode == "signal" and step == 1:
        os.kill(os.getpid(), 9)
    if mode == "hang" and step >= 1:
        while True:
            time.sleep(0.1)
with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], "model.txt"), "w") as file:
    file.write("weights " + os.environ["WORD"] + " " + os.environ.get("KEY", "none"))
print("done", os.environ["WORD"], file=sys.stderr)
"""

GANG = """
import json, os, sys, time
import stoker, worlds

mode = sys.argv[1]
rank, size, generation = (int(os.environ["STOKER_" + name]) for name in ("RANK", "WORLD_SIZE", "GENERATION"))
start = 0
if os.environ.get("STOKER_RESUME_FROM"):
    start = json.load(open(os.environ["STOKER_RESUME_FROM"]))["step"] + 1
    print("rank", rank, "goes on at", start, "in generation", generation, flush=True)
links = worlds._meet(rank, size, str(generation))
for step in range(start, 4):
    total = worlds._reduce(rank, links, (step + 1) * 10 ** rank)
    stoker.report(step=step, total=total)
    if rank == 0:
        path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], f"step-{step}.json")
        with open(path + ".tmp", "w") as file:
            json.dump({"step": step}, file)
        os.replace(path + ".tmp", path)
    print("rank", rank, "step", step, "total", total, flush=True)
    if mode == "fail" and step == 2 and rank == 1:
        time.sleep(2)  # the other one, which will be told to stop then, is to have got as far
        sys.exit(3)
    while generation == 1 and (mode, step) in (("fail", 2), ("hang", 1)):
        time.sleep(0.1)
with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], f"model-{rank}.txt"), "w") as file:
    file.write("weights " + str(total))
"""

JOB = """
name: parity
run: {run}
image: {image}
env: {{WORD: hello}}
resources: {{cpu: 0.2, memory: 256Mi}}
grace: 5s
{more}
"""


def told(box: ClusterBox, run: str) -> dict[str, Any]:
    """Everything that a user is shown of a run and that must not depend on where it ran."""
    shown = box.show(run)
    lines = box("logs", run).stdout.splitlines()
    outputs = box.client().files(run)["files"]
    keys = box.client().metrics(run)["keys"]
    return {
        "state": shown["state"],
        "exit_code": shown["exit_code"],
        "cause": shown["cause"],
        "reason": re.sub(r"[\d,]+ MiB", "N MiB", shown["reason"]),
        "attempts": [
            {
                "cause": attempt["cause"],
                "exit_code": attempt["exit_code"],
                "kind": (attempt["evidence"] or {}).get("kind"),
                "signal": (attempt["evidence"] or {}).get("signal"),
                "limit": (attempt["evidence"] or {}).get("limit"),
                "resumed": bool(attempt.get("resumed_from")),
                "generation": attempt["generation"],
                "world": attempt["world"],
                "tasks": [{key: task[key] for key in TASK} for task in attempt["tasks"]],
            }
            for attempt in shown["attempts"]
        ],
        "checkpoints": sorted(
            (ck["attempt"], ck["name"], ck["size"], ck["kept"]) for ck in shown["checkpoints"]
        ),
        "outputs": sorted((file["path"], file["sha256"]) for file in outputs),
        "metrics": {
            key["key"]: [point[:2] for point in box.client().metric(run, key["key"])["points"]]
            for key in keys
        },
        "lines": sorted(line for line in lines if not NOISE.search(line)),
        "events": [event["kind"] for event in box.client().events(run)["events"] if event["kind"] in KINDS],
    }


NOISE = re.compile(r"ensurepip|going on without")
"""Warnings of an image without pip when `setup` makes an environment."""
TASK = ("name", "role", "incarnation", "generation", "phase", "exit_code")
KINDS = (
    "queued",
    "starting",
    "running",
    "stopping",
    "requeued",
    "reforming",
    "generation",
    "restored",
    "ended",
)


def both(
    box: ClusterBox,
    run: str,
    more: str = "",
    *args: str,
    meanwhile: Callable[[str], None] = lambda run: None,
) -> dict[str, Any]:
    """Run one job file here and in the cluster, and compare the results key by key."""
    box.write("train.py", TRAIN)
    box.write("gang.py", GANG)
    shutil.copy(WORLDS, box.work)
    box.write("stoker.yaml", JOB.format(run=run, image="null", more=more).replace("image: null\n", ""))
    runs = {
        where: box.json("submit", "-d", "stoker.yaml", "--set", f"cluster={where}", *args)["id"]
        for where in ("local", CLUSTER)
    }
    for name in runs.values():
        meanwhile(name)
    found = {}
    for where, name in runs.items():
        box.ended(name, limit=180)
        found[where] = told(box, name)
    here, there = found["local"], found[CLUSTER]
    assert here.keys() == there.keys()
    for key in here:
        assert here[key] == there[key], key
    return here


def test_a_training_that_succeeds(box: ClusterBox) -> None:
    found = both(box, "python3 train.py train")
    assert (found["state"], found["exit_code"]) == ("succeeded", 0)
    assert found["metrics"]["loss"] == [[step, 1.0 / (step + 1)] for step in range(5)]
    assert [path for path, _ in found["outputs"]] == ["model.txt"]
    assert [name for _, name, _, kept in found["checkpoints"] if kept] == [
        f"step-{n}.json" for n in (2, 3, 4)
    ]


def test_a_training_that_fails(box: ClusterBox) -> None:
    found = both(box, "python3 train.py fail")
    assert (found["state"], found["exit_code"], found["cause"]) == ("failed", 3, "user-error")


def test_a_retry_goes_on_from_the_checkpoint(box: ClusterBox) -> None:
    found = both(box, "python3 train.py once", "retries: 1")
    assert found["state"] == "succeeded" and "goes on at 3" in found["lines"]


def test_a_process_that_is_killed(box: ClusterBox) -> None:
    found = both(box, "[python3, train.py, signal]")
    assert found["attempts"][0]["signal"] == signal.Signals.SIGKILL.name


def test_out_of_memory(box: ClusterBox) -> None:
    found = both(box, "python3 -c 'x = bytearray(600 << 20); print(len(x))'")
    assert found["cause"] == "oom"
    assert found["attempts"][0]["limit"] == 256 << 20


def test_a_timeout(box: ClusterBox) -> None:
    assert both(box, "python3 train.py hang", "timeout: 10s")["cause"] == "timeout"


def test_no_such_command(box: ClusterBox) -> None:
    assert both(box, "[trian, --fast]")["exit_code"] == 127


def test_a_setup_that_fails(box: ClusterBox) -> None:
    assert both(box, "python3 train.py train", "setup: 'echo preparing; exit 9'")["cause"] == "setup"


def test_secrets(box: ClusterBox) -> None:
    box.env["KEY"] = "hush-hush-0815"
    found = both(box, "python3 train.py train", "secrets: [KEY]")
    assert found["state"] == "succeeded"
    assert "hush-hush-0815" not in box.kubectl("get", "pods", "-o", "yaml")


def test_a_stop_with_grace(box: ClusterBox) -> None:
    def stop(run: str) -> None:
        box.until(run, "running")
        wait(lambda: "step 1" in box("logs", run).stdout)
        box("stop", run)

    found = both(box, "python3 train.py hang", meanwhile=stop)
    assert (found["state"], found["cause"]) == ("stopped", "stopped")


@pytest.mark.parametrize("how", ["process", "launcher"])
def test_a_drill(box: ClusterBox, how: str) -> None:
    def hurt(run: str) -> None:
        box.until(run, "running")
        wait(lambda: any(ck["name"] == "step-1.json" for ck in box.show(run)["checkpoints"]))
        box.client().drill(run, how)
        wait(lambda: box.show(run)["attempts"][-1]["number"] == 2 and box.show(run)["state"] == "running")
        wait(lambda: any(ck["name"] == "step-2.json" for ck in box.show(run)["checkpoints"]))
        box("stop", run)

    found = both(box, "python3 train.py hang", "retries: 1", meanwhile=hurt)
    assert found["attempts"][0]["cause"] == "lost", "killed from outside"


WORKERS = "workers: 2\nframework: none\n"


def test_two_workers_that_succeed(box: ClusterBox) -> None:
    found = both(box, "python3 gang.py train", WORKERS)
    assert found["state"] == "succeeded"
    assert [path for path, _ in found["outputs"]] == ["model-0.txt", "model-1.txt"]
    assert found["metrics"]["total"] == [[step, 11.0 * (step + 1)] for step in range(4)]
    assert [task["phase"] for task in found["attempts"][0]["tasks"]] == ["ended", "ended"]


def test_two_workers_of_which_one_fails(box: ClusterBox) -> None:
    found = both(box, "python3 gang.py fail", WORKERS)
    assert (found["state"], found["exit_code"], found["cause"]) == ("failed", 3, "user-error")
    assert "worker-1" in found["reason"]


@pytest.mark.parametrize(("how", "retries", "incarnation"), [("process", 1, 1), ("launcher", 0, 2)])
def test_two_workers_of_which_one_is_killed(
    box: ClusterBox, how: str, retries: int, incarnation: int
) -> None:
    """The same generations, replacement, values and checkpoint."""

    def hurt(run: str) -> None:
        wait(lambda: any(ck["name"] == "step-1.json" for ck in box.show(run)["checkpoints"]))
        wait(lambda: "rank 1 step 1" in box("logs", run).stdout)
        box.client().drill(run, how, "worker-1")

    found = both(box, "python3 gang.py hang", f"{WORKERS}retries: {retries}", meanwhile=hurt)
    assert found["state"] == "succeeded"
    assert [attempt["generation"] for attempt in found["attempts"]] == [2]
    assert [task["incarnation"] for task in found["attempts"][0]["tasks"]] == [1, incarnation]
    assert {"rank 0 goes on at 2 in generation 2", "rank 1 goes on at 2 in generation 2"} <= {
        line.partition("] ")[2] for line in found["lines"]
    }
    assert found["metrics"]["total"] == [[step, 11.0 * (step + 1)] for step in range(4)]
