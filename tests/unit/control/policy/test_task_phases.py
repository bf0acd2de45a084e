"""The table of task phases: what may follow what, and what each phase means."""

from __future__ import annotations

from stoker.control.policy.task_phases import EVENTS, FACTS, MEANING, TABLE, TaskEvent, TaskPhase
from stoker.control.state import LiveTask

P, E = TaskPhase, TaskEvent


def after(*events: TaskEvent, phase: TaskPhase = P.PENDING) -> TaskPhase:
    for event in events:
        phase = TABLE.after(phase, event)
    return phase


def test_everything_has_a_meaning() -> None:
    assert set(MEANING) == set(TaskPhase)
    assert set(EVENTS) == set(TaskEvent) == {one.event for one in TABLE.transitions}
    assert all(hasattr(LiveTask, name) or name in LiveTask.__dataclass_fields__ for name in FACTS)


def test_every_phase_can_be_reached() -> None:
    reached, before = {P.PENDING}, set[TaskPhase]()
    while reached != before:
        before = set(reached)
        reached |= {one.after for one in TABLE.transitions if one.before in reached}
    assert reached == set(TaskPhase)


def test_a_body_has_an_order_before_it_ends() -> None:
    for event in (E.TOLD, E.ENDED, E.CLOSED, E.COLLECTED, E.OUTDATED):
        assert all(before.ordered for before in TABLE.befores(event)), event
    assert not any(
        one.after.ordered
        for one in TABLE.transitions
        if not one.before.ordered and one.event is not E.ORDERED
    )


def test_a_finished_launcher_gets_no_other_order() -> None:
    """The next body of such a task belongs to another incarnation."""
    renewed = {one.before for one in TABLE.transitions if one.event is E.RENEWED}
    replaced = {one.before for one in TABLE.transitions if one.event is E.REPLACED}
    assert not any(phase.launcher_over for phase in renewed)
    assert replaced <= {phase for phase in P if phase.launcher_over}


def test_no_event_brings_back_a_released_task() -> None:
    outward = {(one.event, one.after) for one in TABLE.transitions if one.before in (P.RELEASED, P.FREED)}
    assert {event for event, phase in outward if phase is P.FREED} == {E.FREED, E.REACHED}
    assert {phase for _, phase in outward} == {P.RELEASED, P.FREED}


def test_the_lives_of_tasks() -> None:
    assert after(E.REACHED, E.ORDERED, E.ENDED, E.RENEWED, E.ORDERED, E.TOLD, E.ENDED) is P.ENDED
    assert after(E.REACHED, E.ORDERED, E.GONE, E.COLLECTED, E.REPLACED, E.REACHED, E.ORDERED) is P.RUNNING
    assert after(E.REACHED, E.ORDERED, E.TOLD, E.TOLD, E.CLOSED, E.GONE, E.REPLACED) is P.PENDING
    assert after(E.GONE, E.REACHED, E.ORDERED, E.ENDED) is P.GONE, "it ended while no server watched"
    assert after(E.REACHED, E.CANCELLED, E.GONE) is P.ABSENT
    assert after(E.LET_GO, E.GONE, E.FREED) is P.FREED
