"""The test cluster itself: it is real, it can be broken and mended, and nothing of it is left."""

from __future__ import annotations

import json


def test_both_nodes_are_ready(cluster):
    seen = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    assert {each["metadata"]["name"] for each in seen} == set(cluster.nodes)
