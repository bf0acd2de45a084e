"""Runs of several workers on the real local engine: killed, frozen, stopped, resumed, scaled."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from bodies import hurry

from support.box import Box
from support.gangs import STEPS, begin, check, checkpointed, generation, lines, sizes, starts, trains
from support.processes import alive
from support.seeds import seeds
from support.waiting import wait
from support.worlds import expected


@pytest.mark.shared_server
def test_several_workers_train_as_one(box: Box) -> None:
    run = begin(box, "--workers", "3", pause=0.0)
    check(box, run, 3)


@pytest.mark.parametrize(("how", "retries"), [("process", "1"), ("launcher", "0")])
def test_a_killed_member_comes_back_and_no_step_is_lost(box: Box, how: str, retries: str) -> None:
    run = begin(box, "--workers", "2", "--retries", retries)
    checkpointed(box, run)
    box.client().drill(run, how, "worker-1")
    seen = check(box, run, 2)
    assert len(seen["attempts"]) == 1 and seen["attempts"][0]["generation"] == 2


def test_a_launcher_that_is_told_to_end_is_replaced_and_given_no_more_work(box: Box) -> None:
    run = begin(box, "--workers", "2")
    checkpointed(box, run)
    known = box.record(run, 1, "worker-1")
    os.kill(known["pid"], signal.SIGTERM)
    seen = check(box, run, 2)
    assert [(attempt["generation"], len(attempt["tasks"])) for attempt in seen["attempts"]] == [(2, 2)]
    assert [task["incarnation"] for task in seen["attempts"][0]["tasks"]] == [1, 2]


def test_a_frozen_member_that_wakes_up_late_changes_nothing(box: Box) -> None:
    run = begin(box, "--workers", "2", "--retries", "2", "--grace", "2s")
    checkpointed(box, run)
    frozen = next(body for body in starts(box, run) if body["rank"] == 1)
    pid = _outer_pid(frozen["pid"], run, "worker-1")
    os.kill(pid, signal.SIGSTOP)
    box.client().drill(run, "process", "worker-0")
    wait(lambda: generation(box, run), lambda number: number == 2)
    if alive(pid):
        os.kill(pid, signal.SIGCONT)
    check(box, run, 2)


def test_a_restarted_server_adopts_the_world(box: Box) -> None:
    run = begin(box, "--workers", "2")
    checkpointed(box, run)
    box.kill_server()
    check(box, run, 2)
    assert generation(box, run) == 1


@pytest.mark.shared_server
def test_a_stopped_world_goes_on_where_it_was(box: Box) -> None:
    run = begin(box, "--workers", "2")
    checkpointed(box, run)
    box("stop", run)
    box.until(run, "stopped")
    box("resume", run)
    seen = check(box, run, 2)
    assert seen["attempts"][-1]["resumed_from"]


@pytest.mark.shared_server
def test_a_world_may_come_back_smaller(box: Box) -> None:
    run = begin(box, "--workers", "3")
    checkpointed(box, run)
    box("stop", run)
    box.until(run, "stopped")
    box("resume", run, "--set", "workers=2")
    seen = box.ended(run)
    assert seen["state"] == "succeeded"
    assert sum(f"state={expected(STEPS)}" in line for line in lines(box, run)) == 2


@pytest.mark.shared_server
def test_an_elastic_world_shrinks_and_grows_as_it_is_told(box: Box) -> None:
    run = begin(box, "--workers", "1..2", "--cpu", "0.5", steps=2000, pause=0.5)
    trains(box, run, 1, 2)
    first = _launchers(box, run)
    box("scale", run, "1")
    trains(box, run, 2, 1)
    wait(lambda: _launchers(box, run), lambda seen: seen == {"worker-0": first["worker-0"]})
    box("scale", run, "2")
    trains(box, run, 3, 2)
    assert first.items() & _launchers(box, run).items() == {("worker-0", first["worker-0"])}
    hurry(run)
    seen = check(box, run, 2, steps=2000)
    assert sizes(box, run) == {1: 2, 2: 1, 3: 2}
    assert (len(seen["attempts"]), seen["attempts"][0]["generation"]) == (1, 3)


@pytest.mark.parametrize("seed", seeds(1, 2, 3, most=20))
def test_chaos(box: Box, seed: int) -> None:
    """Any member is lost at any time in any way; the final value is that of an undisturbed training."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    run = begin(box, "--workers", "3", "--retries", "20", "--grace", "2s", steps=80)
    box.until(run, "running")
    for _ in range(3):
        time.sleep(chance.uniform(0.0, 2.0))
        how = chance.choice(["process", "launcher", "server"])
        try:
            if how == "server":
                box.kill_server()
            else:
                box.client().drill(run, how, f"worker-{chance.randrange(3)}")
        except Exception as exc:  # the task may be starting or ending; this is part of the test
            print(how, exc)
    check(box, run, 3, steps=80)


def _outer_pid(inner: int, run: str, task: str) -> int:
    """The process id on this machine; inside its namespace the process has another one."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace")
            words = (entry / "cmdline").read_bytes()
            numbers = re.search(r"^NSpid:\s+(.*)$", (entry / "status").read_text(), re.MULTILINE)
        except OSError:
            continue
        named = f"STOKER_RUN={run}\0" in environment and f"STOKER_TASK_INDEX={task[-1]}\0" in environment
        if named and b"worlds.py" in words and numbers and int(numbers[1].split()[-1]) == inner:
            return int(entry.name)
    raise AssertionError(f"no process {inner} of {task}")


def _launchers(box: Box, run: str) -> dict[str, int]:
    """The running launchers by task."""
    records = [*(box.home.engine / "tasks").glob(f"{run}.1.worker-*.json")]
    known = {record.name.split(".")[2]: int(json.loads(record.read_text())["pid"]) for record in records}
    return {task: pid for task, pid in known.items() if alive(pid)}
