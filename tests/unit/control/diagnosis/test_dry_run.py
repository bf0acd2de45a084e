"""The output of `--dry-run` for runs with several tasks."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.control.diagnosis import dry_run
from stoker.frameworks.roles import parts_of
from stoker.scheduling import Ask
from stoker.spec import parse_job


def plan(text: str) -> list[dict[str, Any]]:
    job = parse_job(text)
    parts = parts_of(job)
    asks = {name: Ask(cpu=0.5, memory=1 << 20, gpu=0) for part in parts for name in part.names}
    return dry_run.tasks(job, parts, asks)


def test_every_task_is_listed() -> None:
    found = plan(
        "run: python train.py\nworkers: 1..2\nframework: none\nroles: {ps: {run: [python, ps.py], may_fail: true}}\n"
    )
    assert [task["name"] for task in found] == ["worker-0", "worker-1", "ps-0"]
    assert found[1] == {
        "name": "worker-1",
        "role": "worker",
        "cpu": 0.5,
        "memory": 1 << 20,
        "gpu": 0,
        "processes": 1,
        "command": ["/bin/sh", "-c", "python train.py"],
        "on_loss": "world",
        "ends": True,
        "optional": True,
    }
    assert (found[2]["command"], found[2]["on_loss"], found[2]["ends"]) == (
        ["python", "ps.py"],
        "task",
        False,
    )


@pytest.mark.parametrize(
    ("framework", "task", "command"),
    [
        ("dask", "worker-1", "python -m dask worker tcp://scheduler-0:0 "),
        ("dask", "client-0", "python train.py"),
        ("mpi", "launcher-0", "mpirun python train.py"),
        ("mpi", "worker-0", "remote-shell worker-0 0"),
        ("torch", "worker-1", "python train.py"),
    ],
)
def test_frameworks_have_commands_of_their_own(framework: str, task: str, command: str) -> None:
    found = plan(f"run: [python, train.py]\nworkers: 2\nframework: {framework}\n")
    mine = next(one for one in found if one["name"] == task)
    assert command in " ".join(mine["command"]), mine


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (
            "run: a\n",
            [
                "no cpu asked for: holds one CPU's place, may use more when the machine is idle",
                "no memory asked for: not limited",
            ],
        ),
        (
            "run: a\nworkers: 2..4\nframework: torch\nresources: {memory: 1Gi}\n",
            [
                "no cpu asked for: the tasks share this machine's CPUs",
                "starts with as many workers as there is room for, from 2 to 4",
            ],
        ),
        (
            "run: a\nworkers: 2\nresources: {memory: 1Gi, cpu: 1}\n",
            [
                "no framework named: each task gets its rank and the others' addresses, and sets up the rest itself"
            ],
        ),
    ],
)
def test_surprising_facts_are_noted(text: str, notes: list[str]) -> None:
    job = parse_job(text)
    assert dry_run.notes(job, parts_of(job)) == notes
