"""A pytest plugin: every worker of a parallel run has a cluster of its own, so that one may break what others need.

`make test-cluster` loads it. Without workers there is one cluster, or the one that is running.
"""

from __future__ import annotations

import os

_FIRST = 1
"""Slot 0 is for the cluster that people leave running."""

if worker := os.environ.get("PYTEST_XDIST_WORKER", ""):
    os.environ["STOKER_CLUSTER_SLOT"] = str(_FIRST + int(worker.removeprefix("gw")))
