"""A cluster ends with its test run. The next start or `cluster-down` removes leftovers.

These tests have a small cluster of their own, in a slot reserved for them; parallel test runs take turns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Cluster, HarnessError, Layout
from harness.api import until
from harness.cleanup import clean, remains
from harness.layout import cache, locked
from harness.pods import apply, pod, running
from harness.processes import Ledger

SLOT = 9
STARTER = """
import os, sys, time
from harness import Cluster, Layout
Cluster.start(Layout(int(sys.argv[1])), nodes=1, owner=os.getpid() if sys.argv[2] == "owned" else None)
print("started", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def layout() -> Iterator[Layout]:
    if os.environ.get("STOKER_TEST_KUBECONFIG"):
        pytest.skip("the cluster that STOKER_TEST_KUBECONFIG names is not ended here")
    layout = Layout(SLOT)
    with locked(cache() / "ends.lock"):
        yield layout
        clean(layout)


@pytest.fixture
def starter(layout: Layout) -> Iterator[subprocess.Popen[str]]:
    """A program that starts a cluster of its own and waits."""
    program = start(layout, "owned")
    yield program
    program.kill()
    program.communicate()


def test_a_cluster_ends_with_the_process_it_belongs_to(layout, starter):
    assert starter.stdout is not None
    assert starter.stdout.readline() == "started\n"
    cluster = Cluster(layout)
    apply(cluster, "default", pod("left", cluster.images["busybox"], "while true; do sleep 1; done"))
    running(cluster, "default", "left")
    cluster.freeze("left", "main")
    left = remains(layout)
    for kind in ("process", "mount", "cgroup", "link", "route", "table", "rule", "file"):
        assert any(line.startswith(f"{kind} ") for line in left), (kind, left)

    starter.kill()
    until(lambda: not remains(layout), "everything to be gone", evidence=lambda: "\n".join(remains(layout)))


def test_a_cluster_that_belongs_to_a_running_process_is_left_alone(layout, starter):
    assert starter.stdout is not None
    assert starter.stdout.readline() == "started\n"
    assert Cluster.attach(layout) is None
    with pytest.raises(HarnessError, match=f"process {starter.pid} runs a cluster of its own"):
        Cluster.start(layout)
    assert Cluster(layout).whole


RARER = [pytest.param(moment, marks=pytest.mark.soak) for moment in ("registry", "kube-apiserver")]


@pytest.mark.parametrize("moment", ["etcd", "node-1-kubelet", *RARER])
def test_leftovers_of_a_killed_start_are_removed(layout, moment):
    program = start(layout, "alone")
    ledger = Ledger(layout.state, layout.logs)
    until(lambda: ledger.find(moment) is not None, f"{moment} to be started")
    program.send_signal(signal.SIGKILL)
    program.communicate()
    assert remains(layout)
    clean(layout)
    assert remains(layout) == []


def start(layout: Layout, whose: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    argv = [sys.executable, "-c", STARTER, str(layout.slot), whose]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
