"""The job: normal forms, defaults, names, and reading back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stoker.errors import SpecError
from stoker.spec import Job, load_job, parse_job, setup_inputs
from stoker.spec.names import derive_name
from stoker.spec.quantities import Workers, duration, show_duration, show_size, size

EVERYTHING = """
name: digits
run: python train.py --epochs 20
setup: pip install -r requirements.txt
image: harbor.example.com/team/torch:2.9
workdir: .
env: {OMP_NUM_THREADS: 1}
resources: {cpu: 4, memory: 8Gi, gpu: 1, shm: 2Gi, disk: 50Gi}
workers: 2..8
processes: 1
framework: torch
roles: {ps: {count: 2, run: python ps.py, resources: {cpu: 500m}, on_loss: task}}
inputs: {digits: data://digits@3, big: s3://bucket/path, vol: pvc://claim}
mounts: {/data/: "pvc://claim/sub:ro", /scratch: empty}
checkpoint: {keep: 3, best: {metric: val_acc, mode: max}, world_size: any}
retries: 2
timeout: 12h
priority: normal
idle: {gpu_below: 5%, for: 30m, then: suspend}
secrets: [HF_TOKEN]
grace: 60s
keep_files: ["runs/", "!*.log", 20Gi]
lost_after: 2m
lease: 24h
exclusive: false
warm: false
launcher: auto
python: /usr/bin/python3
pool: a100
pod: {spec: {nodeSelector: {disk: ssd}}}
tags: [baseline]
project: vision
cluster: gpu-prod
"""


def test_every_key_is_read_and_normalised() -> None:
    job = parse_job(EVERYTHING)
    assert job.to_json() == {
        "name": "digits",
        "run": "python train.py --epochs 20",
        "args": [],
        "setup": {"run": "pip install -r requirements.txt", "inputs": []},
        "image": "harbor.example.com/team/torch:2.9",
        "workdir": ".",
        "env": {"OMP_NUM_THREADS": "1"},
        "resources": {"cpu": 4.0, "memory": 8 << 30, "gpu": 1, "shm": 2 << 30, "disk": 50 << 30},
        "workers": "2..8",
        "processes": 1,
        "framework": "torch",
        "roles": {
            "ps": {
                "count": 2,
                "run": "python ps.py",
                "resources": {"cpu": 0.5, "gpu": 0},
                "env": {},
                "args": [],
                "on_loss": "task",
                "may_fail": False,
            }
        },
        "on_loss": "world",
        "start_within": 600.0,
        "inputs": {"digits": "data://digits@3", "big": "s3://bucket/path", "vol": "pvc://claim"},
        "mounts": {"/data": "pvc://claim/sub:ro", "/scratch": "empty"},
        "checkpoint": {"keep": 3, "best": {"metric": "val_acc", "mode": "max"}, "world_size": "any"},
        "retries": 2,
        "timeout": 43200.0,
        "priority": 0,
        "idle": {"gpu_below": "5%", "for": 1800.0, "then": "suspend"},
        "secrets": ["HF_TOKEN"],
        "grace": 60.0,
        "keep_files": ["runs/", "!*.log", "20Gi"],
        "keep_on_failure": 0.0,
        "lost_after": 120.0,
        "lease": 86400.0,
        "exclusive": False,
        "warm": False,
        "launcher": "auto",
        "python": "/usr/bin/python3",
        "pool": "a100",
        "pod": {"spec": {"nodeSelector": {"disk": "ssd"}}},
        "tags": ["baseline"],
        "project": "vision",
        "cluster": "gpu-prod",
    }
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_defaults() -> None:
    job = parse_job("run: python train.py")
    assert (job.grace, job.lost_after, job.lease, job.retries, job.timeout) == (60.0, 120.0, 86400.0, 0, None)
    assert (job.checkpoint.keep, job.workers, job.project, job.priority) == (3, Workers(1, 1), "default", 0)
    assert (job.resources.cpu, job.resources.memory, job.resources.gpu) == (None, None, 0)


def test_a_job_does_not_change() -> None:
    job = parse_job("run: x")
    with pytest.raises(ValidationError):
        job.retries = 5  # type: ignore[misc]


def test_argv() -> None:
    assert parse_job("run: python train.py | tee log").argv() == [
        "/bin/sh",
        "-c",
        "python train.py | tee log",
    ]
    assert parse_job("run: [python, 'a b.py']").argv() == ["python", "a b.py"]
    assert parse_job("image: team/torch:2").argv() == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1h30m", 5400), ("1h 30m", 5400), ("1.5h", 5400), ("2d", 172800), ("1w", 604800), ("250ms", 0.25), (45, 45), ("45", 45), (0.5, 0.5)],
)  # fmt: skip
def test_durations(text: Any, seconds: float) -> None:
    assert duration(text) == seconds
    assert duration(show_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("8Gi", 8 << 30), ("500Mi", 500 << 20), ("2GB", 2 * 10**9), ("2G", 2 * 10**9), ("8GiB", 8 << 30), ("1.5Gi", 3 << 29), ("0.1Gi", 107374183), ("1Ei", 1 << 60), (1 << 30, 1 << 30), (1e9, 10**9), ("123B", 123)],
)  # fmt: skip
def test_sizes(text: Any, value: int) -> None:
    assert size(text) == value
    assert size(show_size(value)) == value


@pytest.mark.parametrize(("word", "number"), [("low", -10), ("normal", 0), ("high", 10), (7, 7), ("-3", -3)])
def test_priorities(word: Any, number: int) -> None:
    assert Job.from_json({"run": "x", "priority": word}).priority == number


NAMES = [
    (["python", "train.py", "--lr", "1e-5"], "train"),
    (["/bin/sh", "-c", "cd src && python My_Train.py > log.txt"], "my-train"),
    (["torchrun", "--nproc_per_node", "2", "scripts/finetune-bert.py"], "finetune-bert"),
    (["python", "-m", "pkg.train"], "train"),
    (["python", "-m", "pkg.tool.__main__"], "tool"),
    (["/bin/sh", "-c", "A=1 make"], "work-dir"),
    (["python", "-c", "print(1)"], "work-dir"),
    (["/bin/sh", "-c", "echo 'open quote"], "work-dir"),
    ([], "work-dir"),
]


@pytest.mark.parametrize(("argv", "name"), NAMES)
def test_derived_names(argv: list[str], name: str) -> None:
    assert derive_name(argv, "/home/me/Work Dir") == name


def test_derived_name_without_anything() -> None:
    assert derive_name(["/usr/bin/make"]) == "make"
    assert derive_name([], "/") == "run"
    assert derive_name(["日本語"], "/日本語") == "run"
    assert len(derive_name(["x" * 500 + ".py"])) == 40


def test_name_comes_from_the_directory_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "Digit Model"
    folder.mkdir()
    (folder / "stoker.yaml").write_text("run: make train\n")
    assert load_job(folder / "stoker.yaml").name == "digit-model"
    (folder / "stoker.yaml").write_text("run: python fit.py\n")
    assert load_job(str(folder / "stoker.yaml")).name == "fit"


FILES = [
    "a.py",
    "requirements.txt",
    "sub/requirements.txt",
    "prep.sh",
    "vendor/x.c",
    "vendor/deep/y.c",
    "w[1].txt",
]


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("pip install torch", ["requirements.txt"]),
        ("bash ./prep.sh; true", sorted(FILES)),
        ("pip install -r requirements.txt && pip install torch", ["requirements.txt"]),
        ("pip install --requirement=sub/requirements.txt", ["requirements.txt", "sub/requirements.txt"]),
        ("make -C vendor", sorted(FILES)),
        ("pip install ./vendor", ["requirements.txt", "vendor/deep/y.c", "vendor/x.c"]),
        ("pip install -e .[dev]", sorted(FILES)),
        ("pip install -r 'w[1].txt'", ["requirements.txt", "w[1].txt"]),
        ({"run": "make", "inputs": ["vendor/**/*.c"]}, ["vendor/deep/y.c", "vendor/x.c"]),
        ({"run": "make", "inputs": ["*.txt"]}, ["requirements.txt", "w[1].txt"]),
    ],
)
def test_setup_depends_on_what_it_names(setup: Any, expected: list[str]) -> None:
    job = Job.from_json({"run": "x", "setup": setup})
    assert job.setup is not None
    assert setup_inputs(job.setup, FILES) == expected


_name = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
_variable = st.from_regex(r"[A-RT-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)
_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
_word = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=10)
_seconds = st.floats(0.001, 3e8) | st.integers(1, 10**8) | st.sampled_from(["90s", "1h30m", "2d", "1.5h"])
_bytes = st.integers(1 << 20, 1 << 60) | st.sampled_from(["8Gi", "500Mi", "2GB", "1.1Ti"])
_resources = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.floats(0.001, 1e5) | st.sampled_from(["500m", "2", "0.25"]),
        "memory": _bytes,
        "gpu": st.integers(0, 100),
        "shm": _bytes,
        "disk": _bytes,
    },
)
_workers = st.integers(1, 99) | st.tuples(st.integers(1, 9), st.integers(9, 99)).map(
    lambda p: f"{p[0]}..{p[1]}"
)
_command = _word | st.lists(_word, min_size=1, max_size=4)
_jobs = st.fixed_dictionaries(
    {"run": _command},
    optional={
        "name": _name,
        "setup": _word
        | st.fixed_dictionaries({"run": _word}, optional={"inputs": st.lists(_word, max_size=3)}),
        "env": st.dictionaries(
            _variable, _text | st.integers() | st.booleans() | st.floats(allow_nan=False), max_size=3
        ),
        "resources": _resources,
        "workers": _workers,
        "processes": st.integers(1, 8),
        "framework": st.sampled_from(["torch", "tensorflow", "jax", "mpi", "horovod", "dask", "none"]),
        "roles": st.dictionaries(
            st.sampled_from(["ps", "chief", "evaluator"]),
            st.fixed_dictionaries(
                {}, optional={"count": st.integers(1, 9), "run": _command, "resources": _resources}
            ),
        ),
        "checkpoint": st.fixed_dictionaries(
            {},
            optional={
                "keep": st.integers(1, 100),
                "best": st.fixed_dictionaries({"metric": _word, "mode": st.sampled_from(["max", "min"])}),
            },
        ),
        "retries": st.integers(0, 1000),
        "timeout": _seconds,
        "grace": _seconds | st.just(0),
        "priority": st.sampled_from(["low", "normal", "high"]) | st.integers(-1000, 1000),
        "idle": st.fixed_dictionaries({}, optional={"gpu_below": st.floats(1, 100), "for": _seconds}),
        "tags": st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/=+-]{0,9}", fullmatch=True), max_size=3),
        "exclusive": st.booleans(),
        "warm": st.booleans(),
    },
)


@settings(max_examples=200)
@given(_jobs)
def test_a_written_job_reads_back_the_same(raw: dict[str, Any]) -> None:
    job = Job.from_json(raw)
    written = json.loads(json.dumps(job.to_json(), allow_nan=False))
    again = Job.from_json(written)
    assert again == job
    assert again.to_json() == written
    assert parse_job(json.dumps(written)) == job


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.sampled_from(["run", "env", "resources", "cpu", "roles", "setup", "secrets", "inputs"]), inner, max_size=4),
    max_leaves=15,
)  # fmt: skip


@settings(max_examples=300)
@given(_junk)
def test_anything_is_a_job_or_a_spec_error(raw: Any) -> None:
    try:
        Job.from_json(raw)
    except SpecError as exc:
        assert json.dumps(exc.to_json(), allow_nan=False)
        assert str(exc).encode()


@settings(max_examples=300)
@given(st.text(st.sampled_from("run: x\n\t-[]{}&*!|>'\"%@`#,?0a."), max_size=40))
def test_any_text_is_a_job_or_a_spec_error(text: str) -> None:
    try:
        parse_job(text, overrides=[text])
    except SpecError as exc:
        assert str(exc)
