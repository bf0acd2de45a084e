"""Kubernetes and Kubeflow manifests on this machine, without a container runtime.

Each is submitted with the real command line and really trains. Small scripts of the standard library meet
as those of the framework would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.box import Box

RUNTIMES = ("podman", "docker")


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Box]:
    """A box on a machine without podman and docker."""
    programs = tmp_path / "bin"
    programs.mkdir()
    box = Box(tmp_path)
    for folder in box.env["PATH"].split(os.pathsep):
        for program in Path(folder).iterdir() if folder and Path(folder).is_dir() else ():
            link = programs / program.name
            if program.name not in RUNTIMES and not link.is_symlink():
                link.symlink_to(program)
    box.env["PATH"] = str(programs)
    yield box
    box.close()


def submitted(box: Box, text: str, *flags: str) -> dict[str, Any]:
    """Submit the manifest and wait until the run has succeeded."""
    box.write("job.yaml", text)
    found: dict[str, Any] = box.json("submit", "job.yaml", "-d", "--lenient", *flags)
    box("wait", found["id"], timeout=240)
    whole: dict[str, Any] = box.json("show", found["id"])
    return whole


def printed(box: Box, run: str) -> list[Any]:
    """The JSON values that its tasks printed, without the prefix of task and rank."""
    return [json.loads(re.sub(r"^(\[[\w-]+\] )+", "", line)) for line in box("logs", run).stdout.splitlines()]


INDEX = """
import os, pathlib, sys
index = os.environ["JOB_COMPLETION_INDEX"]
done = pathlib.Path(sys.argv[1], index)
if sys.argv[2:] == [index] and not done.with_suffix(".failed").exists():
    done.with_suffix(".failed").touch()
    sys.exit("not the first time")
done.write_text(os.environ["STOKER_TASK_INDEX"])
"""
JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: indexed, namespace: research}
spec:
  completions: COMPLETIONS
  parallelism: 2
  completionMode: Indexed
  backoffLimit: 2
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: index
          image: python:3.12
          command: [python, index.py, /out/done, FAILS]
          volumeMounts: [{name: out, mountPath: /out}]
      volumes: [{name: out, persistentVolumeClaim: {claimName: results}}]
"""


@pytest.mark.parametrize(
    ("completions", "wanted"),
    [(2, {"0": "0", "1": "1"}), (5, {"0": "0", "1": "1", "2": "0", "3": "1", "4": "0"})],
)
def test_an_indexed_job(bare: Box, tmp_path: Path, completions: int, wanted: dict[str, str]) -> None:
    """Also with more completions than parallel tasks; one index fails the first time."""
    done = tmp_path / "results" / "done"
    done.mkdir(parents=True)
    bare.write("index.py", INDEX)
    text = JOB.replace("COMPLETIONS", str(completions)).replace("FAILS", '"1"')
    run = submitted(bare, text, "--volume", f"results={tmp_path / 'results'}")
    assert run["state"] == "succeeded"
    assert {path.name: path.read_text() for path in done.iterdir() if path.suffix != ".failed"} == wanted
    assert (done / "1.failed").exists()


MEET = """
import json, os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as server:
        total, others = 0, []
        while len(others) < size - 1:
            other = server.accept()[0]
            others.append(other)
            total += int(other.recv(16))
        for other in others:
            other.sendall(str(total).encode())
else:
    while True:
        try:
            one = socket.create_connection(where)
            break
        except OSError:
            time.sleep(0.05)
    one.sendall(str(rank).encode())
    total = int(one.recv(16))
print(json.dumps([os.environ["STOKER_ROLE"], rank, size, total, sys.argv[1:]]))
"""
PYTORCHJOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: ddp}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: Never
      template: {spec: {containers: [{name: pytorch, image: "torch:2", command: [python, meet.py]}]}}
    Worker:
      replicas: 2
      restartPolicy: Never
      template: {spec: {containers: [{name: pytorch, image: "torch:2", command: [python, meet.py, "--worker"]}]}}
"""


def test_a_pytorchjob(bare: Box) -> None:
    """The master has rank 0, and the ranks are summed over its address."""
    bare.write("meet.py", MEET)
    run = submitted(bare, PYTORCHJOB)
    assert run["state"] == "succeeded"
    said = printed(bare, run["id"])
    assert sorted(said, key=lambda one: int(one[1])) == [
        ["master", 0, 3, 3, []],
        ["worker", 1, 3, 3, ["--worker"]],
        ["worker", 2, 3, 3, ["--worker"]],
    ]


SERVE = """
import json, os, socket, time
config = json.loads(os.environ["TF_CONFIG"])
task, cluster = config["task"], config["cluster"]
host, port = cluster["ps"][0].rsplit(":", 1)
if task["type"] == "ps":
    total = 0
    with socket.create_server((host, int(port))) as server:
        while True:  # as parameter servers do, until no worker is left
            one = server.accept()[0]
            total += int(one.recv(16))
            one.sendall(str(total).encode())
