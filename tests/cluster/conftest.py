"""The cluster of the tests: the running one (`make cluster-up`), a new one for this run, or yours.

With STOKER_TEST_KUBECONFIG set, the tests run against that cluster, and those that break a cluster are
skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from engine_parts import Stage, image
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
    """Add the state of the pods to the report of a failed test, since the namespace is deleted afterwards."""
    report = yield
    if report.when == "call" and report.failed and (found := item.stash.get(PLACE, None)):
        cluster, namespace = found
        for what in (("get", "pods", "-o", "wide"), ("get", "events"), ("describe", "pods")):
            try:
                said = cluster.kubectl("-n", namespace, *what)
            except HarnessError as exc:  # the test may have stopped the API server
                said = str(exc)
            report.sections.append((f"kubectl {' '.join(what)}", said[-8000:]))
    return report


@pytest.fixture
def own_cluster(cluster: Cluster | ForeignCluster) -> Cluster:
    """For tests that break the cluster or reach its pods from this machine."""
    if isinstance(cluster, ForeignCluster):
        pytest.skip("needs a cluster that the tests may break; unset STOKER_TEST_KUBECONFIG")
    return cluster


def accounts(cluster: Cluster | ForeignCluster, namespace: str) -> list[str]:
    found = json.loads(cluster.kubectl("-n", namespace, "get", "serviceaccounts", "-o", "json"))
    return [account["metadata"]["name"] for account in found["items"]]


@pytest.fixture
def namespace(cluster: Cluster | ForeignCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test, with its default service account; it is deleted after the test."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    until(lambda: "default" in accounts(cluster, name), f"the account of {name}")
    request.node.stash[PLACE] = cluster, name
    yield name
    # Deleting pods early frees their GPUs for the next test. A pod on a lost node must not delay this.
    gone = ("--all", "--grace-period=1", "--ignore-not-found", "--timeout=60s")
    with contextlib.suppress(HarnessError):
        cluster.kubectl("-n", name, "delete", "jobs,pods", *gone)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def stage(cluster: Cluster | ForeignCluster, namespace: str, tmp_path: Path) -> Stage:
    """For tests of the engine whose image has a user of its own."""
    image(cluster, "nonroot")  # the first call builds it
    return Stage(cluster, namespace, tmp_path)
