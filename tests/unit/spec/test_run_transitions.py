"""The table of runs: what may follow what."""

from __future__ import annotations

from stoker.spec.run_transitions import ENDED, EVENTS, MEANING, TABLE, RunEvent
from stoker.spec.states import HOLDING, TERMINAL, RunState

RESTORED = {RunEvent.ATTEMPT_FOUND, RunEvent.ATTEMPT_LOST}
"""Only of a database that was restored from an older copy."""


def test_everything_has_a_meaning() -> None:
    assert set(MEANING) == set(RunState)
    assert set(EVENTS) == set(RunEvent) == {one.event for one in TABLE.transitions}


def test_every_state_can_be_reached() -> None:
    reached, before = {RunState.QUEUED}, set[RunState]()
    while reached != before:
        before = set(reached)
        reached |= {
            one.after for one in TABLE.transitions if one.before in reached and one.event not in RESTORED
        }
    assert reached == set(RunState)


def test_terminal_states_are_left_only_by_resume() -> None:
    left = {one.event for one in TABLE.transitions if one.before in TERMINAL | {RunState.SUSPENDED}}
    assert left == {RunEvent.RESUMED} | RESTORED


def test_only_an_admitted_run_holds_a_place() -> None:
    into = {one.event for one in TABLE.transitions if one.after in HOLDING and one.before not in HOLDING}
    assert into == {RunEvent.ADMITTED, RunEvent.ATTEMPT_FOUND}


def test_an_attempt_may_end_in_every_state_that_has_one() -> None:
    assert set(ENDED) == set(RunState) - HOLDING
    for state, event in ENDED.items():
        assert {TABLE.after(before, event) for before in HOLDING} == {state}
