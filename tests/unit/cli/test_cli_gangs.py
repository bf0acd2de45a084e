"""Runs with several tasks, as the command line shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

NOW = 1_700_000_000.0
GPUS = ["GPU-0a1b2c3d-0000", "GPU-9f8e7d6c-0000"]


def task(name: str, **over: Any) -> dict[str, Any]:
    base = {
        "name": name,
        "role": name.rpartition("-")[0],
        "node": "local",
        "gpus": [],
        "incarnation": 1,
        "generation": 3,
        "phase": "running",
        "exit_code": None,
        "usage": {"cpu": 0.97, "memory": 212 << 20, "step": 1200, "step_seconds": 0.0341},
    }
    return {**base, **over}


@pytest.fixture
def gang(fake: Any, clock: float, make_run: Any) -> Any:
    tasks = [
        task("worker-0"),
        task("worker-1", incarnation=2, usage={"cpu": 1.75, "memory": 230 << 20, "step": 1200}),
        task("ps-0", generation=1, phase="ended", exit_code=1, usage={}),
    ]
    attempt = {
        "number": 1,
        "state": "running",
        "cause": None,
        "evidence": {},
        "exit_code": None,
        "started_at": NOW - 192,
        "ended_at": None,
        "resumed_from": None,
        "generation": 3,
        "node": "local",
        "gpus": [],
        "placed": 3,
        "up": 2,
        "tasks": tasks,
        "world": {"size": 3, "generation": 3, "text": "world of 3, generation 3; worker-1 was replaced once"},
        "straggler": {
            "task": "worker-1",
            "text": "worker-1 is 1.8x slower than the others' median (from steps)",
        },
    }
    run = make_run(
        "digits-7f3k",
        attempts=[attempt],
        job={
            "workers": 2,
            "resources": {"cpu": 1.0, "memory": 500 << 20},
            "roles": {"ps": {"count": 1, "resources": {"cpu": 0.5}}},
        },
        scaling={"pace": "0.0341 s per step", "text": "85% of ideal for 2 workers"},
    )
    fake.runs = [run, make_run("alone-1111", "succeeded")]
    fake.events["digits-7f3k"] = [
        {"t": NOW - 10, "kind": "hang", "text": "no output for 30m", "data": {"stacks": "stacks/3"}}
    ]
    return fake


SHOWN = """\
digits-7f3k  running  3m12s
  command    python train.py
  submitted  22:10:00 (3m ago) by ada
  started    22:10:08 (3m ago)
  code       tree 1f3a1f3a1f3a, git 12ab34cd56ef with changes that are not committed
  hang       no output for 30m (10s ago)
  stacks     stacks/3

Tasks
  TASK      NODE   GEN  PHASE    EXIT  STEP  S/STEP   CPU   MEMORY  REPLACED  ASKED
  worker-0  local    3  running     -  1200  0.0341  0.97  212 MiB         -  1 cpu 500 MiB
  worker-1  local    3  running     -  1200       -  1.75  230 MiB        1x  1 cpu 500 MiB
  ps-0      local    1  ended       1     -       -     -        -         -  0.5 cpu

  world      of 3, generation 3; worker-1 was replaced once
  straggler  worker-1 is 1.8x slower than the others' median (from steps)
  pace       0.0341 s per step
  scaling    85% of ideal for 2 workers

Attempts
  #  STATE    STARTED    TIME  FROM       NODE   HOW IT ENDED
  1  running  22:10:08  3m12s  the start  local

Events
  22:13:10  hang  no output for 30m

  stoker logs -f digits-7f3k
  stoker stop digits-7f3k
