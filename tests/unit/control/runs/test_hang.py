"""A run hangs when all members of its world are silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stoker.control.ingest.journal_reader import Intake
from stoker.control.runs import hang
from stoker.spec import Job
from stoker.spec.states import Cause

SILENT = {"seconds": 60.0, "stacks": "stacks/1-1.txt", "how": "py-spy"}


def run(then: str = "report", **roles: str) -> Any:
    """`run(worker_0="world", ps_0="task")`"""
    tasks = {
        name.replace("_", "-"): SimpleNamespace(
            name=name.replace("_", "-"),
            part=SimpleNamespace(on_loss=on_loss),
            verdict=None,
            joining=False,
            hung={},
        )
        for name, on_loss in roles.items()
    }
    job = Job.from_json({"run": "x", "hang": {"after": "60s", "then": then}})
    return SimpleNamespace(id="digits-7f3k", tasks=tasks, job=job, hung=None, reforming=None)


def said(live: Any, **what: dict[str, Any]) -> list[str]:
    found = {name.replace("_", "-"): Intake(hung=hung) for name, hung in what.items()}
    return [change.row.text for change in hang.note(live, found)]  # type: ignore[union-attr]


def test_one_silent_member_is_no_hang() -> None:
    live = run("restart", worker_0="world", worker_1="world")
    assert said(live, worker_1=SILENT) == []
    assert live.reforming is None


def test_a_hang_of_all_is_reported_once() -> None:
    live = run(worker_0="world", worker_1="world", ps_0="task")
    assert said(live, worker_1=SILENT) == []
    assert said(live, worker_0={**SILENT, "how": "none"}) == [
        "worker-0 said and did nothing for 60 s",
        "worker-1 said and did nothing for 60 s; its stacks are in its log (by py-spy)",
    ]
    assert said(live) == []
    assert live.reforming is None


def test_a_member_that_continues_starts_its_time_again() -> None:
    live = run("restart", worker_0="world", worker_1="world")
    said(live, worker_1=SILENT)
    said(live, worker_1={})
    assert said(live, worker_0=SILENT) == []
    assert live.reforming is None


def test_the_world_starts_again_where_the_job_asks_for_it() -> None:
    live = run("restart", launcher_0="world", worker_0="world")
    said(live, launcher_0=SILENT, worker_0=SILENT)
    assert live.reforming.cause is Cause.HANG
    assert live.reforming.reason == "launcher-0 said and did nothing for 60 s"


def test_ended_members_do_not_count() -> None:
    live = run(worker_0="world", worker_1="world")
    live.tasks["worker-0"].verdict = object()
    assert len(said(live, worker_1=SILENT)) == 1


def test_a_run_of_tasks_that_are_replaced_alone_hangs_when_all_do() -> None:
    live = run(worker_0="task")
    assert len(said(live, worker_0=SILENT)) == 1
