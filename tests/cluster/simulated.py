"""Simulated nodes: KWOK maintains their pods' states against the real control plane."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness import Cluster
from harness.binaries import binary

LABEL = "stoker-test/simulated"
SILENCE = 400
"""Seconds that a simulated node may be silent; it reports four times as often. Reports of a thousand
nodes every 14 s, as of the harness's own nodes, would keep the machine busy."""
STAGES = """
apiVersion: config.kwok.x-k8s.io/v1alpha1
kind: KwokConfiguration
options: {nodePlayStageParallelism: 32, podPlayStageParallelism: 32, nodeLeaseParallelism: 32}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: node-initialize}
spec:
  resourceRef: {apiGroup: v1, kind: Node}
  selector:
    matchExpressions: [{key: '.status.conditions[] | select( .type == "Ready" ) | .status', operator: NotIn, values: ["True"]}]
  next:
    statusTemplate: |
      {{ $now := Now }}
      addresses: [{address: {{ NodeIP | Quote }}, type: InternalIP}]
      allocatable: {cpu: "16", memory: 64Gi, pods: "110"}
      capacity: {cpu: "16", memory: 64Gi, pods: "110"}
      conditions:
      - {type: Ready, status: "True", reason: KubeletReady, message: simulated, lastHeartbeatTime: {{ $now | Quote }}, lastTransitionTime: {{ $now | Quote }}}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-run}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: '.metadata.deletionTimestamp', operator: DoesNotExist}
    - {key: '.status.phase', operator: In, values: [Pending]}
  next:
    statusTemplate: |
      {{ $now := Now }}
      phase: Running
      startTime: {{ $now | Quote }}
      hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
      podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
      conditions:
      - {type: Initialized, status: "True", lastTransitionTime: {{ $now | Quote }}}
      - {type: Ready, status: "True", lastTransitionTime: {{ $now | Quote }}}
      containerStatuses:
      {{ range .spec.containers }}
      - {name: {{ .name | Quote }}, image: {{ .image | Quote }}, imageID: "", ready: true, started: true, restartCount: 0, state: {running: {startedAt: {{ $now | Quote }}}}}
      {{ end }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-complete}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: '.metadata.deletionTimestamp', operator: DoesNotExist}
    - {key: '.status.phase', operator: In, values: [Running]}
  delay: {durationMilliseconds: 1000, jitterDurationMilliseconds: 3000}
  next:
    statusTemplate: |
      {{ $now := Now }}
      phase: Succeeded
      containerStatuses:
      {{ range .spec.containers }}
      - {name: {{ .name | Quote }}, image: {{ .image | Quote }}, imageID: "", ready: false, started: false, restartCount: 0, state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}}}}
      {{ end }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-delete}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions: [{key: '.metadata.deletionTimestamp', operator: Exists}]
  next:
    finalizers: {empty: true}
    delete: true
"""


@contextmanager
def nodes(cluster: Any, count: int, directory: Path) -> Iterator[None]:
    """Make simulated nodes, with a taint that keeps other pods away."""
    stages = directory / "stages.yaml"
    stages.write_text(STAGES)
    argv = [
        str(binary("kwok")),
        f"--kubeconfig={cluster.kubeconfig}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-label-selector={LABEL}=yes",
        f"--config={stages}",
        f"--node-lease-duration-seconds={SILENCE}",
    ]
    with (
        cluster.patient(SILENCE) if isinstance(cluster, Cluster) else nullcontext(),
        (directory / "kwok.log").open("wb") as log,
        subprocess.Popen(argv, stdout=log, stderr=log) as process,
    ):
        try:
            cluster.kubectl(
                "create",
                "-f",
                "-",
                input=json.dumps(
                    {"apiVersion": "v1", "kind": "List", "items": [_node(number) for number in range(count)]}
                ),
            )
            yield
        except BaseException:
            sys.stderr.write((directory / "kwok.log").read_text()[-3000:])
            raise
        finally:
            try:
                # One request: kubectl would delete a thousand nodes one after the other.
                cluster.kubectl("delete", "--raw", f"/api/v1/nodes?labelSelector={quote(f'{LABEL}=yes')}")
            finally:
                process.terminate()


def _node(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"simulated-{number}",
            "labels": {LABEL: "yes", "kubernetes.io/hostname": f"simulated-{number}"},
        },
        "spec": {"taints": [{"key": LABEL, "value": "yes", "effect": "NoSchedule"}]},
    }