"""


def test_show(gang: Any, invoke: Any) -> None:
    assert invoke("show", "digits-7f3k").out == SHOWN


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_show_fits_and_keeps_what_matters(gang: Any, invoke: Any, columns: int) -> None:
    shown = invoke("show", "digits-7f3k", "--color", "never", tty=columns).out
    assert all(len(line) <= columns for line in shown.splitlines()), shown
    table = shown.split("Tasks\n")[1].split("\n\n")[0]
    assert all(word in table for word in ("TASK", "PHASE", "STEP", "worker-1", "running")), table
    assert ("ASKED" in table) == (columns == 120)


def test_empty_columns_are_left_out_and_gpus_are_named(gang: Any, invoke: Any) -> None:
    for number, one in enumerate(gang.runs[0]["attempts"][0]["tasks"][:2]):
        one |= {"gpus": [GPUS[number]], "usage": {"gpu": 98.4, "gpu_peak": 100.0}, "incarnation": 1}
    gang.runs[0]["attempts"][0]["tasks"].pop()
    gang.runs[0]["job"] = {"workers": 2}
    assert "  TASK      NODE                GEN  PHASE    GPU\n" in invoke("show", "digits-7f3k").out
    assert "  worker-1  local gpu 9f8e7d6c    3  running  98%\n" in invoke("show", "digits-7f3k").out


def test_what_a_task_named_is_harmless(gang: Any, invoke: Any) -> None:
    gang.runs[0]["attempts"][0]["tasks"][0] |= {"node": "no\x1b]0;owned\x07de", "phase": "\x1b[2J"}
    assert "\x1b" not in invoke("show", "digits-7f3k").out


def test_after_its_end_the_peaks_are_shown(gang: Any, invoke: Any) -> None:
    attempt = gang.runs[0]["attempts"][0]
    attempt |= {"state": "ended", "cause": "completed", "ended_at": NOW - 1}
    for one in attempt["tasks"]:
        one |= {"phase": "ended", "exit_code": 0, "usage": {"cpu_peak": 1.5, "memory_peak": 1 << 30}}
    shown = invoke("show", "digits-7f3k").out
    assert "  TASK      NODE   GEN  PHASE  EXIT  CPU PEAK  MEMORY PEAK  REPLACED  ASKED\n" in shown
    assert "  ps-0      local    1  ended     0       1.5        1 GiB         -  0.5 cpu\n" in shown


def test_ps_counts_tasks_where_there_are_several(gang: Any, invoke: Any) -> None:
    assert invoke("ps").out == (
        "ID           STATE      AGE   TIME  TASKS  ASKED          INFO\n"
        "digits-7f3k  running     3m  3m12s    2/3  1 cpu 500 MiB  on local\n"
        "alone-1111   succeeded   3m  2m12s      -  -\n"
    )
    gang.runs.pop(0)
    assert "TASKS" not in invoke("ps").out


def test_top_names_tasks(gang: Any, invoke: Any) -> None:
    here = [{"id": "digits-7f3k", "task": f"worker-{n}", "cpu": 1.0, "user": "ada"} for n in (10, 2)]
    gang.nodes = [
        {
            "name": "local",
            "ready": True,
            "cpu": 4.0,
            "memory": 1 << 30,
            "runs": [{"id": "alone-1111", "task": "worker-0", "cpu": 1.0}, *here],
        }
    ]
    names = [line[:23].rstrip() for line in invoke("top").out.splitlines()[2:]]
    assert names == ["  alone-1111", "  digits-7f3k worker-2", "  digits-7f3k worker-10"]


def test_a_dry_run_lists_the_tasks(fake: Any, invoke: Any, monkeypatch: Any) -> None:
    worker = {"cpu": 0.8, "memory": 0, "gpu": 1, "processes": 1, "command": ["python", "train.py"]}
    served = {**worker, "cpu": 0.2, "gpu": 0, "command": ["/bin/sh", "-c", "python ps.py | tee log"]}
    fake.plan = {
        "tasks": [
            {**worker, "name": "worker-0", "on_loss": "world"},
            {**worker, "name": "worker-1", "on_loss": "world", "optional": True},
            {**served, "name": "ps-0", "on_loss": "task"},
        ]
    }
    result = invoke("run", "--no-code", "--dry-run", "--name", "digits", "--workers", "1..2", "--", "true")
    assert result.out == (
        "digits would start 3 tasks\n"
        "TASK      HOLDS          WHEN LOST                           COMMAND\n"
        "worker-0  0.8 cpu 1 gpu  all start again                     python train.py\n"
        "worker-1  0.8 cpu 1 gpu  all start again (if there is room)  python train.py\n"
        "ps-0      0.2 cpu        comes back alone                    python ps.py | tee log\n"
    )
    whole = invoke("run", "--no-code", "--dry-run", "--json", "--workers", "1..2", "--", "true")
    assert json.loads(whole.out)["plan"]["tasks"] == fake.plan["tasks"]
