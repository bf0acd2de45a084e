"""Runs with several tasks in the API."""

from __future__ import annotations

from typing import Any

from stoker.control.diagnosis.readiness import Absent, Readiness
from stoker.store.placement import decode
from stoker.store.rows import (
    AddAttempt,
    AddMetrics,
    AttemptRow,
    Point,
    PutTask,
    TaskRow,
    UpdateAttempt,
    UpdateRun,
)

PLACES = {f"worker-{n}": {"node": f"node-{n}", "gpus": []} for n in (0, 1, 2, 10)}


def begin(rig: Any, run: str, placement: dict[str, Any] = PLACES, generation: int = 1) -> None:
    attempt = AttemptRow(run, 1, generation=generation, state="running", placement=decode(placement))
    rig.store.apply([AddAttempt(attempt), UpdateRun(run, {"state": "running", "attempt": 1})])


def running(run: str, task: str, **usage: float) -> PutTask:
    return PutTask(TaskRow(run, 1, task, phase="running", usage=dict(usage)))


def reported(run: str, key: str, seconds: float, value: float, attempt: int = 1) -> AddMetrics:
    return AddMetrics(run, attempt, [Point(key, n, value, 100.0 + n * seconds) for n in range(20)])


def test_the_tasks_of_an_attempt(rig: Any) -> None:
    run = rig.submit("digits", workers=4)["id"]
    again = {**PLACES, "worker-2": {**PLACES["worker-2"], "generation": 3, "incarnation": 3}}
    begin(rig, run, again, generation=3)
    newest = PutTask(TaskRow(run, 1, "worker-2", incarnation=3, phase="running", usage={"step": 40}))
    rig.store.apply([newest, running(run, "worker-99")])
    rig.controller.found = {run: Readiness(4, (Absent("worker-10", "pulling image"),))}
    attempt = rig.client.run(run)["attempts"][0]
    names = [task["name"] for task in attempt["tasks"]]
    assert names == [
        "worker-0",
        "worker-1",
        "worker-2",
        "worker-10",
    ]  # by rank; a task that has left is not listed
    assert attempt["tasks"][2] == {
        "name": "worker-2",
        "role": "worker",
        "node": "node-2",
        "gpus": [],
        "incarnation": 3,
        "generation": 3,
        "phase": "running",
        "exit_code": None,
        "usage": {"step": 40},
    }
    assert attempt["tasks"][0]["phase"] == "starting"
    text = "world of 4, generation 3; worker-2 was replaced twice"
    assert attempt["world"] == {"size": 4, "generation": 3, "text": text}
    assert (attempt["placed"], attempt["up"]) == (4, 3)
    listed = rig.client.runs()["runs"][0]["attempts"][0]
    assert (listed["placed"], listed["up"]) == (4, 3) and "tasks" not in listed


def test_a_replacement_does_not_show_facts_of_its_predecessor(rig: Any) -> None:
    run = rig.submit("digits", workers=4)["id"]
    begin(rig, run, {**PLACES, "worker-1": {**PLACES["worker-1"], "incarnation": 2}})
    rig.store.apply([running(run, "worker-0"), running(run, "worker-1", step=40)])
    tasks = rig.client.run(run)["attempts"][0]["tasks"]
    assert [(task["phase"], task["usage"]) for task in tasks[:2]] == [("running", {}), ("starting", {})]


def test_no_task_of_an_ended_attempt_runs(rig: Any) -> None:
    """Of an attempt that vanished, the last report of its tasks was that they run."""
    run = rig.submit("digits", workers=4)["id"]
    begin(rig, run, PLACES)
    rig.store.apply([running(run, "worker-0"), UpdateAttempt(run, 1, {"state": "ended", "cause": "lost"})])
    tasks = rig.client.run(run)["attempts"][0]["tasks"]
    assert {task["phase"] for task in tasks} == {"ended"}


def test_joining_and_leaving_tasks(rig: Any) -> None:
    run = rig.submit("digits", workers="2..4")["id"]
    coming = {"worker-2": {**PLACES["worker-2"], "joining": True}}
    going = {"worker-1": {**PLACES["worker-1"], "leaving": True}}
    server = {"ps-0": {**PLACES["worker-0"], "incarnation": 2}}
    begin(rig, run, {"worker-0": PLACES["worker-0"], **server, **coming, **going}, generation=2)
    rig.store.apply([running(run, "worker-0"), running(run, "worker-1")])
    attempt = rig.client.run(run)["attempts"][0]
    assert [(task["name"], task["phase"]) for task in attempt["tasks"]] == [
        ("worker-0", "running"),
        ("worker-1", "leaving"),
        ("worker-2", "joining"),
        ("ps-0", "starting"),
    ]
    text = "world of 3, generation 2; worker-2 will join; worker-1 will leave; ps-0 came back once"
    assert attempt["world"] == {"size": 3, "generation": 2, "text": text}


def test_a_straggler_is_named_from_reports_of_the_tasks(rig: Any) -> None:
    run = rig.submit("digits", workers=4)["id"]
    begin(rig, run)
    rig.store.apply([running(run, task, cpu=0.5) for task in PLACES])
    assert rig.client.run(run)["attempts"][0]["straggler"] is None
    for task, own in zip(PLACES, (0.1, 0.1, 0.25, 0.1), strict=True):
        key = "compute_seconds" if task == "worker-0" else f"compute_seconds@{task}"
        rig.store.apply([reported(run, key, 0.3, own)])
    found = rig.client.run(run)["attempts"][0]["straggler"]
    assert (found["task"], found["times"], found["source"]) == ("worker-2", 2.5, "compute")


def test_scaling_against_the_run_of_one_worker(rig: Any) -> None:
    alone = rig.submit("digits", workers=1)["id"]
    begin(rig, alone, {"worker-0": PLACES["worker-0"]})
    rig.store.apply([reported(alone, "loss", 0.1, 1.0), reported(alone, "samples_per_second", 0.1, 640.0)])
    assert rig.client.run(alone)["scaling"]["pace"] == "0.1 s per step, 640 samples per second"
    assert rig.client.run(alone)["scaling"]["text"] == ""
    run = rig.submit("digits", workers=4)["id"]
    begin(rig, run)
    assert rig.client.run(run)["scaling"] is None
    rig.store.apply([reported(run, "loss", 0.125, 1.0), reported(run, "samples_per_second", 0.125, 2048.0)])
    found = rig.client.run(run)["scaling"]
    assert found["text"].startswith("no run of one worker to compare with")  # the first run has not succeeded
    rig.end(alone)
    found = rig.client.run(run)["scaling"]
    assert (found["against"], found["basis"], found["efficiency"]) == (alone, "samples", 0.8)
    assert found["step_seconds"] == 0.125 and found["workers"] == 4
    assert found["text"] == f"3.20x the samples per second of one worker ({alone}): 80% of ideal for 4"
