"""The engine protocol: an engine starts, stops and observes tasks. It decides nothing.

The server records what it wants before it calls an engine, and names are deterministic. After a crash the server
finds what it started (`observe`) and adopts it. It ends what it does not know.
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

Handle = Mapping[str, Any]
"""What an engine needs to find an attempt again: opaque JSON, stored verbatim."""

ASIDE_FOR = 7 * 86400.0
"""Seconds for which the files of a run are kept that wrote checkpoints but ended without a complete one."""


@dataclass(frozen=True)
class Gpu:
    id: str
    """Stable name: NVML's UUID."""
    index: int
    model: str
    memory: int
    healthy: bool = True
    """False while it must not be assigned: a GPU fault, or memory that an ended process still holds."""
    reason: str = ""


@dataclass(frozen=True)
class Node:
    name: str
    cpu: float
    memory: int
    """Bytes that runs may use."""
    gpus: tuple[Gpu, ...] = ()
    ready: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    isolation: Mapping[str, str] = field(default_factory=dict)
    """What is enforced and how: {"memory": "cgroup v1", "cpu": "affinity", "processes": "pid namespace", ...};
    a missing key is not enforced."""
    boot_id: str = ""
    tags: frozenset[str] = frozenset()
    """What tasks may ask for by name (see `Needs.among`): a cluster, a pool of it, its tainted GPU nodes."""


@dataclass(frozen=True)
class Needs:
    """What one task of a job requests of an engine's nodes, including the engine's own share (sidecars)."""

    cpu: float
    memory: int
    gpu: int = 0
    among: frozenset[str] = frozenset()
    """Only nodes with at least one of these tags; empty: any node."""


@dataclass(frozen=True)
class Surroundings:
    """What the environment of a body looks like on this engine."""

    inherit: bool = False
    """True: its environment variables begin with the container's own. False: with those of the submitter's shell."""
    setups: str = ""
    """Directory of the environments that `setup` makes; empty: the home's."""
    here: bool = False
    """Its tasks see the files of the server's machine, under the same paths."""
    inputs: str = ""
    """Directory in which inputs are mounted, each under its name. Empty: inputs of this machine are read where they are."""
    image: str = ""
    """The image its tasks run in; empty: none."""
    port: int = 0
    """The first port of every task, where each task has an address of its own. 0: tasks share an address, and the
    server allocates ports when it makes the world."""


@dataclass(frozen=True)
class TaskPlan:
    """One task of an attempt, with its place."""

    name: str
    """`worker-0`"""
    role: str = "worker"
    index: int = 0
    incarnation: int = 1
    node: str = "local"
    cpu: float | None = None
    """None: not limited, and nothing reserved."""
    memory: int | None = None
    pids: int | None = None
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs assigned to it."""
    log_budget: int = 1 << 30
    log_segment: int = 8 << 20
    job: Job | None = None
    """The job as seen by the task's role; None: the attempt's."""
    image: Mapping[str, Any] | None = None
    """As `Attempt.image`, for a role that has an image of its own."""
    given_up: bool = False
    """The previous incarnation was silent for too long. It may still be running; do not wait for its end."""
    started: bool = False
    """This incarnation had an order before. If nothing of it is left, the engine reports it as gone and never starts
    it again."""


@dataclass(frozen=True)
class Attempt:
    run: str
    number: int
    tasks: tuple[TaskPlan, ...]
    job: Job | None = None
    """The job as submitted; None only in tests of the engine itself."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    image: Mapping[str, Any] = field(default_factory=dict)
    """What the registry reports of the job's image: reference (with digest), entrypoint, cmd, workdir, user, env."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Name, project and user, for people who look at the backend itself."""

    def seen_by(self, plan: TaskPlan) -> Attempt:
        """The attempt as one of its tasks sees it: with the job and the image of the task's role."""
        if plan.job is None and plan.image is None:
            return self
        return replace(self, job=plan.job or self.job, image=self.image if plan.image is None else plan.image)

    def info(self, plan: TaskPlan) -> TaskInfo:
        """The content of task.json that is the same on every engine."""
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
    """The launcher exists (in any phase)."""
    GONE = "gone"
    """Proof of death: launcher and process tree are gone, or the node was rebooted. The directory may still exist."""
    SILENT = "silent"
    """Neither seen nor proven dead: the node does not respond."""


