"""Commands and variables filled in as by Kubernetes; sizes; replaced paths."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from stoker.errors import SpecError
from stoker.spec import Job
from stoker.spec.interop import Level, Reading, Target, translate
from stoker.spec.interop.expansion import Variables, command, escaped, looped, moved
from stoker.spec.interop.rows import BY_SCOPE, ROWS, SCOPES, Does

THERE = Target(cluster=True)


def _pod(container: dict[str, Any], target: Target = THERE, **spec: Any) -> tuple[Job, Reading]:
    whole = {"containers": [{"name": "c", "image": "i", "command": ["x"], **container}], **spec}
    tree = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": whole}
    reading = translate(json.dumps(tree).encode(), source="f", target=target)
    return reading.translations[0].job, reading


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("$(A)-$(B)", "1-2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
        ("a$$b", "a$b"),
    ],
)
def test_references_are_filled_in_as_kubernetes_does(text: str, filled: str) -> None:
    variables = Variables({"A": "1", "B": "2"})
    assert variables.fill(text) == filled
    assert variables.fill(escaped(filled)) == filled, "and the way back"


def test_a_command_with_values_known_only_at_run_time_uses_the_shell() -> None:
    variables = Variables({"A": "it's"}, {"IP", "N"})
    found = command(["echo", "$(A)", "x$(IP):$(N)y", "$$(IP)"], variables)
    assert isinstance(found, str)
    out = subprocess.run(
        ["/bin/sh", "-c", found],
        env={**os.environ, "IP": "1 2", "N": "*"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout == "it's x1 2:*y $(IP)\n"


def test_a_command_of_the_shell_is_text() -> None:
    assert command(["/bin/sh", "-c", "a && b"], Variables()) == "a && b"
    assert command(["bash", "-c", "a"], Variables()) == ["bash", "-c", "a"]


def test_the_indexes_are_divided_among_the_workers(tmp_path: Any) -> None:
    text = looped(["sh", "-c", "echo $JOB_COMPLETION_INDEX in $(pwd)"], Variables(), ["cd /"], of=7, step=3)
    said = []
    for index in range(3):
        env = {**os.environ, "STOKER_TASK_INDEX": str(index)}
        out = subprocess.run(["/bin/sh", "-c", text], env=env, capture_output=True, text=True, check=True)
        said.append(out.stdout.split("\n")[:-1])
    assert said == [["0 in /", "3 in /", "6 in /"], ["1 in /", "4 in /"], ["2 in /", "5 in /"]]
    failing = looped(["sh", "-c", "exit 3"], Variables(), [], of=2, step=1)
    assert (
        subprocess.run(["/bin/sh", "-c", failing], env={"STOKER_TASK_INDEX": "0"}, check=False).returncode
        == 3
    )


def test_paths_that_cannot_be_mounted_are_replaced_as_whole_paths_only() -> None:
    folders = {"/data": "/home/ada/d", "/data/deep": "/mnt"}
    assert moved("--in=/data/x --deep=/data/deep/y", folders) == "--in=/home/ada/d/x --deep=/mnt/y"
    assert (
        moved("/database /my/data s3://b/data /data", folders) == "/database /my/data s3://b/data /home/ada/d"
    )


@pytest.mark.parametrize(
    ("resources", "wanted"),
    [
        ({"limits": {"cpu": "500m", "memory": "129e6"}}, {"cpu": 0.5, "memory": 129_000_000}),
        ({"limits": {"memory": "128974848000m"}}, {"memory": 128_974_848}),
        ({"limits": {"cpu": 0, "nvidia.com/gpu": "2", "amd.com/gpu": 1}}, {"gpu": 3}),
        ({"requests": {"cpu": 2}, "limits": {"cpu": 4}}, {"cpu": 4.0}),
        ({"limits": {"ephemeral-storage": "2Gi"}}, {"disk": 2 << 30}),
    ],
)
def test_amounts(resources: dict[str, Any], wanted: dict[str, Any]) -> None:
    job, _ = _pod({"resources": resources})
    assert job.resources.model_dump(exclude_defaults=True) == wanted


def test_unknown_resources_are_noted() -> None:
    _, reading = _pod(
        {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1, "rdma/hca": 1, "a/b": 1}, "claims": [{}]}}
    )
    assert sorted(note.path.rpartition("resources.")[2] for note in reading.of(Level.IGNORED)) == [
        "claims",
        "limits.a/b",
        "limits.nvidia.com/mig-1g.10gb",
        "limits.rdma/hca",
    ]


def test_variables_see_those_before_them_and_later_ones_win() -> None:
    env = [{"name": "A", "value": "$(B)"}, {"name": "B", "value": "1"}, {"name": "A", "value": "$(B)$(B)"}]
    job, _ = _pod({"env": env, "command": ["echo", "$(A)"]})
    assert (job.env, job.run) == ({"A": "11", "B": "1"}, ("echo", "11"))


def test_a_command_runs_where_the_file_says() -> None:
    job, _ = _pod({"workingDir": "/my work"})
    assert job.run == "cd '/my work' && exec x"
    bare = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"image": "i", "workingDir": "/w"}]}}
    reading = translate(json.dumps(bare).encode(), source="f", target=THERE)
    assert [note.path for note in reading.of(Level.IGNORED)] == ["spec.containers[0].workingDir"]


def test_names_become_valid_names() -> None:
    tree = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a.b" + "c" * 60, "labels": {"x": "y z"}}}
    spec = {"spec": {"containers": [{"image": "i", "command": ["x"]}]}}
    reading = translate(json.dumps(tree | spec).encode(), source="f", target=THERE)
    assert reading.translations[0].job.name == "a-b" + "c" * 37
    assert [note.path for note in reading.of(Level.SAID)] == ["metadata.name", "metadata.labels.x"]


def test_the_table_knows_each_key_once_and_every_scope() -> None:
    assert len({(row.scope, row.key) for row in ROWS}) == len(ROWS)
    assert {row.scope for row in ROWS} == set(SCOPES)
    assert all(BY_SCOPE[row.scope][row.key] is row for row in ROWS)
    assert all(row.words for row in ROWS)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.scope in ("pod", "container")],
    ids=lambda row: f"{row.scope}.{row.key}",
)
def test_keys_of_a_pod_are_handled_as_in_the_table(row: Any) -> None:
    """Each key that is not supported gets a value, and leaves the note that the table names."""
    if row.does is Does.HONOURED:
        return
    where: dict[str, Any] = {row.key: {"x": "y"} if row.does is not Does.REFUSED else True}
    _, reading = _pod(
        *([where] if row.scope == "container" else [{}]), Target(), **(where if row.scope == "pod" else {})
    )
    notes = [note for level in Level for note in reading.of(level) if row.key in note.path]
    levels = {
        Does.HARMLESS: [],
        Does.SAID: [Level.SAID],
        Does.IGNORED: [Level.IGNORED],
        Does.REFUSED: [Level.REFUSED],
    }
    assert [note.level for note in notes] == levels[row.does]


def test_an_override_of_the_command_is_noted_and_the_rest_is_applied() -> None:
    pod = {
        "terminationGracePeriodSeconds": 7,
        "containers": [{"name": "node", "command": ["other"], "env": [{"name": "A", "value": "1"}]}],
    }
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {"command": ["x"]},
        "podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": pod}],
    }
    tree = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": spec}
    reading = translate(json.dumps(tree).encode(), source="f", target=THERE)
    job = reading.translations[0].job
    assert (job.run, job.env, job.grace) == (("x",), {"A": "1"}, 7.0)
    assert [note.path for note in reading.of(Level.IGNORED)] == ["spec.podTemplateOverrides[0].spec"]


def test_keys_without_a_value_are_no_keys() -> None:
    job, reading = _pod(
        {"livenessProbe": None, "env": None, "ports": []},
        tolerations=[{"key": "a", "value": None}],
        nodeSelector=None,
        affinity={"nodeAffinity": None},
        volumes=None,
    )
    assert job.pod == {"spec": {"tolerations": [{"key": "a"}], "affinity": {}}}
    assert not [note for level in Level for note in reading.of(level)]
    with pytest.raises(SpecError, match="names no source for the volume"):
        _pod({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}, volumes=[{"name": "v", "emptyDir": None}])
