"""The cluster that tests run against: one that is running (`make cluster-up`), one started for this run, or yours.

With STOKER_TEST_KUBECONFIG set, the tests run against that cluster; what needs a part of it broken is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from harness import Cluster, HarnessError
from harness.api import until
from harness.foreign import ForeignCluster

PLACE = pytest.StashKey[tuple[Cluster | ForeignCluster, str]]()


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed says how its pods stood: its namespace is gone when somebody reads of it."""
    report = yield
    if report.when == "call" and report.failed and (found := item.stash.get(PLACE, None)):
        cluster, namespace = found
        for what in (("get", "pods", "-o", "wide"), ("get", "events"), ("describe", "pods")):
            try:
                said = cluster.kubectl("-n", namespace, *what)
            except HarnessError as exc:  # it may be the API server that the test took away
                said = str(exc)
            report.sections.append((f"kubectl {' '.join(what)}", said[-8000:]))
    return report


@pytest.fixture
def own_cluster(cluster: Cluster | ForeignCluster) -> Cluster:
    """For tests that break the cluster, or reach its pods from this machine."""
    if isinstance(cluster, ForeignCluster):
        pytest.skip("needs a cluster that the tests may break; unset STOKER_TEST_KUBECONFIG")
    return cluster


def accounts(cluster: Cluster | ForeignCluster, namespace: str) -> list[str]:
    found = json.loads(cluster.kubectl("-n", namespace, "get", "serviceaccounts", "-o", "json"))
    return [account["metadata"]["name"] for account in found["items"]]


@pytest.fixture
def namespace(cluster: Cluster | ForeignCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, with its default service account; gone, with all in it, after the test."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    until(lambda: "default" in accounts(cluster, name), f"the account of {name}")
    request.node.stash[PLACE] = cluster, name
    yield name
    # What its pods hold (GPUs) is free for the next test; a pod on a node that was left lost does not hold it up.
    gone = ("--all", "--grace-period=1", "--ignore-not-found", "--timeout=60s")
    with contextlib.suppress(HarnessError):
        cluster.kubectl("-n", name, "delete", "jobs,pods", *gone)
    cluster.kubectl("delete", "namespace", name, "--wait=false")
