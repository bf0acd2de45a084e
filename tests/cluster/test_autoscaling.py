"""A pool that is empty until a task needs it, with an autoscaler that behaves like a real one.

It adds a node when pods cannot be placed for want of one, and removes the node when it is empty.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boxes import ClusterBox

from support.waiting import wait

pytestmark = pytest.mark.timeout(600)

POOL = "pools.spot={selector: {stoker-test/pool: spot}, autoscale: {max_nodes: 1, cpu: 2, memory: 4Gi}}"


class Autoscaler(threading.Thread):
    """Its node is one of the cluster's, which has the pool's label only while it is `there`."""

    def __init__(self, cluster: Any, namespace: str) -> None:
        super().__init__(daemon=True)
        self.cluster, self.namespace = cluster, namespace
        self.node = sorted(json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"], key=_name)[-1]
        self.added = self.removed = 0
        self.wanted: list[dict[str, Any]] = []
        """The requests of the pods that made it add a node."""
        self._over = threading.Event()

    def run(self) -> None:
        there = False
        while not self._over.wait(0.5):
            pods = json.loads(self.cluster.kubectl("-n", self.namespace, "get", "pods", "-o", "json"))[
                "items"
            ]
            waiting = [pod for pod in pods if _unschedulable(pod)]
            if waiting and not there:
                self.wanted = [pod["spec"] for pod in waiting]
                self._label("stoker-test/pool=spot")
                there, self.added = True, self.added + 1
            elif there and not any(pod["status"]["phase"] in ("Pending", "Running") for pod in pods):
                self._label("stoker-test/pool-")
                there, self.removed = False, self.removed + 1

    def end(self) -> None:
        self._over.set()
        self.join()
        self._label("stoker-test/pool-")

    def _label(self, change: str) -> None:
        self.cluster.kubectl("label", "node", _name(self.node), change, "--overwrite")


def _name(item: dict[str, Any]) -> str:
    return str(item["metadata"]["name"])


def _unschedulable(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(found.get("reason") == "Unschedulable" for found in conditions)


@pytest.fixture
def box(tmp_path: Path, cluster: Any, namespace: str) -> Iterator[ClusterBox]:
    made = ClusterBox(tmp_path, cluster, namespace, POOL)
    yield made
    made.close()


def test_a_pool_that_scales_from_zero_and_back(box: ClusterBox) -> None:
    scaler = Autoscaler(box.cluster, box.namespace)
    flags = ("--pool", "spot", "--cpu", "0.2", "--memory", "64Mi", "--", "python3", "-c", "print('there')")
    run = box.there(*flags)
    wait(lambda: box.client().why(run)["text"], lambda said: "spot" in said or "node" in said)
    scaler.start()
    try:
        shown = box.ended(run, limit=180)
        assert shown["state"] == "succeeded"
        assert shown["attempts"][0]["node"] == f"lab/{_name(scaler.node)}"
        spec = scaler.wanted[0]
        assert spec["nodeSelector"] == {"stoker-test/pool": "spot"}
        asked = spec["containers"][0]["resources"]["requests"]
        assert asked["memory"] and asked["cpu"], "an autoscaler sees what is needed"
        wait(lambda: scaler.removed == 1, limit=180)
        again = box.there(*flags)
        assert box.ended(again, limit=180)["state"] == "succeeded"
        assert scaler.added == 2
    finally:
        scaler.end()


def test_more_than_the_pool_could_ever_be_is_refused(box: ClusterBox) -> None:
    said = box("run", "--cluster", "lab", "--pool", "spot", "--cpu", "8", "--", "true", code=None)
    assert said.returncode != 0
    assert "spot" in said.stderr and "never" in said.stderr


def test_an_unknown_pool_names_those_there_are(box: ClusterBox) -> None:
    said = box("run", "--cluster", "lab", "--pool", "sopt", "--", "true", code=None)
    assert said.returncode != 0 and "spot" in said.stderr
