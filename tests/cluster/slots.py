"""A pytest plugin: each worker of a parallel run has its own cluster, which its tests may break.

`make test-cluster` loads it. Without workers there is one cluster: the running one or a new one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LONG = (
    "test_faults",
    "test_faults_between",
    "test_scale",
    "test_worlds_faults",
    "test_worlds",
    "test_claims",
    "test_engine_lost",
    "test_chart_installed",
    "test_parity",
)
"""Files that take minutes, the longest first. A worker takes whole files, so a long file at the end would
delay the run."""
_FIRST = 1
"""Slot 0 is for the cluster of `make cluster-up`. STOKER_CLUSTER_SLOT names another first slot."""

if worker := os.environ.get("PYTEST_XDIST_WORKER", ""):
    first = int(os.environ.get("STOKER_CLUSTER_SLOT") or _FIRST)
    os.environ["STOKER_CLUSTER_SLOT"] = str(first + int(worker.removeprefix("gw")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _turn(item.path))


def _turn(path: Path) -> int:
    return LONG.index(path.stem) if path.stem in LONG else len(LONG)
