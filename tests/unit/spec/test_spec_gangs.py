"""Common mistakes with workers, roles and frameworks, and the exact messages."""

from __future__ import annotations

import pytest

from stoker.errors import SpecError
from stoker.spec import job_from_flags, parse_job

FRAMEWORKS = "torch, tensorflow, jax, mpi, horovod, dask, none"

MISTAKES: list[tuple[str, str, str | None]] = [
    ("workers: 0", "workers: 0 leaves nothing to run", "Write how many, or leave it out for one."),
    (
        "workers: 4 gpus",
        'workers: "4 gpus" is not a number of workers',
        "Write `4`, or `2..8` for an elastic number.",
    ),
    ("workers: {min: 2, max: 4}", "workers: a mapping is not a number of workers", "Did you mean `2..4`?"),
    ("workers: 2-8", 'workers: "2-8" is not a number of workers', "Did you mean `2..8`?"),
    ("workers: 8..2", 'workers: "8..2" runs backwards', "Did you mean `2..8`?"),
    ("worker: 2", "worker: no such key", "Did you mean `workers`?"),
    (
        "framework: pytorch",
        'framework: "pytorch" is not one of the choices',
        f"Did you mean `torch`? Choices: {FRAMEWORKS}.",
    ),
    (
        "framework: ddp",
        'framework: "ddp" is not one of the choices',
        f"Did you mean `torch`? Choices: {FRAMEWORKS}.",
    ),
    (
        "on_loss: restart",
        'on_loss: "restart" is not one of the choices',
        "Did you mean `world`? Choices: world, task, ignore.",
    ),
    ("nproc_per_node: 4", "nproc_per_node: no such key", "Did you mean `processes`?"),
    ("processes: 1..4", 'processes: "1..4" is not a whole number', "Only `workers` can be a range."),
    ("hang: 30m", 'hang: "30m" is not a mapping of keys', "Did you mean `hang: {after: 30m}`?"),
    ("roles: {ps: 2}", "roles.ps: 2 is not a mapping of keys", "Write it as in `ps: {count: 2}`."),
    (
        "roles: [ps]",
        "roles: a list is not a mapping of keys",
        "Write it as in `roles: {ps: {count: 2, run: python ps.py, on_loss: task}}`.",
    ),
    (
        "roles: {workers: {count: 2}}",
        'roles.workers: "workers" is the role of the job itself',
        "Set `workers`, `run` and `resources` of the job instead.",
    ),
    ("roles: {ps: {replicas: 2}}", "roles.ps.replicas: no such key", "Did you mean `count`?"),
    ("roles: {ps: {command: python ps.py}}", "roles.ps.command: no such key", "Did you mean `run`?"),
    ("roles: {ps: {cpu: 1}}", "roles.ps.cpu: no such key", "`cpu` belongs under `resources`."),
    (
        "roles: {ps: {count: 1..3}}",
        'roles.ps.count: "1..3" is not a whole number',
        "Only `workers` can be a range.",
    ),
]


@pytest.mark.parametrize(("line", "message", "hint"), MISTAKES)
def test_mistakes(line: str, message: str, hint: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(f"run: python train.py\n{line}\n")
    assert (caught.value.message, caught.value.hint) == (f"stoker.yaml:2: {message}", hint)


def test_a_role_without_a_command() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job("workers: 0\nroles:\n  chief: {run: python chief.py}\n  ps: {count: 2}\n")
    assert caught.value.message == "stoker.yaml:4: roles.ps: has no command"
    assert caught.value.hint == "Give it a `run`, or the job one for all of them."


def test_a_job_of_roles_alone() -> None:
    job = parse_job("workers: 0\nroles:\n  chief: {run: python chief.py}\n  ps: {run: python ps.py}\n")
    assert (job.run, job.name) == (None, "chief")


def test_the_flag_is_named() -> None:
    with pytest.raises(SpecError) as caught:
        job_from_flags({"workers": "0"}, ["python", "train.py"], None)
    assert caught.value.message == "--workers: 0 leaves nothing to run"
