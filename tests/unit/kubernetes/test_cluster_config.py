"""Settings of a cluster: what is accepted, how mistakes are reported, and what a pod template may add."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.engine.kubernetes.config import ClusterConfig, Toleration, changed
from stoker.engine.kubernetes.manifests import template
from stoker.errors import SpecError

WHOLE: dict[str, Any] = {
    "kubeconfig": "/etc/kube/config",
    "context": "prod",
    "namespace": "training",
    "reach": "proxy",
    "stoker_image": "registry.example.com:5000/stoker:1",
    "default_image": "python:3.12",
    "pull_secrets": ["regcred"],
    "gpu_resource": "amd.com/gpu",
    "gpu_profiles": {"small": "nvidia.com/mig-1g.10gb"},
    "pools": {
        "a100": {
            "selector": {"gpu": "a100"},
            "tolerations": ["dedicated=x:NoSchedule", "spot", {"key": "a", "value": "b"}],
            "gpu_profile": "small",
            "autoscale": {"max_nodes": 3, "cpu": 8, "memory": "64Gi", "gpu": 4},
        }
    },
    "security": "baseline",
    "user": 1234,
    "read_only_root": True,
    "priority_classes": {"low": "l", "normal": "n", "high": "h"},
    "rdma": {"resource": "rdma/hca", "count": 2, "capability": True},
    "allow": ["hostNetwork"],
    "pod": {"spec": {"hostNetwork": True}},
    "labels": {"team": "vision"},
    "annotations": {"example.com/note": "anything, at all"},
    "checkpoints": "claim",
    "start_deadline": "5m",
    "carry": "10s",
    "silent_after": "30s",
    "sidecar": {"cpu": "100m", "memory": "128Mi"},
    "default_cpu": 2,
    "capacity": {"cpu": 100, "memory": "1Ti", "gpu": 8},
}


def test_every_setting_is_accepted_and_read_back() -> None:
    config = ClusterConfig.from_json(WHOLE)
    assert set(WHOLE) == set(ClusterConfig.model_fields)
    assert ClusterConfig.from_json(config.to_json()) == config
    assert config.start_deadline == 300.0 and config.sidecar.memory == 128 << 20
    assert config.pools["a100"].tolerations == (
        Toleration(key="dedicated", operator="Equal", value="x", effect="NoSchedule"),
        Toleration(key="spot"),
        Toleration(key="a", operator="Equal", value="b"),
    )


def test_default_values_are_not_written() -> None:
    assert ClusterConfig().to_json() == {}
    assert ClusterConfig.from_json({"namespace": "a"}).to_json() == {"namespace": "a"}


def test_settings_are_changed_by_key_and_value() -> None:
    config = ClusterConfig.from_json({"namespace": "a", "labels": {"x": "1"}})
    found = changed(
        config,
        [
            "namespace=b",
            "pools.big.selector={nvidia.com/gpu.product: A100}",
            "pull_secrets=regcred",
            "labels=null",
            "stoker_image=127.0.0.1:5000/stoker:1",
            "sidecar.memory=128Mi",
            "priority_classes.high=urgent",
            "start_deadline=90",
        ],
    )
    assert found.to_json() == {
        "namespace": "b",
        "stoker_image": "127.0.0.1:5000/stoker:1",
        "pull_secrets": ["regcred"],
        "pools": {"big": {"selector": {"nvidia.com/gpu.product": "A100"}}},
        "priority_classes": {"high": "urgent"},
        "start_deadline": 90.0,
        "sidecar": {"memory": 128 << 20},
    }
    assert changed(found, ["pools.big=null"]).pools == {}


BAD = [
    ("namespace=A_b", 'namespace=A_b: "A_b" is not a namespace', "training"),
    ("namespaces=a", "namespaces=a: no such key", "Did you mean `namespace`?"),
    ("pools.a.selecto={}", "pools.a.selecto={}: no such key", "Did you mean `selector`?"),
    ("pools.a.autoscale={max_nodes: 3}", "pools.a.autoscale.cpu: is missing", None),
    ("pools.a.gpu_profile=big", '"big" is not one of gpu_profiles', "There are: none."),
    ("security=open", 'security=open: "open" is not one of the choices', "restricted, baseline"),
    ("user=root", '"root" is not a user', "platform"),
    ("gpu_resource=gpu", '"gpu" is not a resource', "nvidia.com/gpu"),
    ("sidecar.memory=128", "128 is 128 bytes, too small", "128Gi"),
    ("sidecar=3", "3 is not a mapping of keys", None),
    ("pull_secrets=Not_This", '"Not_This" is not an object\'s name', "regcred"),
    ("default_cpu=lots", '"lots" is not a number of cores', "500m"),
    ("labels={a: b c}", '"b c" is not a label\'s value', None),
    ("labels={-a: b}", '"-a" is not a label\'s name', None),
    ("allow=[hostnetwork]", '"hostnetwork" is not a path in a pod', "Did you mean `hostNetwork`?"),
    ("read_only_root=yes", '"yes" is not true or false', None),
    ("namespace", '"namespace" is not KEY=VALUE', "namespace=training"),
    ("rdma={}", "rdma.resource: is missing", None),
    (
        "pools={a: {tolerations: [x:NoSchedul]}}",
        '"NoSchedul" is not one of the choices',
        "Did you mean `NoSchedule`?",
    ),
    ("stoker_image=Not An Image", '"Not An Image" is not an image reference', None),
    ("pods={a: [}", "pods={a: [}: not valid YAML", None),
    ("namespace.x=1", "has no keys beneath it", None),
]


@pytest.mark.parametrize(("setting", "message", "hint"), BAD)
def test_mistakes_are_named(setting: str, message: str, hint: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        changed(ClusterConfig.from_json({"namespace": "a"}), [setting])
    assert message in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        ClusterConfig.from_json({"namespace": "A", "reach": "magic", "nonsense": 1}, source="cluster.yaml")
    assert "3 mistakes in cluster.yaml" in caught.value.message
    for part in ("namespace", "reach", "nonsense"):
        assert part in caught.value.message
    with pytest.raises(SpecError, match="must be a mapping"):
        ClusterConfig.from_json([])


# -- pod templates ---------------------------------------------------------------------------------------------

MAIN = {"name": "main"}
DANGEROUS: list[tuple[str, dict[str, Any], str]] = [
    ("hostNetwork", {"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
    ("hostPID", {"spec": {"hostPID": True}}, "spec.hostPID"),
    ("hostIPC", {"spec": {"hostIPC": True}}, "spec.hostIPC"),
    (
        "hostPath",
        {"spec": {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}},
        "spec.volumes.hostPath.path",
    ),
    (
        "hostPort",
        {"spec": {"containers": [{**MAIN, "ports": [{"hostPort": 80}]}]}},
        "spec.containers.ports.hostPort",
    ),
    (
        "privileged",
        {"spec": {"containers": [{**MAIN, "securityContext": {"privileged": True}}]}},
        "spec.containers.securityContext.privileged",
    ),
    (
        "capabilities",
        {"spec": {"containers": [{**MAIN, "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]}},
        "spec.containers.securityContext.capabilities.add",
    ),
    ("serviceAccount", {"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName"),
    ("serviceAccount", {"spec": {"automountServiceAccountToken": True}}, "spec.automountServiceAccountToken"),
    (
        "secrets",
        {"spec": {"volumes": [{"name": "a", "secret": {"secretName": "b"}}]}},
        "spec.volumes.secret.secretName",
    ),
    (
        "secrets",
        {
            "spec": {
                "containers": [{**MAIN, "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"key": "x"}}}]}]
            }
        },
        "spec.containers.env.valueFrom.secretKeyRef.key",
    ),
    (
        "spec.securityContext",
        {"spec": {"securityContext": {"runAsUser": 0}}},
        "spec.securityContext.runAsUser",
    ),
    ("spec.nodeName", {"spec": {"nodeName": "node-1"}}, "spec.nodeName"),
    (
        "spec.initContainers",
        {"spec": {"initContainers": [{"name": "x", "image": "y"}]}},
        "spec.initContainers.name",
    ),
]


@pytest.mark.parametrize(("word", "pod", "path"), DANGEROUS)
def test_what_reaches_beyond_a_pod_has_to_be_allowed_by_name(
    word: str, pod: dict[str, Any], path: str
) -> None:
    with pytest.raises(SpecError) as caught:
        ClusterConfig.from_json({"pod": pod})
    assert f"{path} is not allowed" in caught.value.message
    assert "`allow`" in (caught.value.hint or "")
    assert ClusterConfig.from_json({"pod": pod, "allow": [word]}).pod == pod


OURS: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"labels": {"stoker.dev/run": "x"}}}, "is Stoker's own"),
    ({"metadata": {"annotations": {"stoker.dev/tasks": "{}"}}}, "is Stoker's own"),
    ({"spec": {"volumes": [{"name": "task", "emptyDir": {}}]}}, "is Stoker's own"),
    ({"spec": {"volumes": [{"name": "input-0", "emptyDir": {}}]}}, "is Stoker's own"),
    (
        {"spec": {"containers": [{"name": "main", "volumeMounts": [{"name": "key", "mountPath": "/k"}]}]}},
        "mounts key, a volume of Stoker's own",
    ),
    (
        {
            "spec": {
                "containers": [{"name": "main", "volumeMounts": [{"name": "checkpoints", "mountPath": "/c"}]}]
            }
        },
        "mounts checkpoints, a volume of Stoker's own",
    ),
    (
        {"spec": {"containers": [{**MAIN, "volumeMounts": [{"name": "a", "mountPath": "/stoker/key"}]}]}},
        "Stoker's own",
    ),
    (
        {"spec": {"containers": [{**MAIN, "env": [{"name": "STOKER_RUN", "value": "x"}]}]}},
        "which Stoker sets",
    ),
    ({"spec": {"containers": [{"name": "courier", "env": [{"name": "A", "value": "x"}]}]}}, "only `main`"),
]


@pytest.mark.parametrize(("pod", "words"), OURS)
def test_fields_that_stoker_needs_cannot_be_changed(pod: dict[str, Any], words: str) -> None:
    everything = ["spec.containers", "spec.volumes", "metadata.labels"]
    with pytest.raises(SpecError, match=words):
        ClusterConfig.from_json({"pod": pod, "allow": everything})


def test_merging_adds_by_name_and_keeps_our_own_entries() -> None:
    pod = {
        "metadata": {"labels": {"a": "1"}},
        "spec": {
            "tolerations": [{"key": "x"}],
            "volumes": [{"name": "task", "emptyDir": {}}],
            "containers": [{"name": "main", "image": "i", "env": [{"name": "A", "value": "1"}]}],
        },
    }
    found = template.merge(
        pod,
        {
            "metadata": {"labels": {"b": "2"}},
            "spec": {
                "tolerations": [{"key": "x"}, {"key": "y"}],
                "volumes": [{"name": "more", "emptyDir": {}}],
                "containers": [
                    {"name": "main", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}
                ],
            },
        },
    )
    assert found == {
        "metadata": {"labels": {"a": "1", "b": "2"}},
        "spec": {
            "tolerations": [{"key": "x"}, {"key": "y"}],
            "volumes": [{"name": "task", "emptyDir": {}}, {"name": "more", "emptyDir": {}}],
            "containers": [
                {
                    "name": "main",
                    "image": "i",
                    "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}],
                }
            ],
        },
    }
    assert pod["metadata"]["labels"] == {"a": "1"}, "the pod itself is not touched"
