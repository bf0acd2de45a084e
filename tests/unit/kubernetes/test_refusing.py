"""What a cluster will not run is said by name, with what to do; what it can, passes."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.refusing import refuse
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
    ({"run": "x", "image": "i", "inputs": {"d": "s3://bucket/x"}}, "cannot be brought", "pvc://", "inputs.d"),
    (
        {"run": "x", "image": "i", "inputs": {"d": "pvc://Not_A_Claim"}},
        "names no volume claim",
        "pvc://",
        "inputs.d",
    ),
    ({"image": "i", "launcher": "none", "setup": "make"}, "needs the launcher", "`setup`", "setup"),
    ({"image": "i", "launcher": "none", "python": "/x"}, "needs the launcher", "`python`", "python"),
    (
        {"run": "x", "image": "i", "workers": "2..4"},
        "not yet available on the kubernetes engine",
        "workers: 4",
        "workers",
    ),
    ({"image": "i", "workers": 2, "launcher": "none"}, "not yet available", "`launcher`", "launcher"),
    ({"run": "x", "image": "i", "idle": {}}, "not yet available", "`idle`", "idle"),
]
CONFIG = ClusterConfig.from_json({"pools": {"a100": {"selector": {"gpu": "a100"}}}})


@pytest.mark.parametrize("job", GOOD)
def test_what_can_be_run_passes(job: dict[str, Any]) -> None:
    refuse(Job.from_json(job), CONFIG, "prod")


@pytest.mark.parametrize(("job", "message", "hint", "key"), BAD)
def test_what_cannot_is_refused_by_name(job: dict[str, Any], message: str, hint: str, key: str) -> None:
    with pytest.raises(Refused) as caught:
        refuse(Job.from_json(job), CONFIG, "prod")
    assert message in caught.value.message and hint in (caught.value.hint or "")
    assert caught.value.details["key"] == key


def test_a_cluster_with_an_image_of_its_own_takes_jobs_without() -> None:
    refuse(Job.from_json({"run": "x"}), ClusterConfig(default_image="python:3.12"), "prod")
