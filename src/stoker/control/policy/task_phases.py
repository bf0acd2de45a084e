"""The phases of a task in a live attempt, and the events that move it from one to the next. Pure.

docs/state-machine.md is generated from this file, including the facts that a task keeps beside its phase.
"""

from __future__ import annotations

from enum import StrEnum

from stoker.spec.transitions import Table, staying, to


class TaskPhase(StrEnum):
    PENDING = "pending"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    LOST = "lost"
    ENDED = "ended"
    CLOSING = "closing"
    GONE = "gone"
    ABSENT = "absent"
    CANCELLED = "cancelled"
    RELEASED = "released"
    FREED = "freed"

    @property
    def ordered(self) -> bool:
        """It was ordered to run its generation."""
        return self in _ORDERED

    @property
    def launcher_over(self) -> bool:
        """Its launcher takes no more orders."""
        return self in _LAUNCHER_OVER


class TaskEvent(StrEnum):
    REACHED = "directory reached"
    ORDERED = "ordered to run"
    OUTDATED = "order outdated"
    TOLD = "told to stop"
    ENDED = "body ended"
    CLOSED = "body and launcher ended"
    GONE = "launcher gone"
    COLLECTED = "remains taken in"
    CANCELLED = "cancelled"
    RENEWED = "next generation"
    REPLACED = "replaced"
    LET_GO = "let go"
    FREED = "place given back"


P = TaskPhase
_ORDERED = frozenset({P.RUNNING, P.STOPPING, P.LOST, P.ENDED, P.CLOSING, P.GONE})
_LAUNCHER_OVER = frozenset({P.LOST, P.CLOSING, P.GONE, P.ABSENT})

MEANING = {
    P.PENDING: "requested from the engine, or about to be; its directory has not been reached",
    P.READY: "its launcher is up and has no order for its generation",
    P.RUNNING: "has the order to run its generation",
    P.STOPPING: "was told to stop",
    P.LOST: "its launcher is gone; the output of its body is being taken in",
    P.ENDED: "its body has ended; its launcher waits for the next order",
    P.CLOSING: "its body has ended and its launcher is ending, stopped by something outside of Stoker",
    P.GONE: "its body has ended and its launcher is gone",
    P.ABSENT: "its launcher ended before it had its order",
    P.CANCELLED: "will not be ordered to run: the attempt is ending",
    P.RELEASED: "left the run; keeps its place until it is proven to have ended",
    P.FREED: "left the run, has ended, and its place is given back",
}
EVENTS = {
    TaskEvent.REACHED: "the engine shows its task directory",
    TaskEvent.ORDERED: "its order is written, or one that an earlier server wrote is found",
    TaskEvent.OUTDATED: "its order is for an older generation than the one running (a restored database)",
    TaskEvent.TOLD: "the order to stop is being written, or one is found; `kill` may follow `stop`",
    TaskEvent.ENDED: "its journal or status reports the end of its body",
    TaskEvent.CLOSED: "the same, and the end of its launcher",
    TaskEvent.GONE: "the engine proves that its launcher ended, or it is given up after `lost_after`",
    TaskEvent.COLLECTED: "its journal has no ending: complete checkpoints are taken in, and the task counts as lost",
    TaskEvent.CANCELLED: "the attempt ends before the task was ordered to run",
    TaskEvent.RENEWED: "the next generation runs on the same launcher",
    TaskEvent.REPLACED: "its next incarnation runs elsewhere, with a new launcher",
    TaskEvent.LET_GO: "not part of the next generation, or not allowed to join",
    TaskEvent.FREED: "the scheduler has its place back",
}
FACTS = {
    "verdict": "how its newest body ended: cause, exit code, evidence",
    "gone": "text: the proof that its launcher has ended, or why it was given up",
    "given_up": "gone without proof: it was silent for longer than `lost_after`",
    "stop_sent": "order that it got before its body ended: `stop` or `kill`",
    "forced": "the engine was asked to end it, because it did not stop in time",
    "joining": "recorded in its placement: it belongs to the next generation and not to the present one",
    "leaving": "recorded in its placement: it does not belong to the next generation",
    "replaced_silent": "the previous incarnation was given up",
}
"""Attributes of a task that add to its phase and never contradict it."""

ROWS = {
    TaskEvent.REACHED: {P.PENDING: P.READY, **staying((P.ABSENT, P.CANCELLED, P.RELEASED, P.FREED))},
    # A task that ended while no server was running: the engine may show its end before its directory is reached.
    TaskEvent.ORDERED: {P.READY: P.RUNNING, P.ABSENT: P.LOST},
    TaskEvent.OUTDATED: {**to(P.READY, (P.RUNNING, P.STOPPING)), P.LOST: P.ABSENT},
    TaskEvent.TOLD: {P.RUNNING: P.STOPPING, **staying((P.STOPPING, P.LOST))},
    TaskEvent.ENDED: {P.RUNNING: P.ENDED, P.STOPPING: P.ENDED, P.LOST: P.GONE},
    TaskEvent.CLOSED: {P.RUNNING: P.CLOSING, P.STOPPING: P.CLOSING, P.LOST: P.GONE},
    TaskEvent.GONE: {
        **to(P.ABSENT, (P.PENDING, P.READY, P.CANCELLED)),
        **to(P.LOST, (P.RUNNING, P.STOPPING)),
        **to(P.GONE, (P.ENDED, P.CLOSING)),
        **staying((P.RELEASED,)),
    },
    TaskEvent.COLLECTED: {P.LOST: P.GONE},
    TaskEvent.CANCELLED: to(P.CANCELLED, (P.PENDING, P.READY)),
    TaskEvent.RENEWED: {P.ENDED: P.READY, **staying((P.READY, P.PENDING))},
    TaskEvent.REPLACED: to(P.PENDING, (P.GONE, P.ABSENT)),
    TaskEvent.LET_GO: to(P.RELEASED, [phase for phase in P if phase not in (P.RELEASED, P.FREED)]),
    TaskEvent.FREED: {P.RELEASED: P.FREED},
}
TABLE: Table[TaskPhase, TaskEvent] = Table("task", ROWS)
