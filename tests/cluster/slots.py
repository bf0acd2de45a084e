"""A pytest plugin: every worker of a parallel run has a cluster of its own, so that one may break what others need.

`make test-cluster` loads it. Without workers there is one cluster, or the one that is running.
"""

from __future__ import annotations

import os

_FIRST = 1
"""Slot 0 is for the cluster that people leave running. STOKER_CLUSTER_SLOT names another one to begin with."""

if worker := os.environ.get("PYTEST_XDIST_WORKER", ""):
    first = int(os.environ.get("STOKER_CLUSTER_SLOT") or _FIRST)
    os.environ["STOKER_CLUSTER_SLOT"] = str(first + int(worker.removeprefix("gw")))
