"""Common mistakes of new users with the message for each, and manifests of an attacker."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from stoker.errors import SpecError
from stoker.spec import parse_job
from stoker.spec.interop import Level, Reading, Target, is_foreign, translate

HERE, THERE = Target(), Target(cluster=True)
JOB = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\n"

MISTAKES: list[tuple[str, str, str]] = [
    ("apiVersion: apps/v1\nkind: Deployment\n", 'f.yaml:2: kind: "Deployment" cannot be run', "for ever"),
    ("apiVersion: batch/v1\nkind: CronJob\n", 'f.yaml:2: kind: "CronJob" cannot be run', "spec.jobTemplate"),
    ("apiVersion: batch/v1\nkind: job\n", 'f.yaml:2: kind: "job" cannot be run', "Did you mean `Job`?"),
    ("apiVersion: v1\nkind: Pdo\n", 'kind: "Pdo" cannot be run', "Did you mean `Pod`?"),
    ("kind: Job\nspec: {}\n", "f.yaml:1: `apiVersion` is missing", "batch/v1"),
    ("apiVersion: batch/v1\nspec: {}\n", "f.yaml:1: `kind` is missing", "batch/v1"),
    ("apiVersion: batch/v1beta1\nkind: Job\n", '"batch/v1beta1" of Job is not understood', "`batch/v1`"),
    ("apiVersion: v1\nkind: ConfigMap\n", "f.yaml:2: has nothing to run: ConfigMap", "Pod (v1)"),
    ("apiVersion: v1\nkind: List\nitems: []\n", "f.yaml: is empty", "Job"),
    ("apiVersion: x/v1\nkind: Kustomization\n", '"Kustomization" cannot be run', "kubectl kustomize"),
    (JOB + "  name: {{ .Values.x }}\n", "f.yaml:4: is a template", "helm template"),
    (
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: '{{ .x }}'\n",
        "f.yaml:4: is a template",
        "helm template",
    ),
    ("- apiVersion: v1\n  kind: Pod\n", "f.yaml:1: is a list, not an object", "`---`"),
    ("apiVersion: v1\nkind: Pod\n\tx: 1\n", "f.yaml:3: a tab is used", "spaces"),
    (JOB + "spec: {}\n", "f.yaml:4: spec.template.spec.containers: is missing", "container"),
    (
        JOB + "spec: {template: {spec: {containers: [{name: c, command: [x]}]}}}\n",
        "f.yaml:4: spec.template.spec.containers[0].image: is missing",
        "image",
    ),
    (
        JOB + "spec: {template: {spec: {restartPolicy: Always, containers: [{image: i, command: [x]}]}}}\n",
        '"Always" is not for a Job',
        "`Never`",
    ),
    (
        JOB + "spec: {completionMode: Indexed, template: {spec: {containers: [{image: i, command: [x]}]}}}\n",
        "spec.completions: is missing; an Indexed Job needs it",
        "how many",
    ),
    (
        JOB + "spec: {template: {spec: {containers: [{image: i, command: python train.py}]}}}\n",
        'command: is "python train.py", not a list of words',
        "[python, train.py]",
    ),
    (
        JOB + "spec: {backoffLimit: many, template: {spec: {containers: [{image: i, command: [x]}]}}}\n",
        'spec.backoffLimit: "many" is not a whole number',
        "whole number",
    ),
    (
        JOB + "spec: {template: {spec: {containers: [{image: i, command: [x], volumeMounts: [{name: d, "
        "mountPath: /d}]}]}}}\n",
        'volumeMounts[0].name: there is no volume "d"',
        "none",
    ),
    (
        JOB
        + "spec: {template: {spec: {containers: [{image: i, command: [x], env: [{name: A-B, value: 1}]}]}}}\n",
        'f.yaml:4: env.A-B: "A-B" is not a variable',
        "Did you mean `A_B`?",
    ),
    (
        JOB
        + "spec: {template: {spec: {containers: [{image: i, command: [x], env: [{name: STOKER_RUN, value: 1}]}]}}}\n",
        "is reserved",
        "another name",
    ),
    (
        JOB
        + "spec: {template: {spec: {containers: [{image: i, command: [x], volumeMounts: [{name: d, mountPath: "
        "/stoker/x}]}], volumes: [{name: d, emptyDir: {}}]}}}\n",
        'mountPath: "/stoker/x" is not free',
        "elsewhere",
    ),
    (
        JOB
        + "spec: {template: {spec: {containers: [{image: i, command: [x], resources: {limits: {cpu: -1}}}]}}}\n",
        "limits.cpu: -1 is too small",
        "",
    ),
    (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Wroker: {}}}\n",
        '"Wroker" is not a kind of replica',
        "Did you mean `Worker`?",
    ),
    (
        "apiVersion: kubeflow.org/v1\nkind: TFJob\nspec: {}\n",
        "spec.tfReplicaSpecs: is missing",
        "Chief, Master, Worker, PS, Evaluator",
    ),
    (
        "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nspec: {mpiReplicaSpecs: {Worker: {template: {spec: "
        "{containers: [{image: i}]}}}}}\n",
        "spec.mpiReplicaSpecs: has no Launcher",
        "one Launcher",
    ),
    (
        "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nspec: {runtimeRef: {name: torch-distribute}}\n",
        '"torch-distribute" is not a runtime with a built-in meaning',
        "Did you mean `torch-distributed`?",
    ),
]


@pytest.mark.parametrize(("text", "message", "hint"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_reported_with_line_and_fix(text: str, message: str, hint: str) -> None:
    assert is_foreign(text.encode())
    for target in (HERE, THERE):
        with pytest.raises(SpecError) as caught:
            translate(text.encode(), source="f.yaml", target=target)
        assert message in caught.value.message
        assert hint in (caught.value.hint or "")


def test_all_mistakes_are_reported_at_once() -> None:
    text = (
        JOB
        + "spec: {parallelism: x, template: {spec: {containers: [{command: 1, resources: {limits: {cpu: y}}}]}}}\n"
    )
    with pytest.raises(SpecError, match=r"4 mistakes in f\.yaml"):
        translate(text.encode(), source="f.yaml", target=THERE)


@pytest.mark.parametrize(
    "text", ["", "run: python train.py\n", "kinds: 1\n", "- 1\n", "env: {kind: x}\n", "x"]
)
def test_other_files_are_left_to_the_reader_of_job_files(text: str) -> None:
    assert not is_foreign(text.encode())


def test_a_manifest_where_a_job_file_is_wanted() -> None:
    with pytest.raises(SpecError, match="is a manifest of Kubernetes, not a job file") as caught:
        parse_job(JOB + "spec: {}\n", source="f.yaml")
    assert caught.value.hint == "Try `stoker submit f.yaml`."


BOMB = "apiVersion: v1\nkind: Pod\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    "data",
    [
        BOMB.encode(),
        b"kind: Pod\napiVersion: v1\nx: " + b"[" * 10_000,
        b"kind: Pod\napiVersion: v1\nx: !!python/object/apply:os.system [true]\n",
        b"kind: Pod\napiVersion: v1\n" + b"# " + b"x" * (1 << 20),
        b"---\n".join([b"kind: Pod\napiVersion: v1\nspec: {a: 1}\n"] * 10_000),
        b"kind: Pod\napiVersion: v1\n\xff\xfe",
    ],
    ids=["aliases", "depth", "tag", "size", "documents", "bytes"],
)
def test_bombs_are_refused(data: bytes) -> None:
    with pytest.raises(SpecError):
        translate(data, source="f.yaml", target=HERE)


def _attack(pod: dict[str, Any], container: dict[str, Any]) -> bytes:
    spec = {"containers": [{"name": "c", "image": "i", "command": ["x"], **container}], **pod}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}).encode()


ATTACKS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"hostNetwork": True}, {}, "spec.hostNetwork"),
    ({"hostPID": True}, {}, "spec.hostPID"),
    ({"hostIPC": True}, {}, "spec.hostIPC"),
    ({}, {"securityContext": {"privileged": True}}, "spec.containers[0].securityContext.privileged"),
    (
        {},
        {"securityContext": {"allowPrivilegeEscalation": True}},
        "spec.containers[0].securityContext.allowPrivilegeEscalation",
    ),
    (
        {},
        {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
        "spec.containers[0].securityContext.capabilities",
    ),
    ({}, {"ports": [{"containerPort": 1, "hostPort": 22}]}, "spec.containers[0].ports"),
    (
        {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
        {"volumeMounts": [{"name": "v", "mountPath": "/host"}]},
        "spec.volumes[0].hostPath",
    ),
]


@pytest.mark.parametrize(("pod", "container", "path"), ATTACKS, ids=[path for _, _, path in ATTACKS])
def test_what_reaches_beyond_the_pod_is_not_the_users_to_decide(
    pod: dict[str, Any], container: dict[str, Any], path: str
) -> None:
    data = _attack(pod, container)
    here = translate(data, source="f.json", target=HERE)
    assert [note.path for note in here.of(Level.REFUSED)] == [path]
    assert here.translations[0].job.pod is None
    there = translate(data, source="f.json", target=THERE)
    assert there.translations[0].job.pod, "it goes along, for the cluster's admin to decide"
    assert [note.path for note in there.of(Level.SAID)] == [path]


WHOLE = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: x, labels: {a: b}}
spec:
  nprocPerNode: 2
  elasticPolicy: {minReplicas: 1, maxReplicas: 2, maxRestarts: 3}
  runPolicy: {backoffLimit: 1, activeDeadlineSeconds: 5, suspend: false, schedulingPolicy: {minAvailable: 1}}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: Never
      template:
        metadata: {annotations: {a: b}}
        spec:
          terminationGracePeriodSeconds: 3
          nodeSelector: {a: b}
          securityContext: {runAsUser: 1}
          containers:
            - name: pytorch
              image: i
              command: [a]
              args: [b]
              workingDir: /w
              env: [{name: A, value: b}, {name: S, valueFrom: {secretKeyRef: {name: a, key: b}}}]
              envFrom: [{configMapRef: {name: a}}]
              resources: {limits: {cpu: 1, nvidia.com/gpu: 1}}
              ports: [{containerPort: 1}]
              securityContext: {capabilities: {drop: [ALL]}}
              volumeMounts: [{name: v, mountPath: /v}, {name: s, mountPath: /dev/shm}]
          volumes: [{name: v, persistentVolumeClaim: {claimName: c}}, {name: s, emptyDir: {sizeLimit: 1Gi}}]
"""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from _places(child, (*path, key))


@pytest.mark.parametrize(
    "odd", [None, True, -1, 1e300, "", "x\ny", [], [None], [[1]], {}, {"a": None}], ids=repr
)
def test_a_value_of_any_shape_is_a_mistake_at_most(odd: Any) -> None:
    """Every value of a manifest is replaced in turn: it is read or refused, and never crashes the reader."""
    whole = yaml.safe_load(WHOLE)
    for place in _places(whole):
        if not place:
            continue
        changed = copy.deepcopy(whole)
        here = changed
        for part in place[:-1]:
            here = here[part]
        here[place[-1]] = odd
        for target in (THERE, Target(images=False)):
            try:
                found = translate(json.dumps(changed).encode(), source="f.yaml", target=target)
            except SpecError:
                continue
            assert isinstance(found, Reading)
