"""The chart's Role grants all requests of the engine, and nothing else.

The engine runs as the chart's own service account. Each request is recorded. A verb that is granted but not
used, or used but not granted, fails the test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_parts import objects, rendered
from engine_parts import (
    AnyCluster,
    attempt_of,
    engine_of,
    image,
    job_of,
    log_of,
    phase,
    settings_of,
    started,
)

from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.api.session import Call, Session
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.settings import Home
from support.waiting import is_there, wait_async

pytestmark = pytest.mark.timeout(900)

Used = set[tuple[str, str, str]]
"""(`Role` or `ClusterRole`, verb, resource)"""

OF_EVERY_ACCOUNT = ("create", "selfsubjectaccessreviews")
"""Granted to every account."""
AHEAD = {("Role", "get", "pods/log")}
"""For runs without a launcher: only the API server has their logs."""


def test_the_engine_uses_what_it_is_granted_and_no_more(
    cluster: AnyCluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = grant(cluster, namespace)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(as_account(cluster, namespace))
    used = recorded(monkeypatch)
    asyncio.run(everything(cluster, namespace, kubeconfig, tmp_path, monkeypatch))
    assert used - granted == set(), "used, but not granted"
    assert granted - used <= AHEAD, "granted, but not used"


def grant(cluster: AnyCluster, namespace: str) -> Used:
    """Create the account with its roles; returns what they allow."""
    values = {
        "image": {"repository": "example.com/stoker"},
        "token": {"existingSecret": "stoker-token"},
        "rbac": {"pods": True},
    }
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    text = rendered(values, "--namespace", namespace)
    made = [found for found in objects(text) if found["kind"] in kinds]
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(made))
    return {
        (found["kind"], verb, resource)
        for found in made
        if found["kind"] in ("Role", "ClusterRole")
        for rule in found["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.fixture(autouse=True)
def _no_leftovers(cluster: AnyCluster, namespace: str) -> Iterator[None]:
    yield
    for kind in ("clusterrole", "clusterrolebinding"):
        cluster.kubectl("delete", kind, f"{namespace}-stoker", "--ignore-not-found")


def as_account(cluster: AnyCluster, namespace: str) -> str:
    """A kubeconfig of the chart's service account alone."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("-n", namespace, "create", "token", "stoker", "--duration=1h").strip()
    config["users"] = [{"name": "server", "user": {"token": token}}]
    for context in config["contexts"]:
        context["context"]["user"] = "server"
    return yaml.safe_dump(config)


def recorded(monkeypatch: pytest.MonkeyPatch) -> Used:
    used: Used = set()
    url = Session._url

    def noting(self: Session, call: Call) -> Any:
        used.update(requested(call))
        return url(self, call)

    monkeypatch.setattr(Session, "_url", noting)
    return used


def requested(call: Call) -> Iterator[tuple[str, str, str]]:
    """The scope, verb and resource of a request, as the API server sees it."""
    parts = call.path.strip("/").split("/")
    if parts[0] not in ("api", "apis"):
        return
    parts = parts[2 if parts[0] == "api" else 3 :]
    scope = "Role" if parts[0] == "namespaces" else "ClusterRole"
    if scope == "Role" and len(parts) > 2:
        parts = parts[2:]
    resource = "/".join([parts[0], *parts[2:3]])
    verbs = {"POST": ["create"], "PATCH": ["patch"], "DELETE": ["delete"], "PUT": ["update"]}.get(call.method)
    if verbs is None:
        watches = dict(call.params).get("watch") == "true"
        verbs = ["get"] if len(parts) > 1 else ["watch"] if watches else ["list"]
        if resource in ("pods/exec", "pods/portforward"):
            verbs.append("create")  # a WebSocket begins with a GET; newer servers require both verbs
    for verb in verbs:
        if (verb, resource) != OF_EVERY_ACCOUNT:
            yield scope, verb, resource


