"""Free capacity on the test cluster's nodes, as Stoker's queue counts it: taken by other pods, and freed."""

from __future__ import annotations

import json

from boxes import CLUSTER, ClusterBox

from support.waiting import wait

CPU = 0.1
"""Cores of a small task here."""
_WITH_COURIER = CPU + 0.05


def fill(box: ClusterBox, node: str, leave: int) -> None:
    """Start a pod of another owner that leaves room for so many small tasks on the node."""
    least = _WITH_COURIER * (leave + 0.5)
    free = wait(lambda: _free(box, node))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"other-{node}"},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "other",
                    "image": box.cluster.images["pause"],
                    "resources": {"requests": {"cpu": f"{round(1000 * (free - least))}m"}},
                }
            ],
        },
    }
    box.cluster.kubectl("-n", box.namespace, "apply", "-f", "-", input=json.dumps(pod))
    wait(lambda: _free(box, node), lambda left: left < least + _WITH_COURIER / 2)


def clear(box: ClusterBox, node: str) -> None:
    """Remove that pod."""
    box.kubectl("delete", "pod", f"other-{node}", "--wait=false")


def _free(box: ClusterBox, node: str) -> float:
    """Free cores of a node beside other owners' pods; 0 while unknown."""
    found = {one["name"]: float(one["cpu"]) for one in box.client().nodes()["nodes"]}
    return found.get(f"{CLUSTER}/{node}", 0.0)
