"""`stoker submit` of foreign files, and `stoker export`: what is sent, printed and returned."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.spec import parse_job

JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: NAME}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
        - {name: c, image: "python:3.12", command: [python, train.py, --data=/data/x]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str, name: str = "job.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def test_a_file_becomes_a_run_and_the_output_names_it(fake: Any, invoke: Any, file: Any) -> None:
    result = invoke("submit", file(JOB.replace("NAME", "digits")), "-d", "--json")
    assert (result.code, json.loads(result.out)["id"]) == (0, "digits-7f3k")
    assert result.err == 'kind Job "digits" -> run digits-7f3k: 1 task\n'
    [body] = fake.submitted
    assert body["job"]["run"] == ["python", "train.py", "--data=/data/x"]
    assert body["code"] is None, "an image has its own code"


def test_several_are_submitted_in_their_order(fake: Any, invoke: Any, file: Any) -> None:
    text = "---\n".join(JOB.replace("NAME", name) for name in ("one", "two", "three"))
    result = invoke("submit", file(text), "-d", "--json", "--key", "k")
    assert [run["id"] for run in json.loads(result.out)] == ["digits-7f3k"] * 3
    assert [body["job"]["name"] for body in fake.submitted] == ["one", "two", "three"]
    assert [body["key"] for body in fake.submitted] == ["k-0", "k-1", "k-2"]


def test_unsupported_entries_are_refused_unless_lenient(fake: Any, invoke: Any, file: Any) -> None:
    name = file(
        JOB.replace("NAME", "a").replace("spec:\n      restart", "spec:\n      nodeName: n1\n      restart")
    )
    result = invoke("submit", name, "-d")
    assert (result.code, result.out, fake.submitted) == (2, "", [])
    assert "error: one entry in job.yaml cannot be honoured" in result.err
    assert 'job.yaml:9: spec.template.spec.nodeName ("n1"): the scheduler chooses the node' in result.err
    assert "hint: --lenient submits it without them" in result.err
    lenient = invoke("submit", name, "-d", "--lenient")
    assert lenient.code == 0
    assert lenient.err.startswith("ignored: job.yaml:9: spec.template.spec.nodeName")


def test_without_a_container_runtime_the_command_runs_here(
    fake: Any, invoke: Any, file: Any, tmp_path: Path
) -> None:
    fake.images = False
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    volume = "      volumes: [{name: d, persistentVolumeClaim: {claimName: claim}}]\n"
    mount = "--data=/data/x], volumeMounts: [{name: d, mountPath: /data}]"
    name = file(JOB.replace("NAME", "a").replace("--data=/data/x]", mount) + volume)
    strict = invoke("submit", name, "-d", "--volume", "claim=data")
    assert strict.code == 2 and "no container runtime" in strict.err
    result = invoke("submit", name, "-d", "--lenient", "--volume", "claim=data")
    assert result.code == 0, result
    [body] = fake.submitted
    assert body["job"]["run"] == ["python", "train.py", f"--data={tmp_path}/data/x"]
    assert "image" not in body["job"] and body["code"] is not None
    forgotten = invoke("submit", name, "-d")
    assert "`--volume claim=PATH` says which folder it is here" in forgotten.err


def test_an_image_can_be_left_out(fake: Any, invoke: Any, file: Any) -> None:
    result = invoke("submit", file(JOB.replace("NAME", "a")), "-d", "--lenient", "--set", "image=null")
    assert result.code == 0
    assert "image" not in fake.submitted[0]["job"]


def test_privileges_are_refused_even_leniently(fake: Any, invoke: Any, file: Any) -> None:
    text = JOB.replace("NAME", "a").replace(
        "spec:\n      restart", "spec:\n      hostNetwork: true\n      restart"
    )
    result = invoke("submit", file(text), "-d", "--lenient")
    assert (result.code, fake.submitted) == (2, [])
    assert "one entry in job.yaml would reach beyond the task and is refused" in result.err
    assert "job.yaml:9: spec.template.spec.hostNetwork (true)" in result.err
    there = invoke("submit", file(text), "-d", "--cluster", "lab")
    assert there.code == 0, "the cluster decides"
    assert fake.submitted[0]["job"]["pod"] == {"spec": {"hostNetwork": True}}
    assert fake.submitted[0]["job"]["cluster"] == "lab"


def test_a_dry_run_prints_an_equivalent_job_file(fake: Any, invoke: Any, file: Any) -> None:
    name = file(JOB.replace("NAME", "a") + "---\n" + JOB.replace("NAME", "b"))
    result = invoke("submit", name, "--dry-run")
    documents = [yaml.safe_dump(tree) for tree in yaml.safe_load_all(result.out)]
    assert [parse_job(text).name for text in documents] == ["a", "b"]
    assert fake.submitted == []
    whole = json.loads(invoke("submit", name, "--dry-run", "--json").out)
    assert [(one["kind"], one["name"], one["job"]["image"]) for one in whole] == [
        ("Job", "a", "python:3.12"),
        ("Job", "b", "python:3.12"),
    ]


def test_secrets_are_read_at_submit(
    fake: Any, invoke: Any, file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = "env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}], "
    name = file(JOB.replace("NAME", "a").replace("command:", env + "command:"))
    assert "the secret HF_TOKEN is not in the environment" in invoke("submit", name, "-d").err
    monkeypatch.setenv("HF_TOKEN", "hush")
    result = invoke("submit", name, "-d")
    assert result.code == 0 and "hush" not in result.err + result.out
    assert fake.submitted[0]["secrets"] == {"HF_TOKEN": "hush"}


def test_the_standard_input(fake: Any, invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO(JOB.replace("NAME", "piped").encode())

    monkeypatch.setattr("sys.stdin", Input)
    assert invoke("submit", "-", "-d").code == 0
    assert fake.submitted[0]["job"]["name"] == "piped"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--volume", "claim"), "--volume: 'claim' is not NAME=PATH"),
        (("--volume", "claim=/no/such"), "there is no folder '/no/such'"),
        (("--volume", "claim=.", "--cluster", "lab"), "--volume is for runs on this machine"),
    ],
)
def test_wrong_flags(fake: Any, invoke: Any, file: Any, words: Any, message: str) -> None:
    result = invoke("submit", file(JOB.replace("NAME", "a")), "-d", *words)
    assert result.code == 2 and message in result.err


def test_flags_for_foreign_files_are_refused_for_job_files(fake: Any, invoke: Any, file: Any) -> None:
    result = invoke("submit", file("run: x\n"), "-d", "--lenient")
    assert result.code == 2 and "--lenient is for files of Kubernetes and Kubeflow" in result.err


def test_export(fake: Any, invoke: Any, make_run: Any) -> None:
    job = parse_job("name: digits\nrun: python train.py\nworkers: 2\ncheckpoint: {keep: 9}\n").to_json()
    fake.runs.append(make_run("digits-7f3k", "succeeded", job=job))
    assert "needs --as" in invoke("export", "digits-7f3k").err
    assert "names no image, and a manifest needs one" in invoke("export", "digits-7f3k", "--as", "job").err
    result = invoke("export", "digits-7f3k", "--as", "job", "--image", "i:1", "--namespace", "lab")
    assert result.code == 0
    found = yaml.safe_load(result.out)
    assert (found["kind"], found["metadata"]) == ("Job", {"name": "digits", "namespace": "lab"})
    assert "note: `checkpoint` is left out: a job has no field for it" in result.err
    assert (
        json.loads(invoke("export", "digits-7f3k", "--as", "job", "--image", "i:1", "--json").out)["kind"]
        == "Job"
    )
