"""What the end of one task means for the other tasks."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.control.policy.failure_policy import Decision, TaskState, decide
from stoker.control.policy.outcome import Outcome
from stoker.spec.states import Cause

DONE = Outcome(Cause.COMPLETED, 0, "completed", {})
BAD = Outcome(Cause.USER_ERROR, 1, "exit code 1", {"kind": "exit"})
LOST = Outcome(Cause.LOST, None, "its launcher is gone", {"kind": "lost"})
KILLED = Outcome(Cause.USER_ERROR, 137, "killed by SIGKILL", {"signal": "SIGKILL"})
STOPPED = Outcome(Cause.PREEMPTED, 143, "preempted", {})


def seat(task: str, verdict: Outcome | None = None, **more: Any) -> TaskState:
    values: dict[str, Any] = {"on_loss": "world", "ends": True, "may_fail": False} | more
    return TaskState(task, verdict=verdict, **values)


def ask(*seats: TaskState, closing: Outcome | None = None, reforming: Outcome | None = None) -> Decision:
    return decide(seats, closing=closing, reforming=reforming)


PS = seat("ps-0", on_loss="task", ends=False)


DECISIONS = {
    "all run": ([seat("worker-0"), seat("worker-1")], Decision()),
    "a worker that is done waits for the others": ([seat("worker-0", DONE), seat("worker-1")], Decision()),
    "all are done": ([seat("worker-0", DONE), seat("worker-1", DONE)], Decision(end=DONE)),
    "a single task ends as it ended": ([seat("worker-0", BAD)], Decision(reform=BAD)),
    "the end of a task that was told to stop is no failure":
        ([seat("worker-0", STOPPED, told=True), seat("worker-1")], Decision()),
    "a parameter server comes back alone":
        ([seat("worker-0"), seat("ps-0", LOST, on_loss="task", ends=False)], Decision(again=("ps-0",))),
    "a parameter server is stopped when the training is done":
        ([seat("worker-0", DONE), PS], Decision(stop=("ps-0",), close=DONE)),
    "a task that may fail does not matter":
        ([seat("worker-0"), seat("evaluator-0", BAD, on_loss="task", ends=False, may_fail=True)], Decision()),
    "an ignored loss leaves the others alone":
        ([seat("worker-0", on_loss="ignore"), seat("worker-1", LOST, on_loss="ignore")], Decision()),
    "the loss of all tasks is not ignored": (
        [seat("worker-0", LOST, on_loss="ignore"), seat("worker-1", BAD, on_loss="ignore")],
        Decision(end=LOST),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seats", "decision"), DECISIONS.values(), ids=DECISIONS.keys())
def test_decisions(seats: list[TaskState], decision: Decision) -> None:
    assert ask(*seats) == decision


def test_a_lost_member_empties_the_world() -> None:
    decision = ask(seat("worker-0"), seat("worker-1", LOST))
    assert decision.stop == ("worker-0",)
    assert decision.trouble is not None and decision.trouble.reason == "worker-1: its launcher is gone"


def test_a_task_without_an_order_is_not_awaited() -> None:
    decision = ask(seat("worker-0", idle=True), seat("worker-1", LOST, idle=True))
    assert decision.stop == () and decision.reform is not None
    assert decision.reform.evidence["task"] == "worker-1"


def test_an_empty_world_starts_again_and_names_the_failed_task() -> None:
    decision = ask(seat("worker-0", STOPPED, told=True), seat("worker-1", LOST))
    assert decision.reform is not None and decision.reform.evidence["task"] == "worker-1"


def test_a_kill_is_the_cause_and_not_the_exception_that_follows() -> None:
    decision = ask(seat("worker-0", BAD, ended=1.0), seat("worker-1", KILLED, ended=2.0))
    assert decision.reform is not None and decision.reform.reason == "worker-1: killed by SIGKILL"


def test_of_two_exceptions_the_first_is_the_cause() -> None:
    decision = ask(seat("worker-0", BAD, ended=2.0), seat("worker-1", BAD, ended=1.0))
    assert decision.reform is not None and decision.reform.reason.startswith("worker-1")


def test_a_closed_attempt_waits_for_all_tasks() -> None:
    assert ask(seat("worker-0", DONE), PS, closing=DONE) == Decision(stop=("ps-0",))
    ended = seat("ps-0", STOPPED, on_loss="task", ends=False, told=True)
    assert ask(seat("worker-0", DONE), ended, closing=DONE) == Decision(end=DONE)


def test_a_world_that_a_server_emptied_does_not_end_the_run() -> None:
    ps = seat("ps-0", LOST, on_loss="world", ends=False)
    decision = ask(seat("worker-0", STOPPED, told=True), ps)
    assert decision.reform is not None and decision.reform.cause is Cause.LOST


def test_a_member_that_finished_starts_again_with_the_world() -> None:
    decision = ask(seat("worker-0", DONE), seat("worker-1", KILLED))
    assert decision.reform is not None
