"""A training whose log shows the effects of faults, and a cluster that may be broken.

The training logs each step, with an id of its process. So the log shows steps that were repeated or lost,
and processes that were fenced.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boxes import ClusterBox
from harness import Cluster

from support.waiting import wait

TRAIN = """
import json, os, sys, time, uuid
process = uuid.uuid4().hex[:8]
last = int(sys.argv[1])
start = 0
if os.environ.get("STOKER_RESUME_FROM"):
    start = json.load(open(os.environ["STOKER_RESUME_FROM"]))["step"] + 1
print("begin", process, start, flush=True)
for step in range(start, last):
    path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "last.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step, "process": process}, file)
    os.replace(path + ".tmp", path)
    print("step", process, step, flush=True)
    time.sleep(0.25)
with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], "model.json"), "w") as file:
    json.dump({"step": last, "process": process}, file)
print("end", process, flush=True)
"""


@pytest.fixture
def box(tmp_path: Path, cluster: Any, namespace: str) -> Iterator[ClusterBox]:
    if not isinstance(cluster, Cluster):
        pytest.skip("breaks parts of the cluster, which only the test's own cluster is for")
    made = ClusterBox(tmp_path, cluster, namespace)
    made.write("train.py", TRAIN)
    yield made
    for name in cluster.nodes:
        if "True" not in _ready(cluster, name):
            cluster.restore_node(name)
    made.close()


def _ready(cluster: Cluster, node: str) -> str:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    return cluster.kubectl("get", "node", node, "-o", f"jsonpath={path}")


def train(box: ClusterBox, steps: int, *flags: str) -> str:
    run = box.there(
        "--cpu", "0.1", "--memory", "128Mi", "--grace", "2s", *flags, "--", "python3", "train.py", str(steps)
    )
    box.until(run, "running", limit=180)
    wait(lambda: len(said(box, run, "step")) >= 3)
    return run


def said(box: ClusterBox, run: str, word: str) -> list[list[str]]:
    """The words after the given first word, of each line that begins with it."""
    lines = [line.split() for line in box("logs", run).stdout.splitlines()]
    return [parts[1:] for parts in lines if parts and parts[0] == word]


def steps(box: ClusterBox, run: str) -> list[int]:
    return [int(step) for _, step in said(box, run, "step")]


def whole(box: ClusterBox, run: str, last: int) -> None:
    """Every step was done in order, and only one process trained at a time."""
    done = steps(box, run)
    assert sorted(set(done)) == list(range(last)), "every step was done"
    order = [process for process, _ in said(box, run, "step")]
    turns = [process for at, process in enumerate(order) if at == 0 or order[at - 1] != process]
    assert len(turns) == len(set(turns)), "no process trained after another had taken over"


def undisturbed(box: ClusterBox, run: str, last: int) -> None:
    shown = box.ended(run, limit=300)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 1)
    assert steps(box, run) == list(range(last)), "every line arrived once, in order"
    assert len(said(box, run, "begin")) == 1


def node_of(box: ClusterBox, run: str) -> str:
    return str(box.pods(run)[0]["spec"]["nodeName"])