while True:
    try:
        one = socket.create_connection((host, int(port)))
        break
    except OSError:
        time.sleep(0.05)
one.sendall(str(task["index"] + 1).encode())
print(json.dumps([sorted(cluster), task, int(one.recv(16)) > 0]))
"""
TFJOB = """
apiVersion: kubeflow.org/v1
kind: TFJob
metadata: {name: ps}
spec:
  successPolicy: AllWorkers
  runPolicy: {cleanPodPolicy: None}
  tfReplicaSpecs:
    PS:
      replicas: 1
      template: {spec: {containers: [{name: tensorflow, image: "tf:2", command: [python, serve.py]}]}}
    Worker:
      replicas: 2
      template: {spec: {containers: [{name: tensorflow, image: "tf:2", command: [python, serve.py]}]}}
"""


def test_a_tfjob(bare: Box) -> None:
    """The workers find the parameter server, which serves until they have ended."""
    bare.write("serve.py", SERVE)
    run = submitted(bare, TFJOB)
    assert run["state"] == "succeeded"
    said = printed(bare, run["id"])
    assert sorted(said, key=lambda one: int(one[1]["index"])) == [
        [["ps", "worker"], {"type": "worker", "index": index}, True] for index in (0, 1)
    ]


MPIJOB = """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: pi}
spec:
  slotsPerWorker: 1
  sshAuthMountPath: /home/mpiuser/.ssh
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      template: {spec: {containers: [{name: l, image: "mpi:4", command: [mpirun], args: [-n, "2", python, rank.py]}]}}
    Worker:
      replicas: 2
      template: {spec: {containers: [{name: w, image: "mpi:4", command: [/usr/sbin/sshd, -De]}]}}
"""
RANK = """
import json, os
print(json.dumps([os.environ["OMPI_COMM_WORLD_RANK"], os.environ["STOKER_TASK_INDEX"]]))
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no Open MPI on this machine")
def test_an_mpijob(bare: Box) -> None:
    """The launcher's own mpirun reaches the workers without ssh."""
    bare.write("rank.py", RANK)
    run = submitted(bare, MPIJOB)
    assert run["state"] == "succeeded"
    # On a busy machine mpirun may join two lines, and prints a warning of its own.
    said = re.findall(r'\["\d+", "\d+"\]', bare("logs", run["id"]).stdout)
    assert sorted(said) == ['["0", "0"]', '["1", "1"]']


TRAINJOBS = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: nodes}
spec:
  runtimeRef: {name: torch-distributed}
  trainer: {image: "torch:2", command: [python, meet.py], numNodes: 2, numProcPerNode: 2}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: elastic}
spec:
  elasticPolicy: {minReplicas: 1, maxReplicas: 2, rdzvBackend: c10d, maxRestarts: 1}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: torch:2
              command: [python, meet.py]
              resources: {limits: {cpu: 100m}}
"""


def test_a_trainjob_and_an_elastic_pytorchjob_in_one_file(bare: Box) -> None:
    bare.write("meet.py", MEET)
    bare.write("job.yaml", TRAINJOBS)
    nodes, elastic = bare.json("submit", "job.yaml", "-d", "--lenient")
    for run in (nodes, elastic):
        bare("wait", run["id"], timeout=240)
    assert sorted(one[1:4] for one in printed(bare, nodes["id"])) == [[rank, 4, 6] for rank in range(4)]
    size = len(printed(bare, elastic["id"]))
    assert size in (1, 2)
    assert {one[2] for one in printed(bare, elastic["id"])} == {size}


def test_an_export_equals_the_submitted_job(bare: Box) -> None:
    bare.write("index.py", INDEX)
    bare.write("job.yaml", JOB.replace("COMPLETIONS", "2").replace(", FAILS", ""))
    bare("submit", "job.yaml", "-d", code=2)
    (bare.work / "done").mkdir()
    flags = ("--lenient", "--volume", f"results={bare.work}")
    first = bare.json("submit", "job.yaml", "-d", *flags)
    bare("wait", first["id"])
    bare.write("again.yaml", bare("export", first["id"], "--as", "job", "--image", "python:3.12").stdout)
    again = bare.json("submit", "again.yaml", "-d", "--lenient")
    bare("wait", again["id"])
    wanted, found = (bare.json("show", one["id"])["job"] for one in (first, again))
    assert found == wanted
