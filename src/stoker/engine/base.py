"""What an engine is: something that starts, stops and observes tasks. It decides nothing.

The server records what it wants before it asks an engine, and names are deterministic, so after a crash it
finds what it started (`observe`) and adopts it, and finds what it does not know and ends it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from stoker.task.near import NearTaskDir

Handle = Mapping[str, Any]
"""What an engine needs to find an attempt again: opaque JSON, stored verbatim."""

TaskDir = NearTaskDir
"""The task directory, near or far. The Kubernetes engine turns this into a protocol with one suite for both."""


@dataclass(frozen=True)
class Gpu:
    id: str
    """Stable name: NVML's UUID."""
    index: int
    model: str
    memory: int
    healthy: bool = True
    """False while it must not be handed out: a fault, or memory that an ended process still holds."""
    reason: str = ""


@dataclass(frozen=True)
class Node:
    name: str
    cpu: float
    memory: int
    """Bytes runs may use."""
    gpus: tuple[Gpu, ...] = ()
    ready: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    isolation: Mapping[str, str] = field(default_factory=dict)
    """What is enforced and how: {"memory": "cgroup v1", "cpu": "affinity", "processes": "pid namespace", ...};
    a missing key is not enforced."""
    boot_id: str = ""


@dataclass(frozen=True)
class TaskPlan:
    """One task of an attempt, placed."""

    name: str
    """`worker-0`"""
    role: str = "worker"
    index: int = 0
    incarnation: int = 1
    node: str = "local"
    cpu: float | None = None
    """None: not limited (and nothing reserved)."""
    memory: int | None = None
    pids: int | None = None
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs it owns."""
    log_budget: int = 1 << 30
    log_segment: int = 8 << 20


@dataclass(frozen=True)
class Attempt:
    run: str
    number: int
    tasks: tuple[TaskPlan, ...]


class Presence(StrEnum):
    ALIVE = "alive"
    """Its launcher is there (whatever its phase)."""
    GONE = "gone"
    """Proof of death: launcher and process tree are gone, or another boot. The directory may still be there."""
    SILENT = "silent"
    """Neither seen nor proven dead: the node does not answer."""


@dataclass(frozen=True)
class Observation:
    run: str
    attempt: int
    task: str
    incarnation: int
    presence: Presence
    proof: str = ""
    """How we know, for the evidence: `launcher 4711 is gone`, `the machine was restarted`."""
    node: str = "local"
    handle: Handle = field(default_factory=dict)


class Engine(Protocol):
    """Runs tasks somewhere. Every call is idempotent by attempt and valid after a server restart.

    Raises EngineUnavailable when the backend cannot be reached; never returns an empty answer instead.
    Called from one event loop only.
    """

    name: str

    async def capacity(self) -> Sequence[Node]: ...

    async def submit(self, attempt: Attempt) -> Handle:
        """Declarative: these tasks, each at this incarnation, each with a launcher that holds and waits for
        orders. A task whose launcher already ran at this incarnation is never started again."""
        ...

    async def observe(self) -> Sequence[Observation]:
        """Every task of ours that exists, whether or not the server knows it."""
        ...

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        """End launchers and everything beneath them, whatever state they are in. Absent is success. Task
        directories stay until `remove`."""
        ...

    async def reach(self, handle: Handle, task: str) -> TaskDir: ...

    async def remove(self, handle: Handle) -> None:
        """Delete what is left of an ended attempt, its directories included. Absent is success."""
        ...

    async def close(self) -> None:
        """The server goes away; tasks go on."""
        ...


@runtime_checkable
class Watches(Protocol):
    """An engine that notices changes by itself, so that nobody has to wait for the next look."""

    def changes(self) -> AsyncIterator[tuple[str, int, str]]:
        """(run, attempt, task) whose status, journal or presence may have changed. Hints: may repeat or miss."""
        ...


@runtime_checkable
class Drills(Protocol):
    """An engine that can hurt a task on purpose."""

    async def hurt(self, handle: Handle, task: str, how: str) -> str:
        """how: `process` (SIGKILL the training process) or `launcher` (SIGKILL the launcher). Says what it did."""
        ...
