"""A run that is not over, as the control loop holds it in memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.control.pump import Pump
from stoker.engine.base import Attempt, Handle, TaskPlan
from stoker.scheduling import Ask, Place, Request
from stoker.settings import Settings
from stoker.spec import Job
from stoker.spec.words import RunState
from stoker.store.rows import AttemptRow, RunRow

TASK = "worker-0"
"""The one task of an attempt until the distributed work gives it company."""

DEFAULT_CPU = 1.0
"""A run that names no CPU holds one place but is not limited to it: alone on a laptop it may use every core."""


@dataclass
class LiveRun:
    """Owned by the loop's thread. `row` is the truth as last recorded; `desired` may be newer than the database's
    copy here only in the direction of what a person asked."""

    row: RunRow
    job: Job
    attempt: AttemptRow | None = None
    pump: Pump | None = None
    launched: bool = False
    launching: bool = False
    gone: str | None = None
    """Proof that the current attempt's launcher is dead."""
    missing: int = 0
    """How many looks in a row the engine did not list the current attempt."""
    preempt: bool = False
    stop_sent: str | None = None
    """Which stop was ordered already: stop | kill."""
    stop_deadline: float | None = None
    """Monotonic time after which a launcher that did not stop is ended by the engine."""
    unjournalled_since: float | None = None
    """Monotonic time since when the status says `ended` and the journal does not."""
    progressed: bool = False
    """The current attempt left a new checkpoint."""
    dirty: bool = False
    working: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    phase: str = ""

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def state(self) -> RunState:
        return RunState(self.row.state)

    @property
    def ask(self) -> Ask:
        return ask_of(self.job)

    @property
    def request(self) -> Request:
        return Request(id=self.row.id, priority=self.row.priority, seq=self.row.seq, asks=(self.ask,))

    @property
    def places(self) -> tuple[Place, ...]:
        assert self.attempt is not None
        return tuple(Place(node=p["node"], gpus=tuple(p["gpus"])) for p in self.attempt.placement.values())

    @property
    def handle(self) -> Handle:
        assert self.attempt is not None
        return self.attempt.handle or {"run": self.attempt.run, "attempt": self.attempt.number}

    def due(self) -> float:
        """Seconds until backoff lets it into the queue. Bounded, so that a clock that jumped cannot hold it."""
        return min(max(0.0, self.row.not_before - time.time()), 600.0)

    def begin(self, attempt: AttemptRow) -> None:
        self.attempt = attempt
        self.pump = None
        self.launched = self.launching = self.preempt = self.progressed = False
        self.gone = self.stop_sent = self.stop_deadline = self.unjournalled_since = None
        self.missing = 0
        self.usage = {}
        self.phase = ""

    def update(self, **values: Any) -> None:
        self.row = replace(self.row, **values)


def ask_of(job: Job) -> Ask:
    resources = job.resources
    return Ask(
        cpu=DEFAULT_CPU if resources.cpu is None else resources.cpu,
        memory=resources.memory or 0,
        gpu=resources.gpu or 0,
    )


def plan_of(job: Job, place: Place, settings: Settings) -> TaskPlan:
    return TaskPlan(
        name=TASK,
        node=place.node,
        cpu=job.resources.cpu,
        memory=job.resources.memory,
        gpus=place.gpus,
        log_budget=settings.logs.budget,
        log_segment=settings.logs.segment,
    )


def attempt_of(live: LiveRun, settings: Settings) -> Attempt:
    assert live.attempt is not None
    tasks = tuple(plan_of(live.job, place, settings) for place in live.places)
    return Attempt(run=live.id, number=live.attempt.number, tasks=tasks)
