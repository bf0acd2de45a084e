"""What an engine is: something that starts, stops and observes tasks. It decides nothing.

The server records what it wants before it asks an engine, and names are deterministic, so after a crash it
finds what it started (`observe`) and adopts it, and finds what it does not know and ends it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from stoker.spec import Job
from stoker.task.directory import TaskDir
from stoker.task.formats import TaskInfo

__all__ = [
    "ASIDE_FOR",
    "Attempt",
    "Drills",
    "Engine",
    "Gpu",
    "Handle",
    "Needs",
    "Node",
    "Observation",
    "Presence",
    "Resizes",
    "SetsAside",
    "Shows",
    "Surroundings",
    "TaskDir",
    "TaskPlan",
    "Watches",
]

Handle = Mapping[str, Any]
"""What an engine needs to find an attempt again: opaque JSON, stored verbatim."""

ASIDE_FOR = 7 * 86400.0
"""Seconds for which the files of a run are kept that has ended without a checkpoint, though it wrote some."""


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
    tags: frozenset[str] = frozenset()
    """What tasks may ask for by name (see `Needs.among`): a cluster, a pool of it, its tainted GPU nodes."""
    zone: str = ""


@dataclass(frozen=True)
class Needs:
    """What one task of a job asks of an engine's nodes, the engine's own share (sidecars) included."""

    cpu: float
    memory: int
    gpu: int = 0
    among: frozenset[str] = frozenset()
    """Only nodes with at least one of these tags; empty: any node."""


@dataclass(frozen=True)
class Surroundings:
    """What a body finds around it here."""

    inherit: bool = False
    """Its environment begins with the container's own; False: with what the submitter's shell had."""
    setups: str = ""
    """Directory of the environments that `setup` makes; empty: the home's."""
    inputs: str = ""
    """Directory in which inputs are mounted, each under its name."""
    image: str = ""
    """The image its tasks run in; empty: none."""
    port: int = 0
    """The first port of every task, where each has an address of its own; 0: tasks share an address, and whoever
    makes the world gives out ports."""


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
    job: Job | None = None
    """The job as its role sees it; None: the attempt's."""
    image: Mapping[str, Any] | None = None
    """As `Attempt.image`, for a role with an image of its own."""
    given_up: bool = False
    """The incarnation before this one was silent for too long: it may still live somewhere, and is not waited for."""
    started: bool = False
    """This incarnation had an order before. Where nothing of it is left it is lost: the engine shows it as gone, and never
    starts it anew."""


@dataclass(frozen=True)
class Attempt:
    run: str
    number: int
    tasks: tuple[TaskPlan, ...]
    job: Job | None = None
    """What was asked for; None only in tests of the engine itself."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    image: Mapping[str, Any] = field(default_factory=dict)
    """What the registry says of the job's image: reference (with digest), entrypoint, cmd, workdir, user, env."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For people who look at the backend itself: name, project, user."""

    def seen_by(self, plan: TaskPlan) -> Attempt:
        """The attempt as a task of it sees it: with the job and the image of its role."""
        if plan.job is None and plan.image is None:
            return self
        return replace(self, job=plan.job or self.job, image=self.image if plan.image is None else plan.image)

    def info(self, plan: TaskPlan) -> TaskInfo:
        """task.json of one of its tasks, as far as it is the same wherever the task runs."""
        return TaskInfo(
            run=self.run,
            attempt=self.number,
            task=plan.name,
            role=plan.role,
            index=plan.index,
            incarnation=plan.incarnation,
            cpu=plan.cpu,
            memory=plan.memory,
            pids=plan.pids,
            gpus=list(plan.gpus),
            log_budget=plan.log_budget,
            log_segment=plan.log_segment,
        )


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
    address: str = ""
    """At which other tasks reach it; empty while it has none."""
    node_ready: bool | None = None
    """What the backend says of its node; None: it does not say."""
    cause: str = ""
    """With GONE: the word for how it went, where the backend knows better than `lost` (a `spec.words.Cause`)."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the backend showed: reasons, messages, exit codes, the last events. Kept with the attempt."""
    waiting: str = ""
    """With ALIVE and no launcher yet: why not, in one line (`image cannot be pulled: ...`). Shown by `why`."""
    hopeless: str = ""
    """With `waiting`: the cause it ends with if this does not change within `patience` (`image`, `engine-error`)."""
    patience: float = 600.0
    """Seconds."""
    no_room: bool = False
    """With `waiting`: for what others hold and may give back."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs it was given, where the engine hands them out itself."""


class Engine(Protocol):
    """Runs tasks somewhere. Every call is idempotent by attempt and valid after a server restart.

    Raises EngineUnavailable when the backend cannot be reached; never returns an empty answer instead.
    Called from one event loop only.
    """

    name: str

    def needs(self, job: Job) -> Needs:
        """What one task of this job takes of a node here. Pure."""
        ...

    def refuse(self, job: Job) -> None:
        """Raise Refused for what this engine, as its admin set it up, will not run. Pure."""
        ...

    def surroundings(self, job: Job) -> Surroundings:
        """What the bodies of this job find around them here. Pure."""
        ...

    async def capacity(self) -> Sequence[Node]: ...

    async def submit(self, attempt: Attempt) -> Handle:
        """Declarative: these tasks, each at this incarnation, each with a launcher that holds and waits for
        orders. A task whose launcher already ran at this incarnation is never started again."""
        ...

    async def observe(self) -> Sequence[Observation]:
        """Every task of ours that exists, whether or not the server knows it."""
        ...

    async def stop(self, handle: Handle, *, grace: timedelta, tasks: Sequence[str] = ()) -> None:
        """End launchers and everything beneath them, whatever state they are in. Absent is success. Task
        directories stay until `remove`. `tasks`: only these; empty: all."""
        ...

    async def reach(self, handle: Handle, task: str) -> TaskDir:
        """The task's directory, near or far. It need not be there (yet, or any more)."""
        ...

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


@runtime_checkable
class SetsAside(Protocol):
    """An engine that can keep the files of an attempt for `ASIDE_FOR` when all else of it is removed."""

    def aside(self, handle: Handle) -> str:
        """Where they will be. Pure."""
        ...

    async def set_aside(self, handle: Handle) -> None:
        """In place of `remove`. May be repeated."""
        ...


@runtime_checkable
class Resizes(Protocol):
    """An engine that can change what a running task may use."""

    async def resize(self, handle: Handle, task: str, *, cpu: float | None, memory: int | None) -> str | None:
        """None: done in place. Otherwise why it cannot be, and the run has to be restarted with the new size."""
        ...


@runtime_checkable
class Shows(Protocol):
    """An engine that lets people look behind it."""

    def manifest(self, attempt: Attempt) -> str | None:
        """What it would send: YAML, nothing secret in it, as `kubectl apply --dry-run=server` accepts it. None where
        nothing is sent. Pure."""
        ...

    async def check(self) -> Sequence[Mapping[str, Any]]:
        """What of it works, one entry each: name, ok (True, False, or None: a warning), text, hint."""
        ...

    async def shell(self, handle: Handle, task: str) -> Mapping[str, Any]:
        """How a person on the server's machine gets into a task that is there: argv, and where they matter env, cwd."""
        ...
