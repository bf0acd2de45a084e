"""The chart on a real cluster: installed into a namespace for restricted pods, used, changed, uninstalled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_parts import CHART, Release, forwarded, merged
from harness import Cluster

from stoker.testing.store_postgres import PostgresServer

pytestmark = pytest.mark.timeout(1800)

HELLO = "print('trained', 6 * 7, flush=True)"
STEPS = """
import time
from pathlib import Path
step = 0
while not Path("/tmp/enough").exists():
    print("step", step, flush=True)
    step += 1
    time.sleep(0.2)
print("done", flush=True)
"""

PEERS = """
import os, time
print("peers", os.environ["STOKER_PEERS"], flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Cluster:
    if not isinstance(cluster, Cluster):
        pytest.skip("needs a cluster of the harness: volumes are directories of this machine")
    cluster.services(names=True)
    return cluster


@pytest.fixture
def place(served: Cluster, namespace: str) -> Iterator[str]:
    """A namespace for restricted pods only, with its own volume."""
    served.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    served.volume(namespace)
    served.volume(f"{namespace}-many", mode="ReadWriteMany")
    yield namespace
    served.kubectl("delete", "persistentvolume", namespace, f"{namespace}-many", "--wait=false")


@pytest.fixture
def release(served: Cluster, place: str, tmp_path: Path) -> Iterator[Release]:
    made = Release(served, place, tmp_path / "person", persistence={"storageClass": place, "size": "1Gi"})
    made.secret("stoker-token", token=made.token)
    yield made
    made.helm("uninstall", made.name, "--ignore-not-found", "--wait")


def steps(release: Release, run: str) -> list[str]:
    return [line for line in release.stoker("logs", run).stdout.splitlines() if line.startswith("step")]


def finish(release: Release, run: str) -> None:
    """Let the run end, and check that it trained once, from beginning to end."""
    pod = release.run_pod(run)["metadata"]["name"]
    release.kubectl("exec", pod, "-c", "main", "--", "python3", "-c", "open('/tmp/enough', 'w')")
    release.until(lambda: release.json("show", run)["state"] == "succeeded", f"{run} to succeed")
    assert len(release.json("show", run)["attempts"]) == 1
    lines = steps(release, run)
    assert lines == [f"step {number}" for number in range(len(lines))]
    assert "done" in release.stoker("logs", run).stdout


def test_installed_used_and_uninstalled(release: Release, served: Cluster) -> None:
    release.install()
    assert set(release.clusters()) == {"local", "main"}
    checks = release.checks()
    assert [one for one in checks.values() if one["ok"] is False] == []
    assert checks["permissions"]["ok"] is True
    assert checks["namespace"]["text"].endswith("(pod security: restricted)")

    refused = release.stoker("run", "--cluster", "local", "--", "python3", "-c", "pass", check=False)
    assert refused.returncode != 0, "no training in the server's own pod"
    assert "this server runs nothing on its own machine" in refused.stderr

    run = release.submit(HELLO)
    assert release.stoker("wait", run).returncode == 0
    assert "trained 42" in release.stoker("logs", run).stdout
    assert release.json("show", run)["attempts"][0]["cause"] == "completed"

    owned = f"app.kubernetes.io/instance={release.name}"
    kinds = "clusterroles,clusterrolebindings,namespaces,priorityclasses"
    names = json.loads(served.kubectl("get", kinds, "-l", owned, "-o", "json"))["items"]
    ours = [one["metadata"]["name"] for one in names if release.namespace in one["metadata"]["name"]]
    assert ours == [f"{release.namespace}-stoker"] * 2
    release.uninstall()
    names = json.loads(served.kubectl("get", kinds, "-l", owned, "-o", "json"))["items"]
    assert [one for one in names if release.namespace in one["metadata"]["name"]] == []
    rest = "all,configmaps,roles,rolebindings,networkpolicies,jobs"
    release.until(
        lambda: not release.kubectl("get", rest, "-l", owned, "-o", "name"), "everything to be gone"
    )
    assert release.kubectl("get", "persistentvolumeclaims", "-o", "name").split() == [
        "persistentvolumeclaim/stoker"
    ]

    # The volume outlives the release: a new release finds the runs.
    release.install(persistence={"existingClaim": "stoker"})
    assert [one["id"] for one in release.json("ps", "--all")] == [run]


def test_runs_outlive_upgrade_and_rollback(release: Release) -> None:
    release.install()
    run = release.submit(STEPS)
    release.until(lambda: len(steps(release, run)) > 5, "the first steps")
    pod, servers = release.run_pod(run)["metadata"]["uid"], release.ready()

    release.upgrade(config={"control": {"fault_retries": 7}}, cluster={"settings": {"start_deadline": "7m"}})
    release.until(lambda: release.ready() not in ([], servers), "the new server")
    release.answers()
    assert release.clusters()["main"]["config"]["start_deadline"] == 420
    seen = len(steps(release, run))
    release.until(lambda: len(steps(release, run)) > seen, "steps after the upgrade")

    servers = release.ready()
    release.rollback(1)
    release.until(lambda: release.ready() not in ([], servers), "the old server")
    release.answers()
    assert release.run_pod(run)["metadata"]["uid"] == pod
    finish(release, run)


@pytest.mark.soak
def test_runs_outlive_a_server_that_moves_to_another_node(release: Release, served: Cluster) -> None:
    """A server's successor continues its runs, and records a run that ended while no server ran.

    The pod is deleted, killed, and moved to another node.
    """
    release.install()
    runs = [release.submit(STEPS) for _ in range(4)]
    for run in runs:
        release.until(lambda run=run: len(steps(release, run)) > 5, f"the first steps of {run}")
    pods = {run: release.run_pod(run)["metadata"]["uid"] for run in runs}
    for how in ("deleted", "killed", "moved"):
        (server,) = release.pods()
        name, node = server["metadata"]["name"], server["spec"]["nodeName"]
        if how == "moved":
            served.kubectl("cordon", node)
        try:
            violence = ("--grace-period=0", "--force") if how == "killed" else ()
            release.kubectl("delete", "pod", name, *violence, "--wait=false")
            begun = time.monotonic()
            finish(release, runs.pop())
            release.until(lambda name=name: release.ready() not in ([], [name]), "the server's next pod")
            release.answers()
            print(f"{how}: ready again after {time.monotonic() - begun:.1f} s")
            if how == "moved":
                assert release.pods()[0]["spec"]["nodeName"] != node
        finally:
            if how == "moved":
                served.kubectl("uncordon", node)
        for run in runs:
            seen = len(steps(release, run))
            release.until(
                lambda run=run, seen=seen: len(steps(release, run)) > seen, f"{run} to go on ({how})"
            )
            assert release.run_pod(run)["metadata"]["uid"] == pods[run]
    assert release.stoker("wait", release.submit(HELLO)).returncode == 0, "a new run starts as usual"
    finish(release, runs.pop())


def reaches(release: Release, pod: str, address: str, port: int, container: str = "main") -> bool:
    """Whether a process in the pod can reach this port. A refused connection counts: the packets passed."""
    code = f"""
import socket
try:
    socket.create_connection(({address!r}, {port}), 5)
except ConnectionRefusedError:
    pass
except TimeoutError:
    print("nothing")
"""
    return "nothing" not in release.kubectl("exec", pod, "-c", container, "--", "python3", "-c", code)


def test_training_pods_are_apart(release: Release, served: Cluster) -> None:
    nodes = json.loads(served.kubectl("get", "nodes", "-o", "json"))["items"]
    first, second = (node["status"]["addresses"][0]["address"] for node in nodes)
    world = {"cidr": "0.0.0.0/0", "except": [f"{first}/32"]}
    release.install(
        runs={"projects": ["default"]},
        networkPolicy={
            "server": {"from": [{"podSelector": {"matchLabels": {"may": "ask"}}}]},
            "runs": {"egress": [{"to": [{"ipBlock": world}]}]},
        },
    )
    world = release.submit(PEERS, "--workers", "2", "--framework", "none", "--cpu", "0.1")
    mine, same = release.submit(STEPS), release.submit(STEPS)
    other = release.submit(STEPS, "--project", "elsewhere")
    pods = {}
    for run in (mine, same, other):
        release.until(lambda run=run: bool(steps(release, run)), f"{run} to train")
        pods[run] = release.run_pod(run)
    names = {run: pod["metadata"]["name"] for run, pod in pods.items()}
    (server,) = release.pods()
    name, here = server["metadata"]["name"], pods[mine]["status"]["podIP"]

    assert reaches(release, name, here, 7447, "server")
    assert not reaches(release, name, here, 7448, "server"), "only the courier's port"
    assert not reaches(release, names[other], here, 7447)
    assert not reaches(release, names[other], here, 29500)
    assert reaches(release, names[same], here, 29500), "pods of one project work together"
    assert not reaches(release, names[mine], server["status"]["podIP"], 7380)
    assert reaches(release, names[mine], second, 10250)
    assert not reaches(release, names[mine], first, 10250), "what egress excepts"

    members = peers(release, world)
    assert len(members) == 2
    for member, (address, port) in members.items():
        assert not reaches(release, names[other], address, port), "another project's run"
        assert all(reaches(release, one, address, port) for one in members if one != member), (
            "its own members"
        )

    assert pods[mine]["spec"]["automountServiceAccountToken"] is False
    look = ("exec", names[mine], "-c", "main", "--", "sh", "-c", "ls /var/run/secrets || echo nothing")
    assert "nothing" in release.kubectl(*look)
    for run in (world, mine, same, other):
        release.stoker("stop", run)


def peers(release: Release, run: str) -> dict[str, tuple[str, int]]:
    """The addresses at which the members of a world listen for each other, by pod."""

    def said() -> list[str]:
        lines = release.stoker("logs", run).stdout.splitlines()
        return [line.partition("peers ")[2] for line in lines if "peers " in line]

    release.until(lambda: len(said()) == 2, f"{run} to train")
    assert len(set(said())) == 1, "all members have the same peers"
    chosen = ("get", "pods", "-l", f"stoker.dev/run={run}", "-o", "json")
    found = {
        pod["status"]["podIP"]: pod["metadata"]["name"]
        for pod in json.loads(release.kubectl(*chosen))["items"]
    }
    each = [place.rpartition(":") for place in said()[0].split(",")]
    return {found[address]: (address, int(port)) for address, _, port in each}


def test_runs_in_a_namespace_of_their_own(release: Release, served: Cluster) -> None:
    """The release creates and deletes the namespace, needs no ClusterRole, and protects runs from drains."""
    apart = f"{release.namespace}-runs"
    capacity = {"capacity": {"cpu": 4, "memory": "8Gi"}}
    release.install(
        runs={"namespace": apart, "createNamespace": True, "blockDrains": True},
        rbac={"nodes": False},
        cluster={"settings": capacity},
    )
    assert release.checks()["nodes"]["text"].startswith("this user may not list them")
    owned = f"app.kubernetes.io/instance={release.name}"
    roles = json.loads(served.kubectl("get", "clusterroles", "-l", owned, "-o", "json"))["items"]
    assert [one for one in roles if release.namespace in one["metadata"]["name"]] == []

    run = release.submit(STEPS)
    release.until(lambda: bool(steps(release, run)), "the first steps")
    pod = json.loads(served.kubectl("-n", apart, "get", "pods", "-o", "json"))["items"][0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": apart}}
    path = f"/api/v1/namespaces/{apart}/pods/{pod}/eviction"
    release.until(lambda: served.api.raw("POST", path, eviction)[0] == 429, "the eviction to be refused")
    assert release.json("show", run)["state"] == "running"
    release.stoker("stop", run)
    release.until(lambda: release.json("show", run)["state"] == "stopped", "its end")
    release.uninstall()
    release.until(
        lambda: apart not in served.kubectl("get", "namespaces", "-o", "name"), f"{apart} to be gone"
    )


def test_bad_secrets_are_refused_before_anything_is_made(release: Release) -> None:
    release.secret("empty", token="")
    release.secret("weak", token="changeme")
    release.secret("same", token="a" * 64)
    release.secret("database", url="mysql://somewhere/else")
    postgresql = {"database": {"kind": "postgresql", "existingSecret": "database"}}
    for values, said in [
        ({"token": {"existingSecret": "nothing"}}, "there is no Secret nothing"),
        ({"token": {"existingSecret": "empty"}}, "has nothing at token"),
        ({"token": {"existingSecret": "weak"}}, "is weak"),
        ({"token": {"existingSecret": "same"}}, "is weak"),
        ({"token": {"existingSecret": "weak", "key": "password"}}, "has nothing at password"),
        (postgresql, "no url of a PostgreSQL database"),
    ]:
        done = release.helm("install", release.name, CHART, **values)
        assert done.returncode != 0
        assert said in done.stderr
    assert release.kubectl("get", "deployments", "-o", "name") == ""


def test_two_servers_on_postgresql(release: Release, postgres: PostgresServer) -> None:
    """One server leads; when its pod is deleted the other leads, and the run continues undisturbed."""
    nodes = json.loads(release.kubectl("get", "nodes", "-o", "json"))["items"]
    address = nodes[0]["status"]["addresses"][0]["address"]
    with forwarded(address, postgres.root / ".s.PGSQL.5432") as port:
        name = postgres.fresh().split("?")[0].rpartition("/")[2]
        release.secret("stoker-database", url=f"postgresql://stoker@{address}:{port}/{name}")
        values = {
            "database": {"kind": "postgresql", "existingSecret": "stoker-database"},
            "replicas": 2,
            "persistence": {"storageClass": f"{release.namespace}-many"},
            "config": {"server": {"lease": 4}},
        }
        release.install("--wait=legacy", **values)
        release.until(lambda: len(release.pods()) == 2 and len(release.ready()) == 1, "one of two to lead")
        release.answers()
        run = release.submit(STEPS)
        release.until(lambda: len(steps(release, run)) > 5, "the first steps")
        (leader,) = release.ready()
        release.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
        release.until(lambda: release.ready() not in ([], [leader]), "the other to lead")
        release.answers()
        seen = len(steps(release, run))
        release.until(lambda: len(steps(release, run)) > seen, "steps under the new leader")
        servers = {pod["metadata"]["uid"] for pod in release.pods()}
        release.upgrade(**merged(values, {"config": {"control": {"fault_retries": 7}}}))
        release.until(
            lambda: (
                not servers & {pod["metadata"]["uid"] for pod in release.pods()} and len(release.ready()) == 1
            ),
            "new servers, one of which leads",
        )
        finish(release, run)
        release.uninstall()
