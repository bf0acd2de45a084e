"""Runs as manifests and back: the same job."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import Refused
from stoker.spec import Job
from stoker.spec.interop import Level, Target, translate
from stoker.spec.interop.export import KINDS, Source, export
from stoker.spec.interop.writer import to_yaml

JOB: dict[str, Any] = {
    "name": "digits",
    "run": ["python", "train.py", "--lr", "1e-3", "$(HOME)", "$$x"],
    "image": "registry.example.com/team/torch:2.9",
    "env": {"A": "1", "B": "$(A) and $HOME"},
    "resources": {"cpu": 1.5, "memory": "8Gi", "gpu": 2, "shm": "1Gi", "disk": "10Gi"},
    "mounts": {"/data": "pvc://datasets/mnist:ro", "/out": "pvc://datasets/out", "/scratch": "empty"},
    "retries": 3,
    "timeout": "2h",
    "grace": "2m",
    "tags": ["team=vision", "baseline"],
    "pod": {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": {"disk": "ssd"}}},
}
TORCH = {**JOB, "framework": "torch", "processes": 2}
ROUND_TRIPS: list[tuple[str, dict[str, Any]]] = [
    ("job", JOB),
    ("job", {**JOB, "run": "cd /w && exec python x.py | tee $LOG"}),
    ("job", {**JOB, "workers": 4, "on_loss": "task"}),
    ("job", {"name": "own", "image": "i:1", "args": ["--x", "$(Y)"]}),
    ("job", {"name": "own", "image": "i:1", "secrets": ["HF_TOKEN"], "run": "x", "retries": 6}),
    (
        "job",
        {
            **JOB,
            "pod": {
                "spec": {
                    "volumes": [{"name": "code", "configMap": {"name": "s"}}],
                    "containers": [
                        {
                            "name": "main",
                            "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                            "volumeMounts": [{"name": "code", "mountPath": "/code"}],
                        }
                    ],
                }
            },
        },
    ),
    ("pytorchjob", TORCH),
    (
        "pytorchjob",
        {**TORCH, "workers": 3, "roles": {"master": {"run": "python m.py", "resources": {"cpu": 1}}}},
    ),
    ("pytorchjob", {**TORCH, "workers": "2..8", "start_within": "5m"}),
    ("tfjob", {**JOB, "framework": "tensorflow", "workers": 2, "roles": {"ps": {"count": 2}, "chief": {}}}),
    ("tfjob", {**JOB, "framework": "tensorflow", "workers": 2, "retries": 0}),
    (
        "mpijob",
        {**JOB, "framework": "mpi", "processes": 4, "workers": 2, "roles": {"launcher": {"run": "mpirun x"}}},
    ),
    ("trainjob", {**TORCH, "workers": 4, "retries": 0, "grace": "60s"}),
    ("trainjob", {"name": "j", "image": "i:1", "run": "x", "framework": "jax", "workers": 2}),
]


@pytest.mark.parametrize(("kind", "tree"), ROUND_TRIPS)
def test_the_job_is_the_same_when_read_back(kind: str, tree: dict[str, Any]) -> None:
    job = Job.from_json(tree)
    found = export(Source(job, "unused:1"), kind)
    assert found.left_out == ()
    text = to_yaml([found.manifest])
    reading = translate(text.encode(), source="f.yaml", target=Target(cluster=True))
    assert not reading.of(Level.IGNORED), reading.of(Level.IGNORED)
    back = reading.translations[0].job
    theirs, ours = _plain(back), _plain(job)
    if kind == "mpijob":  # an MPIJob cannot have commands of its workers
        for one in (theirs, ours):
            del one["worker"][-1]["run"]
    assert theirs == ours


def _plain(job: Job) -> dict[str, Any]:
    """A role with only the keys of the job equals a role without keys."""
    from stoker.spec.roles import parts

    return {
        part.role: (part.count, part.least, part.on_loss, part.ends, part.job.to_json())
        for part in parts(job)
    }


def test_a_job_as_a_whole() -> None:
    job = Job.from_json(
        {"name": "digits", "run": "python train.py", "workers": 2, "retries": 1, "timeout": "90s"}
    )
    assert export(Source(job, "python:3.12", "lab"), "job").manifest == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "digits", "namespace": "lab"},
        "spec": {
            "backoffLimit": 1,
            "completions": 2,
            "parallelism": 2,
            "completionMode": "Indexed",
            "activeDeadlineSeconds": 90,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "main",
                            "image": "python:3.12",
                            "command": ["/bin/sh", "-c", "python train.py"],
                        }
                    ],
                    "terminationGracePeriodSeconds": 60,
                }
            },
        },
    }


def test_keys_without_an_equivalent_are_noted() -> None:
    job = Job.from_json({"run": "x", "image": "i", "checkpoint": {"keep": 9}, "setup": "make", "hang": {}})
    assert export(Source(job, ""), "job").left_out == ("setup", "hang", "checkpoint")


@pytest.mark.parametrize(
    ("tree", "kind", "message"),
    [
        ({"run": "x", "framework": "torch"}, "job", "equal tasks"),
        ({"run": "x", "roles": {"ps": {}}}, "job", "roles ps"),
        ({"run": "x", "framework": "jax"}, "pytorchjob", "is for framework torch"),
        ({"run": "x", "roles": {"ps": {}}}, "pytorchjob", "no replicas of the kind ps"),
        ({"run": "x", "roles": {"ps": {}}}, "trainjob", "equal nodes"),
        ({"run": "x", "framework": "dask"}, "trainjob", "no standard runtime"),
        ({"run": "x", "inputs": {"a": "pvc://b"}}, "job", "`inputs`"),
        ({"run": "x", "mounts": {"/a": "/home/ada"}}, "job", "a folder of one machine"),
    ],
)
def test_jobs_without_an_equivalent_are_refused(tree: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        export(Source(Job.from_json({"image": "i", **tree}), "i"), kind)


REQUIRED: dict[str, tuple[str, str, str]] = {
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob", "pytorchReplicaSpecs"),
    "tfjob": ("kubeflow.org/v1", "TFJob", "tfReplicaSpecs"),
    "mpijob": ("kubeflow.org/v2beta1", "MPIJob", "mpiReplicaSpecs"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainer"),
}
REPLICA = {"replicas", "restartPolicy", "template"}
SPEC = {
    "pytorchjob": {"runPolicy", "elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs"},
    "tfjob": {"runPolicy", "successPolicy", "tfReplicaSpecs", "enableDynamicWorker"},
    "mpijob": {"runPolicy", "slotsPerWorker", "mpiReplicaSpecs", "sshAuthMountPath", "mpiImplementation"},
    "trainjob": {
        "runtimeRef",
        "trainer",
        "podTemplateOverrides",
        "activeDeadlineSeconds",
        "suspend",
        "initializer",
    },
}
POLICY = {
    "cleanPodPolicy",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "backoffLimit",
    "schedulingPolicy",
}
"""As the public types of these kinds have them."""


@pytest.mark.parametrize(("kind", "tree"), [pair for pair in ROUND_TRIPS if pair[0] != "job"])
def test_kubeflows_kinds_have_the_structure_of_their_types(kind: str, tree: dict[str, Any]) -> None:
    found = export(Source(Job.from_json(tree), "i"), kind).manifest
    version, name, replicas = REQUIRED[kind]
    assert (found["apiVersion"], found["kind"]) == (version, name)
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(found["spec"]) <= SPEC[kind]
    assert replicas in found["spec"]
    if kind == "trainjob":
        trainer = found["spec"]["trainer"]
        known = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
        assert set(trainer) <= known
        assert isinstance(trainer["numNodes"], int)
        for override in found["spec"].get("podTemplateOverrides", []):
            assert set(override) <= {"targetJobs", "metadata", "spec"}
        return
    assert set(found["spec"]["runPolicy"]) <= POLICY
    for replica in found["spec"][replicas].values():
        assert set(replica) <= REPLICA
        assert isinstance(replica["replicas"], int)
        container = replica["template"]["spec"]["containers"][0]
        assert container["image"]
        assert all(isinstance(word, str) for word in container.get("command", []))
        assert all(isinstance(one.get("value", ""), str) for one in container.get("env", []))


def test_every_kind_has_a_round_trip() -> None:
    assert {kind for kind, _ in ROUND_TRIPS} == set(KINDS)
