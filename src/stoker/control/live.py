"""A run that is not over, as the control loop holds it in memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.control.fleet import Wait
from stoker.control.pump import Pump
from stoker.engine.base import Handle, Observation
from stoker.scheduling import Place
from stoker.spec import Job
from stoker.spec.words import RunState
from stoker.store.rows import AttemptRow, RunRow

TASK = "worker-0"
"""The one task of an attempt until the distributed work gives it company."""


@dataclass
class LiveRun:
    """Owned by the loop's thread. `row` is the truth as last recorded; `desired` may be newer than the database's
    copy here only in the direction of what a person asked."""

    row: RunRow
    job: Job
    attempt: AttemptRow | None = None
    pump: Pump | None = None
    submitted: bool = False
    """The engine has been asked for its tasks."""
    launched: bool = False
    """Its directory was reached and it has its order."""
    gone: str | None = None
    """Proof that the current attempt's launcher is dead."""
    seen: Observation | None = None
    """How the engine last showed it."""
    wait: Wait | None = None
    """Why it is not up yet."""
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
    def engine(self) -> str:
        """Name of the engine that has the current attempt."""
        assert self.attempt is not None
        return self.attempt.engine

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
        self.submitted = self.launched = self.preempt = self.progressed = False
        self.gone = self.stop_sent = self.stop_deadline = self.unjournalled_since = None
        self.seen = self.wait = None
        self.missing = 0
        self.usage = {}
        self.phase = ""

    def update(self, **values: Any) -> None:
        self.row = replace(self.row, **values)