@dataclass(frozen=True)
class Observation:
    run: str
    attempt: int
    task: str
    incarnation: int
    presence: Presence
    proof: str = ""
    """The proof of death, for the evidence: `launcher 4711 is gone`, `the machine was restarted`."""
    node: str = "local"
    handle: Handle = field(default_factory=dict)
    address: str = ""
    """Where other tasks reach it; empty while it has no address."""
    node_ready: bool | None = None
    """Readiness of its node as the backend reports it; None: not reported."""
    cause: str = ""
    """With GONE: the cause, where the backend knows more than `lost` (a `spec.states.Cause`)."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the backend reported: reasons, messages, exit codes, the last events. Kept with the attempt."""
    waiting: str = ""
    """With ALIVE and no launcher yet: the reason in one line (`image cannot be pulled: ...`). Shown by `why`."""
    hopeless: str = ""
    """With `waiting`: the cause of the end if nothing changes within `patience` (`image`, `engine-error`)."""
    patience: float = 600.0
    """Seconds."""
    no_room: bool = False
    """With `waiting`: it waits for resources that others hold and may give back."""
    gpus: tuple[str, ...] = ()
    """Ids of its GPUs, where the engine assigns them itself."""


class Engine(Protocol):
    """Runs tasks somewhere. Every call is idempotent by attempt and valid after a server restart.

    Raises EngineUnavailable when the backend cannot be reached; never returns an empty answer instead.
    Called from one event loop only.
    """

    name: str

    def needs(self, job: Job) -> Needs:
        """The resources that one task of this job takes of a node. Pure."""
        ...

    def refuse(self, job: Job) -> None:
        """Raise Refused if this engine, with its current settings, does not run the job. Pure."""
        ...

    def surroundings(self, job: Job) -> Surroundings:
        """The environment that the bodies of this job find on this engine. Pure."""
        ...

    async def capacity(self) -> Sequence[Node]: ...

    async def submit(self, attempt: Attempt) -> Handle:
        """Declarative: these tasks, each at this incarnation, each with a launcher that waits for orders.
        A task whose launcher already ran at this incarnation is never started again."""
        ...

    async def observe(self) -> Sequence[Observation]:
        """Every task of this server that exists, whether or not the server knows it."""
        ...

    async def stop(self, handle: Handle, *, grace: timedelta, tasks: Sequence[str] = ()) -> None:
        """End launchers and all their processes, in any state. An absent attempt is success. Task directories stay
        until `remove`. `tasks`: only these; empty: all."""
        ...

    async def reach(self, handle: Handle, task: str) -> TaskDir:
        """The task directory, local or remote. It may not exist yet, or any more."""
        ...

    async def remove(self, handle: Handle) -> None:
        """Delete what is left of an ended attempt, including its directories. An absent attempt is success."""
        ...

    async def close(self) -> None:
        """Called when the server ends; tasks continue."""
        ...


@runtime_checkable
class Watches(Protocol):
    """An engine that reports changes by itself, so that the server need not wait for the next `observe`."""

    def changes(self) -> AsyncIterator[tuple[str, int, str]]:
        """(run, attempt, task) whose status, journal or presence may have changed. Keys may repeat or be missing."""
        ...


@runtime_checkable
class Drills(Protocol):
    """An engine that can inject faults into a task."""

    async def hurt(self, handle: Handle, task: str, how: str) -> str:
        """how: `process` (SIGKILL the training process) or `launcher` (SIGKILL the launcher). Returns what it did."""
        ...


@runtime_checkable
class SetsAside(Protocol):
    """An engine that can keep the files of an attempt for `ASIDE_FOR` when the rest of the attempt is removed."""

    def aside(self, handle: Handle) -> str:
        """Where the files will be. Pure."""
        ...

    async def set_aside(self, handle: Handle) -> None:
        """Called in place of `remove`. May be repeated."""
        ...


@runtime_checkable
class Resizes(Protocol):
    """An engine that can change the limits of a running task."""

    async def resize(self, handle: Handle, task: str, *, cpu: float | None, memory: int | None) -> str | None:
        """None: done in place. Otherwise the reason why not; the run then has to restart with the new size."""
        ...


@runtime_checkable
class Shows(Protocol):
    """An engine that lets people inspect the backend."""

    def manifest(self, attempt: Attempt) -> str | None:
        """What it would send: YAML without secrets, as `kubectl apply --dry-run=server` accepts it. None if nothing
        is sent. Pure."""
        ...

    async def check(self) -> Sequence[Mapping[str, Any]]:
        """Checks of the backend, one entry each: name, ok (True, False, or None: a warning), text, hint."""
        ...

    async def shell(self, handle: Handle, task: str) -> Mapping[str, Any]:
        """How a user on the server's machine opens a shell in an existing task: argv, and if needed env, cwd."""
        ...
