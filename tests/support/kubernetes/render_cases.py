"""Attempts whose manifests are stored beside the tests, in manifests/.

Run this file to write them again, and read the difference before the commit.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.manifests.pod import Keys, RunIdentity, render
from stoker.spec import Job

MANIFESTS = Path(__file__).parents[2] / "unit/kubernetes/manifests"
KEYS = Keys(b"k" * 32, b"certificate", b"private key")
ORIGIN = RunIdentity("h0me12345678", "gpu-prod", "training", "0123456789abcdef")


@dataclass(frozen=True)
class Case:
    """`what`: the purpose of the case."""

    what: str
    job: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    run: str = "digits-7f3k"
    number: int = 1
    tasks: int = 1
    incarnation: int = 1
    node: str = "node-1"
    labels: dict[str, str] = field(default_factory=dict)

    def attempt(self) -> Attempt:
        tree = {"name": "digits", "run": "python train.py", "image": "torch:2.9", **self.job}
        job = Job.from_json({key: value for key, value in tree.items() if value is not None})
        wants = job.resources
        plans = tuple(
            TaskPlan(
                f"worker-{index}",
                index=index,
                incarnation=self.incarnation,
                node=self.node,
                cpu=wants.cpu,
                memory=wants.memory,
                gpus=tuple(f"{self.node}:gpu-{gpu}" for gpu in range(wants.gpu)),
            )
            for index in range(self.tasks)
        )
        return Attempt(self.run, self.number, plans, job, self.secrets, self.image, self.labels)

    def objects(self) -> list[dict[str, Any]]:
        return render(self.attempt(), ClusterConfig.from_json(self.config), KEYS, ORIGIN)


CASES = {
    "additions": Case(
        "what a job mounts and adds to its pods itself; the image's own command with other arguments",
        {
            "run": None,
            "args": ["--epochs", "5", "$(HOME)"],
            "launcher": "none",
            "mounts": {"/data": "pvc://datasets/mnist:ro", "/out": "pvc://results", "/scratch": "empty"},
            "pod": {
                "metadata": {"labels": {"team": "vision"}},
                "spec": {
                    "nodeSelector": {"disk": "ssd"},
                    "tolerations": [{"key": "spot", "operator": "Exists"}],
                    "volumes": [{"name": "code", "configMap": {"name": "scripts", "defaultMode": 493}}],
                    "containers": [
                        {"name": "main", "volumeMounts": [{"name": "code", "mountPath": "/code"}]}
                    ],
                },
            },
        },
        {"pod": {"spec": {"nodeSelector": {"disk": "nvme"}}}},
    ),
    "smallest": Case(
        "An image and nothing else: our code from a ConfigMap, one core reserved and none limited", {}
    ),
    "gpu": Case(
        "What a GPU job in a pool of a well-kept cluster looks like",
        {
            "resources": {"cpu": 8, "memory": "32Gi", "gpu": 2, "shm": "8Gi", "disk": "100Gi"},
            "pool": "a100",
            "priority": "high",
            "grace": "2m",
            "secrets": ["HF_TOKEN"],
        },
        {
            "stoker_image": "registry.example.com/stoker:1.0",
            "pull_secrets": ["regcred"],
            "pools": {
                "a100": {
                    "selector": {"nvidia.com/gpu.product": "A100-SXM4-80GB"},
                    "tolerations": ["dedicated=training:NoSchedule"],
                }
            },
            "priority_classes": {"low": "batch-low", "high": "batch-high"},
            "labels": {"team": "vision"},
            "annotations": {"example.com/owner": "Vision, 3rd floor"},
        },
        image={
            "reference": "torch@sha256:" + "a" * 64,
            "user": "1001:100",
            "entrypoint": ["/entry"],
            "cmd": ["go"],
        },
        secrets={"HF_TOKEN": "hf_0123456789"},
        labels={"name": "digits", "project": "vision", "user": "ann@example.com"},
    ),
    "together": Case(
        "Two GPU tasks that work together, with RDMA and slices of GPUs",
        {"resources": {"gpu": 1}, "pool": "slices"},
        {
            "security": "baseline",
            "gpu_profiles": {"small": "nvidia.com/mig-1g.10gb"},
            "pools": {"slices": {"gpu_profile": "small"}},
            "rdma": {"resource": "rdma/hca", "capability": True},
        },
        tasks=2,
    ),
    "volumes": Case(
        "Claims as inputs and for checkpoints, and a root that cannot be written",
        {"inputs": {"big": "pvc://datasets/imagenet/train", "vol": "pvc://scratch"}},
        {"checkpoints": "checkpoints", "read_only_root": True},
    ),
    "claim": Case(
        "Checkpoints on a claim; init and courier from our own image see all that this home has there",
        {},
        {"checkpoints": "kept", "stoker_image": "registry.example.com/stoker:1"},
        number=2,
    ),
    "platform": Case("The cluster assigns users", {}, {"user": "platform"}, image={"user": "app"}),
    "named-user": Case(
        "An image whose user has a name, where root is allowed: all containers are of that image and agree on it",
        {},
        {"security": "baseline"},
        image={"user": "app"},
    ),
    "no-launcher": Case(
        "The image as it is: values are values, whatever dollars are in them",
        {
            "launcher": "none",
            "run": ["train", "--name", "$(HOME)"],
            "env": {"PRICE": "$5 $(PATH)"},
            "secrets": ["TOKEN"],
            "timeout": "1h",
        },
        secrets={"TOKEN": "t0ken-value"},
    ),
    "template": Case(
        "What an admin adds to every pod",
        {},
        {
            "allow": ["hostPath", "hostNetwork"],
            "pod": {
                "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
                "spec": {
                    "hostNetwork": True,
                    "runtimeClassName": "nvidia",
                    "tolerations": [{"key": "spot", "operator": "Exists"}],
                    "volumes": [{"name": "cache", "hostPath": {"path": "/var/cache/models"}}],
                    "containers": [
                        {
                            "name": "main",
                            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
                            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                        }
                    ],
                },
            },
        },
    ),
    "replacement": Case(
        "The third incarnation of a task, with a name that is too long, on a node that is still to come",
        {},
        run="an-experiment-with-a-name-of-forty-chars-x7f3k",
        number=12,
        incarnation=3,
        node="new:a100:0",
    ),
}


def readable(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the Secret's values in plain text; they contain no real secrets."""
    found = []
    for obj in objects:
        if obj["kind"] == "Secret":
            data = {key: base64.b64decode(value).decode() for key, value in obj["data"].items()}
            obj = {**{key: value for key, value in obj.items() if key != "data"}, "stringData": data}
        found.append(obj)
    return found


def write() -> None:
    for name, case in CASES.items():
        text = yaml.safe_dump_all(readable(case.objects()), sort_keys=False, width=110)
        (MANIFESTS / f"{name}.yaml").write_text(f"# {case.what}.\n{text}")


if __name__ == "__main__":
    write()
