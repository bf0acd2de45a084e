"""A user's Stoker with this machine and a real cluster behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from box import Box
from engine_parts import AnyCluster, image

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
        """`stoker run -d --cluster lab ...`: the id."""
        return self.submit("--cluster", CLUSTER, *args)

    def kubectl(self, *args: str) -> str:
        return str(self.cluster.kubectl("-n", self.namespace, *args))

    def pods(self, run: str = "") -> list[dict[str, Any]]:
        import json

        selector = ("-l", f"stoker.dev/run={run}") if run else ()
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", *selector, "-o", "json"))[
            "items"
        ]
        return found


DEFAULTS = ("default_cpu=0.1",)
"""A machine with two cores has room for many tests of small things."""


@pytest.fixture
def box(tmp_path: Path, cluster: AnyCluster, namespace: str) -> Iterator[ClusterBox]:
    made = ClusterBox(tmp_path, cluster, namespace)
    yield made
    made.close()