async def everything(
    cluster: AnyCluster, namespace: str, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reach in ("direct", "proxy", "forward"):
        settings = settings_of(cluster, namespace, reach=reach, default_cpu=0.05)
        config = settings.model_copy(update={"kubeconfig": str(kubeconfig)})
        engine = engine_of(Home(tmp_path / reach), config, name=reach)
        try:
            await a_run(engine, image(cluster, "nonroot"), f"digits-{reach}")
            if reach == "direct":
                checks = await engine.check()
                assert [found for found in checks if found["ok"] is False] == []
                assert {found["name"]: found["ok"] for found in checks}["permissions"] is True
                await after_a_crash(engine, cluster, namespace, monkeypatch)
                await without_a_launcher(engine, cluster)
        finally:
            await engine.close()


async def a_run(engine: KubernetesEngine, where: str, run: str) -> None:
    """A run that is started, resized, damaged, ended and removed."""
    attempt = attempt_of(job_of(where, resources={"cpu": 0.1, "memory": "64Mi"}), run=run)
    code = "import time; print('training', flush=True); time.sleep(600)"
    handle, directory = await started(engine, attempt, ["python3", "-c", code])

    async def trains() -> bool | None:
        return True if b"training" in log_of(directory) else None

    await wait_async(trains, what="its first line", good=is_there)
    assert await engine.capacity()
    assert await engine.resize(handle, "worker-0", cpu=0.2, memory=None) is None
    await engine.hurt(handle, "worker-0", "process")
    await phase(directory, "ended")
    await engine.stop(handle, grace=timedelta(seconds=1))
    await engine.remove(handle)


async def after_a_crash(
    engine: KubernetesEngine, cluster: AnyCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects exist, but neither the watch nor the Secret shows them yet: they are looked up by name."""
    attempt = attempt_of(job_of(image(cluster, "nonroot")), run="digits-crash")
    handle = await engine.submit(attempt)
    secret = names.secret_name("digits-crash", 1)
    cluster.kubectl("-n", namespace, "annotate", "secret", secret, f"{names.SUBMITTED}-")
    with monkeypatch.context() as late:
        late.setattr(Cluster, "secret", lambda self, name: None)
        assert await engine.submit(attempt) == handle
    await engine.stop(handle, grace=timedelta(0))
    await engine.remove(handle)


async def without_a_launcher(engine: KubernetesEngine, cluster: AnyCluster) -> None:
    job = job_of(image(cluster, "nopython"), run=["sh", "-c", "echo plain"], launcher="none")
    handle = await engine.submit(attempt_of(job, run="digits-plain"))
    await engine.stop(handle, grace=timedelta(0))
    await engine.remove(handle)


@pytest.mark.parametrize(
    ("verb", "group", "resource", "where", "allowed"),
    [
        ("create", "", "pods", None, True),
        ("create", "apps", "deployments", None, False),
        ("create", "", "serviceaccounts/token", None, False),
        ("create", "rbac.authorization.k8s.io", "rolebindings", None, False),
        ("update", "", "secrets", None, False),
        ("patch", "", "pods", None, False),
        ("list", "", "configmaps", None, False),
        ("get", "", "secrets", "kube-system", False),
        ("create", "", "pods", "kube-system", False),
        ("get", "", "namespaces", "kube-system", False),
        ("patch", "", "nodes", "", False),
    ],
)
def test_dangerous_rights_are_not_granted(
    cluster: AnyCluster,
    namespace: str,
    verb: str,
    group: str,
    resource: str,
    where: str | None,
    allowed: bool,
) -> None:
    grant(cluster, namespace)
    name, _, part = resource.partition("/")
    asked = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{namespace}:stoker",
            "resourceAttributes": {
                "namespace": namespace if where is None else where,
                "verb": verb,
                "group": group,
                "resource": name,
                "subresource": part,
            },
        },
    }
    answer = json.loads(cluster.kubectl("create", "-o", "json", "-f", "-", input=json.dumps(asked)))
    assert answer["status"].get("allowed", False) is allowed
