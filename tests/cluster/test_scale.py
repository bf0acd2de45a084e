"""Many runs at once: in real pods, and on simulated nodes with the real control plane.

The tests check that all runs end as they should, and the number of API calls for each. The duration is only
printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated
from boxes import CLUSTER, ClusterBox

from support.waiting import wait

pytestmark = pytest.mark.timeout(3600)

POOL = f'pools.simulated={{selector: {{{simulated.LABEL}: "yes"}}, tolerations: ["{simulated.LABEL}=yes:NoSchedule"]}}'
CALLS = 20
"""API calls that one run may cost, with failed reads of the log on simulated nodes but without watches."""


@pytest.fixture
def box(tmp_path: Path, cluster: Any, namespace: str) -> Iterator[ClusterBox]:
    made = ClusterBox(tmp_path, cluster, namespace, POOL, "default_cpu=0.01", "sidecar.cpu=0.01")
    yield made
    made.close()


def submit_all(box: ClusterBox, count: int, job: dict[str, Any]) -> list[str]:
    from stoker.client.local import connect

    with connect(box.home) as client:
        return [
            str(client.submit(key=f"scale-{n}", job=job, code=None, secrets={}, record={})["id"])
            for n in range(count)
        ]


def all_ended(box: ClusterBox, runs: list[str], limit: float) -> list[dict[str, Any]]:
    """All runs, once none is active."""

    def left() -> int:
        return len(box.client().runs(state=("queued", "starting", "running", "stopping"), limit=1000)["runs"])

    wait(left, lambda count: count == 0, limit=limit)
    return [box.show(run) for run in runs]


def calls(box: ClusterBox) -> int:
    found = next(one for one in box.json("cluster", "ls") if one["name"] == CLUSTER)
    return sum(found["calls"].values())


def through_pods(box: ClusterBox, count: int) -> None:
    begin = time.monotonic()
    before = calls(box)
    job = {
        "name": "scale",
        "run": ["python3", "-c", "print('line one'); print('line two')"],
        "cluster": CLUSTER,
        "resources": {"cpu": 0.01, "memory": 32 << 20},
        "lease": "1h",
    }
    runs = submit_all(box, count, job)
    shown = all_ended(box, runs, limit=60 + 20 * count)
    took = time.monotonic() - begin
    assert {(run["state"], len(run["attempts"])) for run in shown} == {("succeeded", 1)}
    for run in runs:
        assert box("logs", run).stdout.splitlines() == ["line one", "line two"]
    wait(lambda: not box.pods(), limit=300)
    each = (calls(box) - before) / count
    print(
        f"\n{count} runs through real pods: {took:.1f} s, {each:.1f} API calls each, {_memory(box):.0f} MiB"
    )
    assert each < 40, "calls to couriers included, through the API server's proxy"


def on_simulated(box: ClusterBox, tmp_path: Path, nodes: int, count: int) -> None:
    job = {
        "name": "scale",
        "image": "registry.invalid/none:1",
        "launcher": "none",
        "run": ["true"],
        "cluster": CLUSTER,
        "pool": "simulated",
        "resources": {"cpu": 1, "memory": 1 << 30},
    }
    with simulated.nodes(box.cluster, nodes, tmp_path):
        wait(
            lambda: sum(node["ready"] for node in box.json("nodes") if "simulated-" in node["name"]) == nodes,
            limit=120 + nodes,
        )
        begin, before = time.monotonic(), calls(box)
        runs = submit_all(box, count, job)
        submitted = time.monotonic() - begin
        slowest = 0.0
        while box.client().runs(state=("queued", "starting", "running", "stopping"), limit=1)["runs"]:
            asked = time.monotonic()
            box.client().nodes()
            slowest = max(slowest, time.monotonic() - asked)
            assert time.monotonic() - begin < 60 + 2 * count, "not all runs have ended"
            time.sleep(0.5)
        took = time.monotonic() - begin
        states: dict[str, int] = {}
        for run in runs:
            state = box.show(run)["state"]
            states[state] = states.get(state, 0) + 1
        assert states == {"succeeded": count}
        each = (calls(box) - before) / count
    print(
        f"\n{count} runs on {nodes} simulated nodes: submitted in {submitted:.1f} s, all ended after {took:.1f} s, "
        f"{each:.1f} API calls each, slowest answer of the loop {slowest * 1000:.0f} ms, {_memory(box):.0f} MiB"
    )
    assert each < CALLS


def _memory(box: ClusterBox) -> float:
    pid = box.server_pid()
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def test_60_runs_through_real_pods(box: ClusterBox) -> None:
    through_pods(box, 60)


def test_500_runs_on_simulated_nodes(box: ClusterBox, tmp_path: Path) -> None:
    on_simulated(box, tmp_path, nodes=40, count=500)


@pytest.mark.soak
def test_500_runs_through_real_pods(box: ClusterBox) -> None:
    through_pods(box, 500)


@pytest.mark.soak
def test_5000_runs_on_1000_simulated_nodes(box: ClusterBox, tmp_path: Path) -> None:
    on_simulated(box, tmp_path, nodes=1000, count=5000)
