"""Kubernetes manifests on a real cluster.

A Job with a claim, a ConfigMap and indexes runs as it would without Stoker. Fields that reach beyond a pod
need the admin's permission. The API server accepts exported manifests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from boxes import ClusterBox, box
from engine_parts import image
from harness import Cluster
from harness.pods import apply, claim

__all__ = ["box"]

pytestmark = pytest.mark.timeout(600)

JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: indexed, namespace: elsewhere, labels: {team: vision}}
spec:
  completions: 2
  parallelism: 2
  completionMode: Indexed
  backoffLimit: 0
  template:
    metadata: {annotations: {example.com/note: "yes"}}
    spec:
      restartPolicy: Never
      nodeSelector: {kubernetes.io/os: linux}
      tolerations: [{key: nobody, operator: Exists}]
      containers:
        - name: index
          image: IMAGE
          workingDir: /out
          command: [python3, /code/index.py, "--node=$(NODE)"]
          env:
            - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
            - {name: LR, valueFrom: {configMapKeyRef: {name: settings, key: lr}}}
          volumeMounts:
            - {name: out, mountPath: /out, subPath: results}
            - {name: code, mountPath: /code}
            - {name: scratch, mountPath: /scratch}
      volumes:
        - {name: out, persistentVolumeClaim: {claimName: data}}
        - {name: code, configMap: {name: settings, items: [{key: index.py, path: index.py}]}}
        - {name: scratch, emptyDir: {}}
"""
INDEX = """
import json, os, sys
open("/scratch/x", "w").close()
mine = os.environ["JOB_COMPLETION_INDEX"]
with open(mine, "w") as file:
    file.write(mine)
print(json.dumps([mine, os.environ["LR"], os.getcwd(), sys.argv[1] == "--node=" + os.environ["NODE"]]))
"""


def test_a_job_runs_as_it_would_have(
    tmp_path: Path, own_cluster: Cluster, namespace: str, request: pytest.FixtureRequest
) -> None:
    box = ClusterBox(tmp_path, own_cluster, namespace, "security=baseline")
    request.addfinalizer(box.close)
    name = f"{namespace}-data"
    own_cluster.volume(name)
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    apply(own_cluster, namespace, claim("data", name), {**settings, "data": {"lr": "0.1", "index.py": INDEX}})
    box.write("job.yaml", JOB.replace("IMAGE", image(own_cluster, "root")))
    run = box.json("submit", "job.yaml", "-d", "--cluster", "lab")
    seen = box.ended(run["id"], limit=240)
    said = box("logs", run["id"]).stdout
    assert seen["state"] == "succeeded", (seen["attempts"], said)
    lines = [json.loads(line.partition("] ")[2]) for line in said.splitlines()]
    assert sorted(lines) == [[index, "0.1", "/out", True] for index in ("0", "1")]
    assert seen["tags"] == ["team=vision"]

    exported = box("export", run["id"], "--as", "job", "--namespace", namespace).stdout
    assert "job.batch/indexed created" in str(
        own_cluster.kubectl(
            "-n", namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-", input=exported
        )
    )


MEET = """
import json, os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as server:
        total = sum(int(server.accept()[0].recv(16)) for _ in range(size - 1))
    print(json.dumps([os.environ["STOKER_ROLE"], size, total]))
else:
    while True:
        try:
            socket.create_connection(where).sendall(str(rank).encode())
            break
        except OSError:
            time.sleep(0.1)
"""
PYTORCHJOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: ddp}
spec:
  runPolicy: {cleanPodPolicy: None}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: Never
      template: &template
        spec:
          containers:
            - name: pytorch
              image: IMAGE
              command: [python3, /code/meet.py]
              volumeMounts: [{name: code, mountPath: /code}]
          volumes: [{name: code, configMap: {name: code}}]
    Worker:
      replicas: 2
      restartPolicy: Never
      template: *template
---
apiVersion: v1
kind: Pod
metadata: {name: own-command}
spec:
  restartPolicy: Never
  containers: [{name: c, image: ENTRYPOINT, args: ["2"]}]
"""


def test_replicas_meet_over_pod_addresses_and_an_image_gets_its_arguments(box: ClusterBox) -> None:
    """A master and workers with code from a ConfigMap, and an image with its own command, in one file."""
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"meet.py": MEET}}
    apply(box.cluster, box.namespace, code)
    text = PYTORCHJOB.replace("IMAGE", image(box.cluster, "train"))
    box.write("jobs.yaml", text.replace("ENTRYPOINT", image(box.cluster, "entrypoint")))
    ddp, own = box.json("submit", "jobs.yaml", "-d", "--cluster", "lab")
    for run in (ddp, own):
        seen = box.ended(run["id"], limit=240)
        assert seen["state"] == "succeeded", (seen["attempts"], box("logs", run["id"]).stdout)
    assert '["master", 3, 3]' in box("logs", ddp["id"]).stdout
    assert "entry.sh in /app as 1000, 1 arguments" in box("logs", own["id"]).stdout


BEYOND: list[tuple[str, str, str]] = [
    ("hostNetwork: true", "pod.spec.hostNetwork", "hostNetwork"),
    ("volumes: [{name: v, hostPath: {path: /}}]", "pod.spec.volumes.hostPath.path", "hostPath"),
]


@pytest.mark.parametrize(("line", "path", "grant"), BEYOND)
def test_fields_beyond_the_pod_need_the_admins_permission(
    box: ClusterBox, line: str, path: str, grant: str
) -> None:
    text = f"""
apiVersion: v1
kind: Pod
metadata: {{name: attack}}
spec:
  restartPolicy: Never
  {line}
  containers:
    - name: c
      image: {image(box.cluster, "train")}
      command: [python3, -c, "print(1)"]
      volumeMounts: {"[{name: v, mountPath: /host}]" if "volumes" in line else "[]"}
"""
    box.write("pod.yaml", text)
    for flags in ((), ("--lenient",)):
        refused = box("submit", "pod.yaml", "-d", "--cluster", "lab", *flags, code=2)
        assert f"{path} is not allowed in a pod here" in refused.stderr
        assert f"add `{grant}` to the cluster's `allow`" in refused.stderr
    assert not box.pods()
    box("cluster", "set", "lab", f"allow=[{grant}]")
    shown: Any = box("submit", "pod.yaml", "--cluster", "lab", "--dry-run")
    assert grant in shown.stdout
