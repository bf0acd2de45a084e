"""A user's Stoker with this machine and a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_parts import AnyCluster, image

from support.box import Box

CLUSTER = "lab"


class ClusterBox(Box):
    """A box that knows the test cluster as `lab`."""

    def __init__(self, root: Path, cluster: AnyCluster, namespace: str, *settings: str) -> None:
        super().__init__(root)
        self.cluster, self.namespace = cluster, namespace
        chosen = [part for setting in (*DEFAULTS, *settings) for part in ("--set", setting)]
        self(
            "cluster",
            "add",
            CLUSTER,
            "--kubeconfig",
            str(cluster.kubeconfig),
            "--namespace",
            namespace,
            "--image",
            image(cluster, "train"),
            *chosen,
        )

    def there(self, *args: str) -> str:
        """Submit a detached run to the cluster; returns the run id."""
        return self.submit("--cluster", CLUSTER, *args)

    def kubectl(self, *args: str) -> str:
        return str(self.cluster.kubectl("-n", self.namespace, *args))

    def pods(self, run: str = "") -> list[dict[str, Any]]:
        selector = ("-l", f"stoker.dev/run={run}") if run else ()
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", *selector, "-o", "json"))[
            "items"
        ]
        return found

    def uids(self, run: str) -> dict[str, str]:
        """UIDs of the run's pods by task, without pods that are being deleted."""
        return {
            pod["metadata"]["labels"]["stoker.dev/task"]: pod["metadata"]["uid"]
            for pod in self.pods(run)
            if not pod["metadata"].get("deletionTimestamp")
        }

    def lose(self, run: str, how: str, task: str) -> None:
        """Kill a `process`, a `launcher` or the whole `pod` of a task."""
        if how == "pod":
            self.kubectl(
                "delete", "pod", "-l", f"stoker.dev/run={run},stoker.dev/task={task}", "--wait=false"
            )
        else:
            self.client().drill(run, how, task)


DEFAULTS = ("default_cpu=0.1",)
"""Small, so that a machine with two cores has room for many tests."""


@pytest.fixture
def box(tmp_path: Path, cluster: AnyCluster, namespace: str) -> Iterator[ClusterBox]:
    made = ClusterBox(tmp_path, cluster, namespace)
    yield made
    made.close()
