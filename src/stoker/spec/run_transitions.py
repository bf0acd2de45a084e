"""What can happen to a run, and the state that follows. docs/state-machine.md is generated from it."""

from __future__ import annotations

from enum import StrEnum

from stoker.spec.states import HOLDING, TERMINAL, RunState
from stoker.spec.transitions import Table, to

_QUEUED, _SUSPENDED = RunState.QUEUED, RunState.SUSPENDED


class RunEvent(StrEnum):
    ADMITTED = "admitted"
    STARTED = "started"
    STOP_SENT = "stop sent"
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"
    REQUEUED = "requeued"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    RESUMED = "resumed"
    ATTEMPT_FOUND = "newer attempt found"
    ATTEMPT_LOST = "newer attempt ended"


MEANING = {
    RunState.QUEUED: "waits for its places, or for its backoff to pass",
    RunState.STARTING: "has places; an attempt is being brought up",
    RunState.RUNNING: "the first training process of its attempt has started",
    RunState.STOPPING: "was told to stop, or is preempted; its tasks have their grace",
    RunState.SUSPENDED: "ended by `stoker suspend`; `resume` goes on from its last checkpoint",
    RunState.SUCCEEDED: "ended with exit code 0",
    RunState.FAILED: "ended with an error, and has no retries left",
    RunState.STOPPED: "ended by `stoker stop` or `stoker stop --kill`",
}
EVENTS = {
    RunEvent.ADMITTED: "the scheduler gave it places, and its next attempt is recorded",
    RunEvent.STARTED: "a launcher reports that its training process runs",
    RunEvent.STOP_SENT: "its tasks were told to stop because a user or the scheduler wants that",
    RunEvent.CANCELLED: "stopped while it waited in the queue",
    RunEvent.SUSPENDED: "suspended while it waited, or its attempt ended because of it",
    RunEvent.REQUEUED: "its attempt ended, and another one follows",
    RunEvent.SUCCEEDED: "its attempt ended well",
    RunEvent.FAILED: "its attempt failed, and none follows",
    RunEvent.STOPPED: "its attempt ended because it was told to stop",
    RunEvent.RESUMED: "`stoker resume`",
    RunEvent.ATTEMPT_FOUND: "the database was restored from an older copy, and a newer attempt is running",
    RunEvent.ATTEMPT_LOST: "the same, and the newer attempts were ended",
}

ROWS = {
    RunEvent.ADMITTED: {_QUEUED: RunState.STARTING},
    # A launcher may report a process for the first time after its run was told to stop.
    RunEvent.STARTED: {RunState.STARTING: RunState.RUNNING},
    RunEvent.STOP_SENT: to(RunState.STOPPING, (RunState.STARTING, RunState.RUNNING)),
    RunEvent.CANCELLED: {_QUEUED: RunState.STOPPED},
    RunEvent.SUSPENDED: to(_SUSPENDED, [*sorted(HOLDING), _QUEUED]),
    RunEvent.REQUEUED: to(_QUEUED, sorted(HOLDING)),
    RunEvent.SUCCEEDED: to(RunState.SUCCEEDED, sorted(HOLDING)),
    RunEvent.FAILED: to(RunState.FAILED, sorted(HOLDING)),
    RunEvent.STOPPED: to(RunState.STOPPED, sorted(HOLDING)),
    RunEvent.RESUMED: to(_QUEUED, [*sorted(TERMINAL), _SUSPENDED]),
    RunEvent.ATTEMPT_FOUND: to(RunState.STARTING, RunState),
    RunEvent.ATTEMPT_LOST: to(_QUEUED, RunState),
}
TABLE: Table[RunState, RunEvent] = Table("run", ROWS)

ENDED = {
    RunState.QUEUED: RunEvent.REQUEUED,
    RunState.SUSPENDED: RunEvent.SUSPENDED,
    RunState.SUCCEEDED: RunEvent.SUCCEEDED,
    RunState.FAILED: RunEvent.FAILED,
    RunState.STOPPED: RunEvent.STOPPED,
}
"""The end of an attempt, by what follows it."""
