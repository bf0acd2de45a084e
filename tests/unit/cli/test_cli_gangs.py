"""Runs with several tasks on the command line."""

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
        {"t": NOW - 10, "kind": "hang", "text": "worker-1 did nothing for 30m", "data": {"task": "worker-1"}}
    ]
    return fake


SHOWN = """\
digits-7f3k  running  3m12s
  command    python train.py
  submitted  22:10:00 (3m ago) by ada
  started    22:10:08 (3m ago)
  code       tree 1f3a1f3a1f3a, git 12ab34cd56ef with changes that are not committed
  hang       worker-1 did nothing for 30m (10s ago)

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
  22:13:10  hang  worker-1 did nothing for 30m

  stoker logs -f digits-7f3k
  stoker stop digits-7f3k
"""


def test_show(gang: Any, invoke: Any) -> None:
    assert invoke("show", "digits-7f3k").out == SHOWN


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_show_fits_the_width_and_keeps_what_matters(gang: Any, invoke: Any, columns: int) -> None:
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


def test_control_characters_from_a_task_are_escaped(gang: Any, invoke: Any) -> None:
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


def test_the_failed_task_is_named(gang: Any, invoke: Any) -> None:
    attempt = gang.runs[0]["attempts"][0]
    evidence = {"task": "worker-1", "last_lines": ["ValueError: no"]}
    attempt |= {"state": "ended", "cause": "user-error", "exit_code": 1, "evidence": evidence}
    attempt |= {"ended_at": NOW - 1, "nodes": ["a", "b"]}
    shown = invoke("show", "digits-7f3k").out
    assert "3m11s  the start  2 nodes  user-error: worker-1: exit code 1\n" in shown
    assert "  last lines of worker-1 in attempt 1:\n    ValueError: no\n" in shown
    attempt |= {"state": "running", "cause": None}
    assert "on 2 nodes\n" in invoke("ps").out


def test_ps_counts_tasks_where_there_are_several(gang: Any, invoke: Any) -> None:
    assert invoke("ps").out == (
        "ID           STATE      AGE   TIME  TASKS  ASKED              INFO\n"
        "digits-7f3k  running     3m  3m12s    2/3  2 x 1 cpu 500 MiB  on local\n"
        "alone-1111   succeeded   3m  2m12s      -  -\n"
    )
    gang.runs.pop(0)
    assert "TASKS" not in invoke("ps").out


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_top_names_tasks(gang: Any, invoke: Any, columns: int) -> None:
    here = [{"id": "digits-7f3k", "task": f"worker-{n}", "cpu": 1.0, "user": "ada"} for n in (10, 2)]
    gang.nodes = [
        {
            "name": "local",
            "ready": True,
            "cpu": 4.0,
            "memory": 1 << 30,
            "used": {"cpu": 3.0},
            "runs": [{"id": "alone-1111", "task": "worker-0", "cpu": 1.0}, *here],
        }
    ]
    names = [line[:23].rstrip() for line in invoke("top").out.splitlines()[2:]]
    narrow = invoke("top", "--color", "never", tty=columns).out.splitlines()
    assert all(len(line) <= columns for line in narrow) and ("###" in narrow[1]) == (columns == 120)
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


# -- drill, shell, scale ---------------------------------------------------------------------------------------


def reform(run: dict[str, Any], *, names: tuple[str, ...], step: int | None = 400) -> None:
    """Put these tasks into a new generation, as the server shows it."""
    attempt = run["attempts"][0]
    attempt["generation"] += 1
    attempt["resumed_from"] = "ck-4" if step is not None else None
    run["checkpoints"] = [{"id": "ck-4", "name": "last.pt", "step": step, "created_at": NOW - 30}]
    for one in attempt["tasks"]:
        if one["name"] in names:
            one |= {"generation": attempt["generation"], "phase": "running"}


@pytest.fixture
def world(gang: Any) -> Any:
    gang.runs[0]["attempts"][0]["tasks"] = [task("worker-0"), task("worker-1"), task("ps-0", generation=1)]
    gang.metrics = {"loss": {"key": "loss", "last_step": 412}}
    return gang


def test_a_drilled_world_comes_back_as_a_generation(world: Any, invoke: Any) -> None:
    world.on_drill = lambda run: reform(run, names=("worker-0", "worker-1"))
    report = json.loads(invoke("drill", "digits-7f3k", "--task", "worker-1", "--json").out)
    assert ("POST", "/runs/digits-7f3k/drill", {}, {"how": "process", "task": "worker-1"}) in world.requests
    assert (report["resumed"], report["kept_going"], report["alone"]) == (True, False, False)
    assert (report["attempt"], report["generation"], report["lost_steps"]) == (1, 4, 12)
    assert report["verdict"].endswith(" as generation 4 from step 400; lost 12 steps, 30s of work")


def test_a_task_that_ended_before_is_not_awaited(world: Any, invoke: Any) -> None:
    world.runs[0]["attempts"][0]["tasks"][2] |= {"phase": "ended", "exit_code": 137}
    world.on_drill = lambda run: reform(run, names=("worker-0", "worker-1"))
    result = invoke("drill", "digits-7f3k", "--timeout", "5")
    assert result.code == 0 and " as generation 4 from step 400" in result.out, result


