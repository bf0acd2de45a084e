"""`--set` and the flags of `stoker run`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stoker.errors import SpecError
from stoker.spec import Job, job_from_flags, override_job, parse_job
from stoker.spec.flags import FLAGS

BASE = "run: python train.py\nresources: {gpu: 2}\nsetup: make\ntimeout: 1h\nenv: {A: 1}\n"
GOOD: list[tuple[str, str, Any]] = [
    ("resources.gpu=1", "resources.gpu", 1),
    ("resources.memory=8Gi", "resources.memory", 8 << 30),
    ("tags=[a,b]", "tags", ("a", "b")),
    ("env.X=1", "env", {"A": "1", "X": "1"}),
    ("env.X=", "env", {"A": "1", "X": ""}),
    ("env.X=1e-5", "env", {"A": "1", "X": "1e-5"}),
    ("env.X=a=b: c #d", "env", {"A": "1", "X": "a=b: c #d"}),
    ('env.X="quoted"', "env", {"A": "1", "X": "quoted"}),
    ("env={B: 1.10}", "env", {"B": "1.10"}),
    ("run=python other.py --note 'a: b'", "run", "python other.py --note 'a: b'"),
    ("run=[python, other.py]", "run", ("python", "other.py")),
    ("setup.inputs=[a.txt]", "setup.inputs", ("a.txt",)),
    ("timeout=null", "timeout", None),
    ("workers=2..8", "workers.max", 8),
    ("checkpoint.best={metric: loss, mode: min}", "checkpoint.best.mode", "min"),
    ("roles.ps.count=3", "roles", None),
    ("name=007", "name", "007"),
    ("exclusive=true", "exclusive", True),
    (" resources.gpu = 3", "resources.gpu", 3),
]


@pytest.mark.parametrize(("override", "path", "expected"), GOOD)
def test_set(override: str, path: str, expected: Any) -> None:
    job = parse_job(BASE, overrides=[override])
    value: Any = job
    for part in path.split("."):
        value = getattr(value, part)
    if path == "roles":
        assert value["ps"].count == 3
    else:
        assert value == expected
    named = job.model_copy(update={"name": "train"} if path == "run" else {})
    assert override_job(parse_job(BASE), [override]) == named, "a job that has a name keeps it"


BAD = [
    ("resources.gpu=x", '--set resources.gpu=x: "x" is not a whole number of GPUs'),
    ("resources.gpus=1", "--set resources.gpus=1: no such key"),
    ("resource.gpu=1", "--set resource.gpu=1: resource: no such key"),
    ("gpu", '--set: "gpu" is not KEY=VALUE'),
    ("=1", '--set: "" is not KEY=VALUE'),
    ("a..b=1", '--set: "a..b" is not KEY=VALUE'),
    ("timeout=", "--set timeout=: has no value"),
    ("retries.x=1", "--set retries.x=1: retries: 0 is not"),
    ("name.x=1", "--set name.x=1: "),
    ("tags=[a", "--set tags=[a: the `[` opened on line 1 is not closed"),
    ("tags=a", '--set tags=a: "a" is not a list'),
    ("resources={cpu: x}", '--set resources={cpu: x}: resources.cpu: "x" is not a number of cores'),
    ("run=null", "--set run=null: is missing"),
]


@pytest.mark.parametrize(("override", "message"), BAD)
def test_wrong_set_is_named(override: str, message: str) -> None:
    base = "name: a\n" + BASE + ("retries: 0\n" if "retries" in override else "")
    if override.startswith("retries"):
        message = "--set retries.x=1: `retries` is 0 and has no keys beneath it"
    if override.startswith("name"):
        message = '--set name.x=1: `name` is "a" and has no keys beneath it'
    with pytest.raises(SpecError) as caught:
        parse_job(base, overrides=[override])
    assert message in caught.value.message


def test_an_override_mends_the_file() -> None:
    assert parse_job("run: x\ntimeout: forever\n", overrides=["timeout=1h"]).timeout == 3600.0


def test_flags_of_a_whole_command() -> None:
    job = job_from_flags(
        {
            "name": "digits",
            "cpu": "1",
            "memory": "500Mi",
            "gpu": "0",
            "env": ["A=1", "B=x=y", "C="],
            "secret": ["TOKEN", "OTHER=@/path/file"],
            "tag": ["x", "1.10"],
            "retries": "2",
            "workers": "2..8",
            "checkpoint_keep": 5,
            "checkpoint_best_metric": "acc",
            "checkpoint_best_mode": "max",
            "idle_for": "10m",
            "setup": "pip install -r r.txt",
            "setup_input": ["r.txt"],
            "input": ["d=data://digits@3"],
            "roles": "{ps: {count: 2}}",
            "exclusive": True,
            "timeout": "1h",
            "priority": "high",
            "project": None,
        },
        ["python", "train.py"],
    )
    assert (
        job.to_json()
        == Job.from_json(
            {
                "name": "digits",
                "run": ["python", "train.py"],
                "resources": {"cpu": 1, "memory": "500Mi"},
                "env": {"A": "1", "B": "x=y", "C": ""},
                "secrets": ["TOKEN", "OTHER"],
                "tags": ["x", "1.10"],
                "retries": 2,
                "workers": "2..8",
                "checkpoint": {"keep": 5, "best": {"metric": "acc", "mode": "max"}},
                "idle": {"for": "10m"},
                "setup": {"run": "pip install -r r.txt", "inputs": ["r.txt"]},
                "inputs": {"d": "data://digits@3"},
                "roles": {"ps": {"count": 2}},
                "exclusive": True,
                "timeout": 3600,
                "priority": "high",
            }
        ).to_json()
    )


def test_flags_over_a_job_add_and_replace() -> None:
    base = parse_job("run: x\ntags: [a]\nenv: {A: 1}\nresources: {cpu: 1, memory: 1Gi}\n")
    job = job_from_flags({"tag": ["b"], "env": ["B=2"], "cpu": "4"}, [], base)
    assert (job.run, job.tags, job.env) == ("x", ("a", "b"), {"A": "1", "B": "2"})
    assert (job.resources.cpu, job.resources.memory) == (4.0, 1 << 30)


def test_wrong_flags_are_all_named() -> None:
    with pytest.raises(SpecError) as caught:
        job_from_flags(
            {"memory": "8Gib", "env": ["A", "1X=2"], "workers": "2-8", "tag": ["a b"], "cpu": ""}, []
        )
    lines = [line for line in caught.value.message.splitlines() if not line.startswith("    ")]
    assert lines == [
        "7 mistakes in the job",
        '  --env: "A" has no `=`',
        "  the command: is missing",
        '  --env: "1X" is not a variable\'s name: letters, digits and underscores',
        '  --cpu: "" is not a number of cores',
        '  --memory: "8Gib" is not a size',
        '  --workers: "2-8" is not a number of workers',
        '  --tag: "a b" is not a tag: letters, digits and any of ._:/=+- , at most 63',
    ]
    with pytest.raises(SpecError) as caught:
        job_from_flags({"secret": ["TOKEN=hidden"]}, ["x"])
    assert "hidden" not in str(caught.value.to_json())


def test_flags_are_distinct() -> None:
    names = [name for flag in FLAGS for name in (flag.flag, *flag.aliases)]
    assert len(names) == len(set(names))
    assert len({flag.param for flag in FLAGS}) == len(FLAGS)
    assert all(flag.help and flag.kind in ("value", "switch", "list", "map", "yaml") for flag in FLAGS)


def test_flags_and_words_do_not_import_pydantic_or_yaml() -> None:
    code = (
        "import sys, stoker.spec, stoker.spec.states\n"
        "from stoker.spec.flags import FLAGS\n"
        "from stoker.spec.names import derive_name\n"
        "print([m for m in ('pydantic', 'yaml', 'pathspec') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
