"""What the end of a task means for the others."""

from __future__ import annotations

from typing import Any

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


def test_while_all_run_nothing_happens() -> None:
    assert ask(seat("worker-0"), seat("worker-1")) == Decision()


def test_one_that_is_done_waits_for_the_others() -> None:
    assert ask(seat("worker-0", DONE), seat("worker-1")) == Decision()


def test_when_all_are_done_the_run_is() -> None:
    assert ask(seat("worker-0", DONE), seat("worker-1", DONE)) == Decision(end=DONE)


def test_a_single_task_ends_as_it_ended() -> None:
    assert ask(seat("worker-0", BAD)) == Decision(reform=BAD)


def test_a_lost_member_empties_the_world() -> None:
    decision = ask(seat("worker-0"), seat("worker-1", LOST))
    assert decision.stop == ("worker-0",)
    assert decision.trouble is not None and decision.trouble.reason == "worker-1: its launcher is gone"


def test_who_has_no_order_yet_is_not_waited_for() -> None:
    decision = ask(seat("worker-0", idle=True), seat("worker-1", LOST, idle=True))
    assert decision.stop == () and decision.reform is not None
    assert decision.reform.evidence["task"] == "worker-1"


def test_an_empty_world_starts_again_and_names_who_failed() -> None:
    decision = ask(seat("worker-0", STOPPED, told=True), seat("worker-1", LOST))
    assert decision.reform is not None and decision.reform.evidence["task"] == "worker-1"


def test_the_kill_is_the_cause_and_not_the_exception_that_follows_from_it() -> None:
    decision = ask(seat("worker-0", BAD, ended=1.0), seat("worker-1", KILLED, ended=2.0))
    assert decision.reform is not None and decision.reform.reason == "worker-1: killed by SIGKILL"


def test_of_two_exceptions_the_first_is_the_cause() -> None:
    decision = ask(seat("worker-0", BAD, ended=2.0), seat("worker-1", BAD, ended=1.0))
    assert decision.reform is not None and decision.reform.reason.startswith("worker-1")


def test_the_end_of_who_was_told_to_stop_is_no_failure() -> None:
    assert ask(seat("worker-0", STOPPED, told=True), seat("worker-1")) == Decision()


def test_a_parameter_server_comes_back_alone() -> None:
    ps = seat("ps-0", LOST, on_loss="task", ends=False)
    assert ask(seat("worker-0"), ps) == Decision(again=("ps-0",))


def test_who_serves_is_stopped_when_the_training_is_done() -> None:
    ps = seat("ps-0", on_loss="task", ends=False)
    assert ask(seat("worker-0", DONE), ps) == Decision(stop=("ps-0",), close=DONE)


def test_a_closed_attempt_waits_for_everybody() -> None:
    ps = seat("ps-0", on_loss="task", ends=False)
    assert ask(seat("worker-0", DONE), ps, closing=DONE) == Decision(stop=("ps-0",))
    ended = seat("ps-0", STOPPED, on_loss="task", ends=False, told=True)
    assert ask(seat("worker-0", DONE), ended, closing=DONE) == Decision(end=DONE)


def test_who_may_fail_does_not_matter() -> None:
    evaluator = seat("evaluator-0", BAD, on_loss="task", ends=False, may_fail=True)
    assert ask(seat("worker-0"), evaluator) == Decision()


def test_a_loss_that_is_ignored_leaves_the_others_alone() -> None:
    assert ask(seat("worker-0", on_loss="ignore"), seat("worker-1", LOST, on_loss="ignore")) == Decision()


def test_when_all_are_lost_that_might_be_ignored_the_run_has_failed() -> None:
    seats = [seat("worker-0", LOST, on_loss="ignore"), seat("worker-1", BAD, on_loss="ignore")]
    assert ask(*seats) == Decision(end=LOST)


def test_a_world_that_a_server_emptied_does_not_end_the_run() -> None:
    ps = seat("ps-0", LOST, on_loss="world", ends=False)
    decision = ask(seat("worker-0", STOPPED, told=True), ps)
    assert decision.reform is not None and decision.reform.cause is Cause.LOST


def test_a_member_that_finished_starts_again_with_the_world() -> None:
    decision = ask(seat("worker-0", DONE), seat("worker-1", KILLED))
    assert decision.reform is not None
