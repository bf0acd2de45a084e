"""The chart for real: installed into a namespace that takes only restricted pods, used, changed, taken away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_parts import Release, forwarded
from harness import Cluster, HarnessError

from stoker.testing.store_postgres import PostgresServer

pytestmark = pytest.mark.timeout(1800)

HELLO = "print('trained', 6 * 7, flush=True)"
STEPS = """
import os, time
from pathlib import Path
end = Path(os.environ["STOKER_CHECKPOINT_DIR"]) / "end"
step = 0
while not Path("/tmp/enough").exists():
    print("step", step, flush=True)
    step += 1
    time.sleep(0.2)
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Cluster:
    if not isinstance(cluster, Cluster):
        pytest.skip("needs a cluster of the harness: volumes are directories of this machine")
    cluster.services(names=True)
    return cluster


@pytest.fixture
def place(served: Cluster, namespace: str) -> Iterator[str]:
    """A namespace for restricted pods only, and a volume of its own."""
    served.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    served.volume(namespace, mode="ReadWriteMany")
    yield namespace
    served.kubectl("delete", "namespace", namespace, "--ignore-not-found")
    served.kubectl("delete", "persistentvolume", namespace)


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


def test_installed_used_and_taken_away(release: Release, served: Cluster) -> None:
    release.install()
    assert release.json("cluster", "ls")[1]["name"] == "main"
    checks = {one["name"]: one for one in release.json("cluster", "check", "main")}
    assert [one for one in checks.values() if one["ok"] is False] == []
    assert checks["permissions"]["ok"] is True
    assert checks["namespace"]["text"].endswith("(pod security: restricted)")

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
    left = release.kubectl(
        "get", "all,configmaps,roles,rolebindings,networkpolicies,jobs", "-l", owned, "-o", "name"
    )
    assert left == ""
    assert release.kubectl("get", "persistentvolumeclaims", "-o", "name").split() == [
        "persistentvolumeclaim/stoker"
    ]

    # What was trained outlives the release: a new one finds it.
    release.install(persistence={"existingClaim": "stoker"})
    assert [one["id"] for one in release.json("ps", "--all")] == [run]


def test_runs_live_through_upgrade_and_rollback(release: Release) -> None:
    release.install()
    run = release.submit(STEPS)
    release.until(lambda: len(steps(release, run)) > 5, "the first steps")
    pod, servers = release.run_pod(run)["metadata"]["uid"], release.ready()

    release.upgrade(config={"control": {"fault_retries": 7}}, cluster={"settings": {"start_deadline": "7m"}})
    release.until(lambda: release.ready() not in ([], servers), "the new server")
    assert release.json("cluster", "ls")[1]["config"]["start_deadline"] == 420
    seen = len(steps(release, run))
    release.until(lambda: len(steps(release, run)) > seen, "steps after the upgrade")

    servers = release.ready()
    release.rollback(1)
    release.until(lambda: release.ready() not in ([], servers), "the old server")
    assert release.run_pod(run)["metadata"]["uid"] == pod
    finish(release, run)


def test_training_pods_are_apart(release: Release, served: Cluster) -> None:
    release.install(runs={"projects": ["default"]})
    mine = release.submit(STEPS)
    other = release.submit(STEPS, "--project", "elsewhere")
    for run in (mine, other):
        release.until(lambda run=run: bool(steps(release, run)), f"{run} to train")
    mine_pod, other_pod = release.run_pod(mine), release.run_pod(other)
    (server,) = release.pods()

    def reaches(source: str, address: str, port: int, *container: str) -> bool:
        code = f"import socket; socket.create_connection(('{address}', {port}), 3)"
        try:
            release.kubectl("exec", source, *container, "--", "python3", "-c", code)
        except HarnessError as error:
            assert "timed out" in str(error) or "Error" in str(error)
            return False
        return True

    where, name = mine_pod["status"]["podIP"], other_pod["metadata"]["name"]
    assert reaches(server["metadata"]["name"], where, 7447)
    assert not reaches(server["metadata"]["name"], where, 7448), "only the courier's port"
    assert not reaches(name, where, 7447, "-c", "main")
    same = release.submit(STEPS)
    release.until(lambda: bool(steps(release, same)), f"{same} to train")
    assert reaches(release.run_pod(same)["metadata"]["name"], where, 7447, "-c", "main"), "one project"

    main = ("exec", mine_pod["metadata"]["name"], "-c", "main", "--", "sh", "-c")
    assert "no token" in release.kubectl(
        *main, "ls /var/run/secrets/kubernetes.io 2>/dev/null || echo no token"
    )
    assert mine_pod["spec"]["automountServiceAccountToken"] is False
    for run in (mine, other, same):
        release.stoker("stop", run)


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
        done = release.helm("install", release.name, "deploy/chart", **values)
        assert done.returncode != 0
        assert said in done.stderr
    assert release.kubectl("get", "deployments", "-o", "name") == ""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    with server:
        yield server


def test_two_servers_on_postgresql(release: Release, postgres: PostgresServer) -> None:
    """One leads; when its pod is gone the other does, and the run notices nothing."""
    postgres.fresh()
    with forwarded(release._address, postgres.root / ".s.PGSQL.5432") as port:
        name = postgres.fresh().split("?")[0].rpartition("/")[2]
        release.secret("stoker-database", url=f"postgresql://stoker@{release._address}:{port}/{name}")
        release.install(
            database={"kind": "postgresql", "existingSecret": "stoker-database"},
            replicas=2,
            config={"server": {"lease": 4}},
        )
        release.until(lambda: len(release.pods()) == 2 and len(release.ready()) == 1, "one of two to lead")
        run = release.submit(STEPS)
        release.until(lambda: len(steps(release, run)) > 5, "the first steps")
        (leader,) = release.ready()
        release.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
        release.until(lambda: release.ready() not in ([], [leader]), "the other to lead")
        seen = len(steps(release, run))
        release.until(lambda: len(steps(release, run)) > seen, "steps under the new leader")
        release.upgrade(
            database={"kind": "postgresql", "existingSecret": "stoker-database"},
            replicas=2,
            config={"server": {"lease": 4}, "control": {"fault_retries": 7}},
        )
        finish(release, run)
        release.uninstall()