def test_a_world_is_not_back_before_all_of_it_runs(world: Any, invoke: Any) -> None:
    def slowly(run: dict[str, Any]) -> None:
        reform(run, names=("worker-0", "worker-1"))
        run["attempts"][0]["tasks"][1]["phase"] = "starting"

    world.on_drill = slowly
    result = invoke("drill", "digits-7f3k", "--timeout", "0.5")
    assert (result.code, result.out.startswith("verdict: not resumed: running after ")) == (1, True)


def test_a_task_that_comes_back_alone(world: Any, invoke: Any) -> None:
    world.on_drill = lambda run: reform(run, names=("ps-0",), step=None)
    result = invoke("drill", "digits-7f3k", "--task", "ps-0", "--how", "launcher")
    assert result.out.startswith("verdict: ps-0 came back alone in ")
    assert result.out.endswith("; the others never stopped\n") and "hint" not in result.err


def test_a_task_whose_loss_is_ignored(world: Any, invoke: Any) -> None:
    world.runs[0]["job"]["roles"]["ps"]["on_loss"] = "ignore"
    world.on_drill = lambda run: run["attempts"][0]["tasks"][2].update(phase="ended", exit_code=137)
    result = invoke("drill", "digits-7f3k", "--task", "ps-0")
    assert (
        result.out
        == "verdict: fine: ps-0 has ended and the others go on, as the job says (on_loss: ignore)\n"
    )


def test_a_drill_of_one_task_refuses_ways_that_hit_all(world: Any, invoke: Any) -> None:
    result = invoke("drill", "digits-7f3k", "--task", "ps-0", "--how", "server")
    assert result.err == (
        "error: --task goes with --how process or launcher, not server\n\n"
        "hint: Leave --task out: this concerns the whole run.\n"
    )


@pytest.mark.parametrize(
    ("words", "task", "rest"),
    [
        (["digits-7f3k"], {}, []),
        (["digits-7f3k", "--task", "worker-1"], {"task": "worker-1"}, []),
        (["digits-7f3k", "--task=worker-1", "nvidia-smi", "-L"], {"task": "worker-1"}, ["nvidia-smi", "-L"]),
        (["--task", "worker-1", "digits-7f3k", "ls", "--task"], {"task": "worker-1"}, ["ls", "--task"]),
    ],
)
def test_shell_into_one_of_several(
    world: Any, invoke: Any, words: list[str], task: dict[str, str], rest: list[str]
) -> None:
    json_first = ["shell", "--json", *words]
    assert json.loads(invoke(*json_first).out)["argv"] == ["enter", *rest]
    assert world.requests[-1][3] == task


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"from": 2, "to": 4}, "grows from 2 to 4: 2 more tasks asked for; they join at a checkpoint, as soon as there is room"),
        ({"from": 2, "to": 3}, "grows from 2 to 3: 1 more task asked for; they join at a checkpoint, as soon as there is room"),
        ({"from": 4, "to": 2}, "shrinks from 4 to 2: goes on with 2, from its newest checkpoint"),
        ({"from": 3, "to": 3}, "has 3 workers already: nothing changes"),
        ({"from": 0, "to": 3}, "starts with up to 3 workers, as many as there is room for"),
    ],
)  # fmt: skip
def test_scale_says_what_happens(world: Any, invoke: Any, answer: dict[str, int], said: str) -> None:
    world.scaled = {**answer, "text": "wants"}
    result = invoke("scale", "digits-7f3k", "3")
    assert (result.code, result.out, result.err) == (0, "", f"{said}\n")
    assert world.requests[-1][3] == {"workers": 3}
    assert json.loads(invoke("scale", "digits-7f3k", "3", "--json").out) == world.scaled


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("2..4", "'2..4' is a range, and scale takes one number"),
        ("+2", "'+2' is not a number of workers"),
        ("many", "'many' is not a number of workers"),
        ("0", "0 workers would train nothing"),
        ("1.5", "'1.5' is not a number of workers"),
        ("1234567", "'1234567' is not a number of workers"),
    ],
)
def test_mistakes_with_scale(world: Any, invoke: Any, word: str, said: str) -> None:
    result = invoke("scale", "digits-7f3k", word)
    assert result.code == 2 and result.err.startswith(f"error: {said}\n\nhint: "), result


def test_the_tasks_of_the_run_are_offered(world: Any, invoke: Any) -> None:
    for command in ("drill", "shell", "logs"):
        assert invoke("_complete", command, "digits-7f3k", "--task", "w").out == "worker-0\nworker-1\n", (
            command
        )
    assert invoke("_complete", "drill", "--how", "launcher", "digits-7f3k", "--task", "p").out == "ps-0\n"
    assert invoke("_complete", "drill", "--task", "ps").out == "ps-0\n"
    assert invoke("_complete", "drill", "nothing-1111", "--task", "").out == ""


# -- coming up ---------------------------------------------------------------------------------------------------


def test_missing_tasks_are_named_while_a_gang_comes_up(gang: Any, invoke: Any) -> None:
    from stoker.cli.watch_run import status_text

    run = {**gang.runs[0], "state": "starting", "reason": "3 of 4 tasks up; worker-3: pulling image"}
    assert status_text(run) == "digits-7f3k starting: 3 of 4 tasks up; worker-3: pulling image"


def test_a_new_world_is_reported(gang: Any) -> None:
    from stoker.cli.watch_run import status_text

    assert status_text(gang.runs[0]) == "digits-7f3k running: generation 3 comes up, 2 of 3 tasks up"
