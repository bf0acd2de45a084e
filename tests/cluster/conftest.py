"""The cluster that tests run against: one that is running (`make cluster-up`), one started for this run, or yours.

With STOKER_TEST_KUBECONFIG set, the tests run against that cluster; what needs a part of it broken is skipped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Cluster, HarnessError
from harness.api import until
from harness.foreign import ForeignCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster | ForeignCluster]:
    if named := os.environ.get("STOKER_TEST_KUBECONFIG"):
        yield ForeignCluster(Path(named))
        return
    try:
        found = Cluster.obtain(owner=os.getpid())
    except HarnessError as error:
        pytest.exit(str(error), returncode=1)
    yield found
    if found.owner == os.getpid():
        found.stop()


@pytest.fixture
def own_cluster(cluster: Cluster | ForeignCluster) -> Cluster:
    """For tests that break the cluster, or reach its pods from this machine."""
    if isinstance(cluster, ForeignCluster):
        pytest.skip("needs a cluster that the tests may break; unset STOKER_TEST_KUBECONFIG")
    return cluster


@pytest.fixture
def namespace(cluster: Cluster | ForeignCluster) -> Iterator[str]:
    """A namespace of the test's own, with its default service account; gone, with all in it, after the test."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    until(
        lambda: "default" in cluster.kubectl("-n", name, "get", "serviceaccounts"), f"the account of {name}"
    )
    yield name
    # What its pods hold (GPUs) is free for the next test; a pod on a node that was left lost does not hold it up.
    gone = ("--all", "--grace-period=1", "--ignore-not-found", "--timeout=60s")
    with contextlib.suppress(HarnessError):
        cluster.kubectl("-n", name, "delete", "jobs,pods", *gone)
    cluster.kubectl("delete", "namespace", name, "--wait=false")
