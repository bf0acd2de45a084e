"""From an ending to a cause, and from a cause to the next state of the run."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.control.policy.outcome import Outcome, decide, judge, lost
from stoker.spec.states import Cause, RunState
from stoker.task.formats import Ending


def end(kind: str, **values: Any) -> Ending:
    return Ending(seq=1, generation=1, kind=kind, **values)


@pytest.mark.parametrize(
    ("ending", "desired", "cause", "code"),
    [
        (end("exit", code=0), "run", Cause.COMPLETED, 0),
        (end("exit", code=3), "run", Cause.USER_ERROR, 3),
        (end("signal", signal=9), "run", Cause.LOST, 137),
        (end("signal", signal=11), "run", Cause.USER_ERROR, 139),
        (end("oom", signal=9, limit=1 << 30, peak=1 << 30), "run", Cause.OOM, 137),
        (end("setup", code=1), "run", Cause.SETUP, 1),
        (end("timeout", signal=15), "run", Cause.TIMEOUT, 143),
        (end("start-failed", code=127, message="no such command"), "run", Cause.USER_ERROR, 127),
        (end("lost"), "run", Cause.LOST, None),
        (end("disk", code=1), "run", Cause.DISK, 1),
        (
            end("exit", code=1, last_lines=["OSError: [Errno 28] No space left on device"]),
            "run",
            Cause.DISK,
            1,
        ),
        (end("stopped", signal=15), "stop", Cause.STOPPED, 143),
        (end("stopped", signal=15), "run", Cause.PREEMPTED, 143),
        (end("stopped", code=0), "suspend", Cause.PREEMPTED, 0),
        # It finished by itself before the stop reached it: that is a success, not a stop.
        (end("exit", code=0), "stop", Cause.COMPLETED, 0),
    ],
)
def test_cause(ending: Ending, desired: str, cause: Cause, code: int | None) -> None:
    verdict = judge(ending, desired=desired)
    assert (verdict.cause, verdict.exit_code) == (cause, code)


def test_oom_names_limit_and_peak() -> None:
    verdict = judge(end("oom", signal=9, limit=500 << 20, peak=499 << 20), desired="run")
    assert verdict.reason == "out of memory: limit 500 MiB, peak 499 MiB"
    assert verdict.evidence["limit"] == 500 << 20


def after(verdict: Outcome, **given: Any) -> Any:
    values: dict[str, Any] = {
        "desired": "run",
        "retries": 0,
        "failures": 0,
        "faults": 0,
        "progressed": False,
        "fruitless": 0,
        "backoff": 1.0,
        "backoff_max": 300.0,
        "fault_retries": 20,
    }
    return decide(verdict, **{**values, **given})


def test_user_errors_spend_retries_and_then_fail() -> None:
    verdict = judge(end("exit", code=1), desired="run")
    first = after(verdict, retries=1)
    assert (first.state, first.failures) == (RunState.QUEUED, 1)
    second = after(verdict, retries=1, failures=1)
    assert second.state is RunState.FAILED
    assert "1 of 1 spent" in second.reason


def test_only_failures_in_a_row_without_progress_wait() -> None:
    """With progress in each attempt there is no backoff after any number of failures."""
    verdict = judge(end("signal", signal=11), desired="run")
    known = {"retries": 1000, "failures": 500}
    assert [after(verdict, fruitless=count, **known).delay for count in range(4)] == [0, 1, 2, 4]
    assert after(verdict, fruitless=3, progressed=True, **known).delay == 0


def test_lost_attempts_spend_no_retries_and_the_first_is_retried_at_once() -> None:
    verdict = lost("launcher 4711 is gone", desired="run", last_lines=[])
    following = after(verdict, retries=0)
    assert (following.state, following.failures, following.faults, following.delay) == (
        RunState.QUEUED,
        0,
        1,
        0.0,
    )


def test_backoff_doubles_up_to_its_bound_and_ends() -> None:
    verdict = lost("gone", desired="run", last_lines=[])
    delays = [after(verdict, faults=faults).delay for faults in range(12)]
    assert delays[:5] == [0, 1, 2, 4, 8]
    assert max(delays) <= 300
    assert after(verdict, faults=20).state is RunState.FAILED


def test_progress_resets_the_backoff() -> None:
    verdict = lost("gone", desired="run", last_lines=[])
    following = after(verdict, faults=19, progressed=True)
    assert (following.state, following.faults, following.delay) == (RunState.QUEUED, 1, 0.0)


def test_a_stop_wins_over_retries() -> None:
    assert (
        after(judge(end("exit", code=1), desired="stop"), desired="stop", retries=5).state is RunState.STOPPED
    )
    assert after(lost("gone", desired="kill", last_lines=[]), desired="kill").state is RunState.STOPPED


def test_a_suspended_run_holds_nothing_and_is_not_over() -> None:
    verdict = judge(end("stopped", signal=15), desired="suspend")
    assert after(verdict, desired="suspend").state is RunState.SUSPENDED
