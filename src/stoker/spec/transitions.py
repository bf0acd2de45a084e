"""Tables of transitions: from a state, by an event, to a state. Pure."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)

STRICT = "STOKER_STRICT_TRANSITIONS"
"""Environment variable, set in tests: a transition that is not in its table is logged and raises. Without it the
transition is logged, and the event's usual state follows, because the server should keep running."""
MISSING = "not in the table"
"""Text in the log line of such a transition."""


class UnexpectedTransition(Exception):
    """An event that the table does not know in this state."""


@dataclass(frozen=True)
class Transition(Generic[State, Event]):
    before: State
    event: Event
    after: State


class Table(Generic[State, Event]):
    """`rows`: event -> state before -> state after."""

    def __init__(self, name: str, rows: Mapping[Event, Mapping[State, State]]) -> None:
        self.name = name
        self.transitions = tuple(
            Transition(before, event, after)
            for event, pairs in rows.items()
            for before, after in pairs.items()
        )
        self._after = {(one.before, one.event): one.after for one in self.transitions}
        self._usual = {event: Counter(pairs.values()).most_common(1)[0][0] for event, pairs in rows.items()}

    def after(self, before: State, event: Event, **facts: Any) -> State:
        """The state that follows. `facts`: logged for an event that is not in the table."""
        found = self._after.get((before, event))
        if found is not None:
            return found
        details = ", ".join(f"{key} {value}" for key, value in facts.items())
        text = f"{self.name}: {event.value!r} in state {before.value!r} is {MISSING} ({details})"
        usual = self._usual[event]
        log.error("%s; going on as %r", text, usual.value)
        if os.environ.get(STRICT):
            raise UnexpectedTransition(text)
        return usual

    def befores(self, event: Event) -> list[State]:
        """The states in which it may occur, by name."""
        return sorted(one.before for one in self.transitions if one.event is event)


def to(after: State, befores: Iterable[State]) -> dict[State, State]:
    """A row: every state of `befores` leads to `after`."""
    return dict.fromkeys(befores, after)


def staying(states: Iterable[State]) -> dict[State, State]:
    """A row: these states stay the same."""
    return {state: state for state in states}
