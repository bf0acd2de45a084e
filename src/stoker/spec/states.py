"""The states of a run, and the causes by which an attempt ends."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """queued -> starting -> running -> stopping -> succeeded | failed | stopped, and suspended.

    A run that loses its attempt goes back to queued. Only an explicit resume leaves a terminal state.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL

    @property
    def holds(self) -> bool:
        return self in HOLDING


TERMINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED})
HOLDING = frozenset({RunState.STARTING, RunState.RUNNING, RunState.STOPPING})


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    USER_ERROR = "user-error"
    OOM = "oom"
    LOST = "lost"
    PREEMPTED = "preempted"
    EVICTED = "evicted"
    IMAGE = "image"
    SETUP = "setup"
    TIMEOUT = "timeout"
    HANG = "hang"
    IDLE = "idle"
    GPU_FAULT = "gpu-fault"
    DISK = "disk"
    STOPPED = "stopped"
    ENGINE_ERROR = "engine-error"

    @property
    def users_fault(self) -> bool:
        """Whether it spends the user's `retries`. Other causes are retried for free, with backoff and a bound."""
        return self in USERS_FAULT


USERS_FAULT = frozenset({Cause.USER_ERROR, Cause.OOM, Cause.IMAGE, Cause.SETUP, Cause.TIMEOUT})
