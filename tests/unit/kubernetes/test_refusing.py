"""Jobs that a cluster cannot run are refused by name and with the fix; others pass."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.job_validation import refuse
from stoker.errors import Refused
from stoker.spec import Job

GOOD: list[dict[str, Any]] = [
    {"image": "torch:2"},
    {
        "run": "x",
        "image": "torch:2",
        "resources": {"gpu": 2, "shm": "1Gi", "disk": "10Gi"},
        "exclusive": True,
    },
    {
        "run": "x",
        "image": "torch:2",
        "pool": "a100",
        "setup": "make",
        "secrets": ["A"],
        "python": "/usr/bin/python3",
    },
    {"run": "x", "image": "torch:2", "inputs": {"a": "pvc://claim", "b": "pvc://claim.x/and/path"}},
    {"image": "torch:2", "launcher": "none", "timeout": "1h"},
    {"image": "torch:2", "mounts": {"/data": "pvc://claim/x:ro", "/scratch": "empty"}},
    {"image": "torch:2", "mounts": {"/data": "pvc://claim:ro"}},
    {
        "image": "torch:2",
        "pod": {
            "metadata": {"labels": {"team": "vision"}},
            "spec": {
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"operator": "Exists"}],
                "imagePullSecrets": [{"name": "regcred"}],
                "volumes": [{"name": "code", "configMap": {"name": "scripts"}}],
                "containers": [
                    {
                        "name": "main",
                        "volumeMounts": [{"name": "code", "mountPath": "/code"}],
                        "envFrom": [{"configMapRef": {"name": "settings"}}],
                        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    }
                ],
            },
        },
    },
]
BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"run": "x"}, "no image is named", "default_image", "image"),
    ({"run": "x", "image": "i", "pool": "h100"}, "has no pool 'h100'", "Its pools: a100.", "pool"),
    (
        {"run": "x", "image": "i", "inputs": {"d": "data://digits@3"}},
        "cannot be brought",
        "pvc://",
        "inputs.d",
    ),
    (
        {"run": "x", "image": "i", "inputs": {"d": "file:///data/x"}},
        "/data/x of one machine",
        "pvc://",
        "inputs.d",
    ),
    ({"run": "x", "image": "i", "inputs": {"d": "s3://bucket/x"}}, "cannot be brought", "pvc://", "inputs.d"),
    (
        {"run": "x", "image": "i", "inputs": {"d": "pvc://Not_A_Claim"}},
        "names no volume claim",
        "pvc://",
        "inputs.d",
    ),
    (
        {"run": "x", "image": "i", "inputs": {"d": "pvc://ours/stoker"}},
        "is on the cluster's own claim",
        "another claim",
        "inputs.d",
    ),
    ({"image": "i", "launcher": "none", "setup": "make"}, "needs the launcher", "`setup`", "setup"),
    ({"image": "i", "launcher": "none", "python": "/x"}, "needs the launcher", "`python`", "python"),
    ({"image": "i", "workers": 2, "launcher": "none"}, "not yet available", "`launcher`", "launcher"),
    ({"run": "x", "image": "i", "idle": {}}, "not yet available", "`idle`", "idle"),
    (
        {"run": "x", "image": "i", "mounts": {"/d": "/home/ada"}},
        "not yet available on the kubernetes engine",
        "pvc://",
        "mounts",
    ),
]
CONFIG = ClusterConfig.from_json({"pools": {"a100": {"selector": {"gpu": "a100"}}}, "checkpoints": "ours"})


def _main(**container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", **container}]}}


BEYOND: list[tuple[dict[str, Any], str, str]] = [
    ({"spec": {"hostNetwork": True}}, "spec.hostNetwork", "hostNetwork"),
    ({"spec": {"hostPID": True}}, "spec.hostPID", "hostPID"),
    ({"spec": {"hostIPC": True}}, "spec.hostIPC", "hostIPC"),
    (
        {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}},
        "spec.volumes.hostPath.path",
        "hostPath",
    ),
    (_main(securityContext={"privileged": True}), "spec.containers.securityContext.privileged", "privileged"),
    (
        _main(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        "spec.containers.securityContext.capabilities.add",
        "capabilities",
    ),
    (_main(ports=[{"hostPort": 22}]), "spec.containers.ports.hostPort", "hostPort"),
    ({"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName", "serviceAccount"),
    (
        _main(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a"}}}]),
        "spec.containers.env.valueFrom.secretKeyRef.name",
        "secrets",
    ),
    (
        {"spec": {"volumes": [{"name": "v", "nfs": {"server": "nas"}}]}},
        "spec.volumes.nfs.server",
        "spec.volumes.nfs.server",
    ),
    (
        {"spec": {"priorityClassName": "system-node-critical"}},
        "spec.priorityClassName",
        "spec.priorityClassName",
    ),
    (_main(resources={"limits": {"cpu": 64}}), "spec.containers.resources.limits.cpu", "limits.cpu"),
    (
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/main": "unconfined"}}},
        "metadata.annotations.container.apparmor.security.beta.kubernetes.io/main",
        "kubernetes.io/main",
    ),
    ({"spec": {"runtimeClassName": "x"}}, "spec.runtimeClassName", "runtimeClassName"),
    ({"spec": {"schedulerName": "x"}}, "spec.schedulerName", "schedulerName"),
]


@pytest.mark.parametrize(("pod", "path", "grant"), BEYOND, ids=[path for _, path, _ in BEYOND])
def test_what_a_job_adds_to_its_pods_reaches_not_beyond_them(
    pod: dict[str, Any], path: str, grant: str
) -> None:
    """In the job and in a role; except where the admin allows it by name."""
    for key, job in (
        ("pod", {"run": "x", "image": "i", "pod": pod}),
        ("roles.ps.pod", {"run": "x", "image": "i", "roles": {"ps": {"pod": pod}}}),
    ):
        with pytest.raises(Refused) as caught:
            refuse(Job.from_json(job), CONFIG, "prod")
        assert caught.value.message == f"{key}.{path} is not allowed in a pod here"
        assert f"{grant}` to the cluster's `allow`" in (caught.value.hint or "")
        refuse(Job.from_json(job), ClusterConfig.from_json({"allow": [path]}), "prod")


def test_all_fields_that_reach_beyond_the_pod_are_named_at_once() -> None:
    pod = {"spec": {"hostNetwork": True, "hostPID": True}}
    with pytest.raises(Refused) as caught:
        refuse(Job.from_json({"run": "x", "image": "i", "pod": pod}), CONFIG, "prod")
    assert caught.value.details["keys"] == ["pod.spec.hostNetwork", "pod.spec.hostPID"]


def test_a_job_cannot_mount_the_claim_of_the_cluster() -> None:
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "ours"}}
    for more in (
        {"mounts": {"/x": "pvc://ours/other-run"}},
        {"mounts": {"/x": "pvc://ours:ro"}},
        {"pod": {"spec": {"volumes": [volume]}}},
    ):
        with pytest.raises(Refused, match="is the cluster's own"):
            refuse(Job.from_json({"run": "x", "image": "i", **more}), CONFIG, "prod")


@pytest.mark.parametrize("job", GOOD)
def test_supported_jobs_pass(job: dict[str, Any]) -> None:
    refuse(Job.from_json(job), CONFIG, "prod")


@pytest.mark.parametrize(("job", "message", "hint", "key"), BAD)
def test_unsupported_jobs_are_refused_by_name(job: dict[str, Any], message: str, hint: str, key: str) -> None:
    with pytest.raises(Refused) as caught:
        refuse(Job.from_json(job), CONFIG, "prod")
    assert message in caught.value.message and hint in (caught.value.hint or "")
    assert caught.value.details["key"] == key


def test_a_cluster_with_an_image_of_its_own_takes_jobs_without() -> None:
    refuse(Job.from_json({"run": "x"}), ClusterConfig(default_image="python:3.12"), "prod")
