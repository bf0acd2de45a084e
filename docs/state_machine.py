"""docs/state-machine.md, from the tables of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from stoker.control.policy import task_phases
from stoker.spec import run_transitions
from stoker.spec.states import TERMINAL, RunState
from stoker.spec.transitions import Table

HEAD = """# States of runs, phases of tasks

This page is generated from `src/stoker/spec/run_transitions.py` and `src/stoker/control/policy/task_phases.py` by
`make docs`. Every change of a run's state and of a task's phase is a row of one of these two tables. An event in a state
that has no row for it is a fault of Stoker: the server logs it with the facts and goes on with the state that usually
follows the event; in tests it raises (`STOKER_STRICT_TRANSITIONS`).
"""
RUN = """## Runs

A run begins as `queued`. Its state is recorded in the database before anything is done about it.
"""
RESTORED = """The two events of restored databases may occur in every state, and are not in the diagram.
"""
TASK = """## Tasks of a live attempt

A task begins as `pending`. Phases are kept in memory: after a restart the server finds them again from the task
directories and from what the engine shows. Each incarnation of a task passes through them anew, and each generation from
`ready` on. `let go` may occur in every phase but the last two; its arrows are not in the diagram.
"""
FACTS = """### Facts beside the phase

| fact | meaning |
|---|---|
"""


def markdown() -> str:
    restored = (run_transitions.RunEvent.ATTEMPT_FOUND, run_transitions.RunEvent.ATTEMPT_LOST)
    parts = [
        HEAD,
        RUN,
        _diagram(run_transitions.TABLE, RunState.QUEUED, hidden=restored, last=sorted(TERMINAL)),
        RESTORED,
        _meanings("state", run_transitions.MEANING),
        _events(run_transitions.TABLE, run_transitions.EVENTS),
        TASK,
        _diagram(
            task_phases.TABLE,
            task_phases.TaskPhase.PENDING,
            hidden=(task_phases.TaskEvent.LET_GO,),
            last=[task_phases.TaskPhase.FREED],
        ),
        _meanings("phase", task_phases.MEANING),
        _events(task_phases.TABLE, task_phases.EVENTS),
        FACTS + "".join(f"| `{name}` | {text} |\n" for name, text in task_phases.FACTS.items()),
    ]
    return "\n".join(parts)


def _diagram(table: Table[Any, Any], first: StrEnum, *, hidden: tuple[StrEnum, ...], last: list[Any]) -> str:
    """One arrow between two states, with all events that lead from one to the other. Events that change nothing have none."""
    arrows: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    states = list(type(first))
    for one in sorted(table.transitions, key=lambda one: (states.index(one.before), states.index(one.after))):
        if one.event not in hidden and one.before is not one.after:
            arrows.setdefault((one.before, one.after), []).append(str(one.event))
    lines = [f"    [*] --> {first}"]
    lines += [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in last]
    return "```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n"


def _meanings(what: str, meaning: Mapping[Any, str]) -> str:
    return f"| {what} | meaning |\n|---|---|\n" + "".join(
        f"| `{one}` | {text} |\n" for one, text in meaning.items()
    )


def _events(table: Table[Any, Any], meaning: Mapping[Any, str]) -> str:
    """Every row of the table, by event."""
    lines = ["| event | meaning | from | to |", "|---|---|---|---|"]
    for event, text in meaning.items():
        befores: dict[str, list[StrEnum]] = {}
        for one in table.transitions:
            if one.event is event:
                after = "the same" if one.before is one.after else f"`{one.after}`"
                befores.setdefault(after, []).append(one.before)
        for number, (after, states) in enumerate(befores.items()):
            said = f"{event} | {text}" if number == 0 else " | "
            names = ", ".join(f"`{state}`" for state in type(states[0]) if state in states)
            lines.append(f"| {said} | {names} | {after} |")
    return "\n".join(lines) + "\n"
