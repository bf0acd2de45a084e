"""Live runs and their tasks: the control loop's state in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.control.checkpoints.assembly import Assembly
from stoker.control.fleet import Wait
from stoker.control.ingest.ingester import Ingester
from stoker.control.ingest.redaction import NOTHING, Redaction
from stoker.control.policy.outcome import Outcome
from stoker.control.policy.task_phases import TABLE, TaskEvent, TaskPhase
from stoker.engine.base import Handle, Observation
from stoker.scheduling import Place
from stoker.spec import Job
from stoker.spec.roles import RoleTasks
from stoker.spec.run_transitions import TABLE as RUN_TABLE
from stoker.spec.run_transitions import RunEvent
from stoker.spec.states import RunState
from stoker.store.placement import TaskPlacement
from stoker.store.rows import AttemptRow, RunRow
from stoker.task.directory import TaskDir


@dataclass
class LiveTask:
    """One task of the current attempt: only its newest incarnation."""

    name: str
    part: RoleTasks
    index: int
    incarnation: int = 1
    generation: int = 1
    """Of its newest body, or of the next one if that is not started yet."""
    place: TaskPlacement = field(default_factory=TaskPlacement)
    """As recorded; changed in memory before it is recorded."""
    phase: TaskPhase = TaskPhase.PENDING
    """Changed by `happened` only."""
    folder: str = ""
    """What was last kept of its own working folder, as a tree; empty: not known."""
    directory: TaskDir | None = None
    """None: not reached yet."""
    ingester: Ingester | None = None
    verdict: Outcome | None = None
    """How its newest body ended; None while it runs or waits."""
    ended: float = 0.0
    """When its newest body ended, by the clock of its own machine."""
    stop_sent: str | None = None
    """What it was told to do: stop | kill. None: it was not told."""
    forced: bool = False
    """The engine was asked to end it, because it did not stop in time."""
    stop_deadline: float | None = None
    """Monotonic time after which the engine ends a launcher that did not stop."""
    killed_at: float | None = None
    """Monotonic time at which it was told to kill its processes."""
    telling: asyncio.Future[None] | None = None
    """The write of the order to stop; None: none was sent."""
    gone: str | None = None
    """Proof that its launcher is dead, or why it was given up."""
    given_up: bool = False
    """Gone without proof: it was silent for too long."""
    replaced_silent: bool = False
    """It replaces an incarnation that was given up."""
    hastened: float | None = None
    """Monotonic time at which the engine was asked to end a launcher that is closing."""
    seen: Observation | None = None
    """The engine's last observation of it."""
    missing: int = 0
    """Looks in a row in which the engine did not list it."""
    wait: Wait | None = None
    """Why it is not up yet."""
    unjournalled_since: float | None = None
    """Monotonic time since which the status says `ended` and the journal does not."""
    usage: dict[str, Any] = field(default_factory=dict)
    reported: str = ""
    """The phase in the task directory's status, as last recorded."""
    hung: dict[str, Any] = field(default_factory=dict)
    """What its launcher reported about its hang; empty: it does not hang."""
    touched: bool = True
    """Something may have changed in its directory."""

    def happened(self, event: TaskEvent, **facts: Any) -> None:
        self.phase = TABLE.after(self.phase, event, task=self.name, incarnation=self.incarnation, **facts)

    @property
    def over(self) -> bool:
        return self.verdict is not None

    @property
    def ordered(self) -> bool:
        """It has the order to run its generation."""
        return self.phase.ordered

    @property
    def joining(self) -> bool:
        """It will be a member from the next generation on."""
        return self.place.joining

    @property
    def leaving(self) -> bool:
        """It will not be a member of the next generation."""
        return self.place.leaving

    @property
    def stopped(self) -> bool:
        """Its body has ended. Its directory may not have been read to the end."""
        status = self.directory.status() if self.directory is not None else None
        return status is not None and (status.phase, status.generation) == ("ended", self.generation)

    @property
    def excused(self) -> bool:
        """It ended because it was told to stop, so its end is no failure. A task that was lost after it was told is not
        excused: other tasks may have failed because of the loss, which caused the order to stop."""
        lost = self.given_up or (
            not self.forced and (self.phase is TaskPhase.CLOSING or self.gone is not None)
        )
        return self.stop_sent is not None and not lost

    @property
    def had_order(self) -> bool:
        """The database has recorded an order for this incarnation: it may have run."""
        return self.place.ordered == self.incarnation

    @property
    def carrying(self) -> bool:
        """Checkpoints that it committed are still being transferred."""
        return self.ingester is not None and bool(self.ingester.untaken)

    @property
    def up(self) -> bool:
        return self.directory is not None and self.gone is None

    def lose(self, proof: str, *, given_up: bool = False) -> None:
        """Its launcher is gone (`proof`), or it is given up without proof."""
        self.gone, self.given_up = proof, given_up
        self.happened(TaskEvent.GONE)

    def judge(self, verdict: Outcome, at: float, event: TaskEvent) -> None:
        """Record in memory how its body ended."""
        self.verdict, self.ended = verdict, at
        self.stop_deadline = None
        self.happened(event, cause=verdict.cause)

    def again(self, generation: int, place: TaskPlacement) -> None:
        """Prepare for another body. If its launcher is gone: for another incarnation, in a new directory."""
        fresh = self.gone is not None
        self.happened(TaskEvent.REPLACED if fresh else TaskEvent.RENEWED, generation=generation)
        self.generation, self.place = generation, place
        self.forced = False
        self.hung = {}
        self.verdict = self.stop_sent = self.stop_deadline = self.killed_at = None
        self.unjournalled_since = self.hastened = None
        self.touched = True
        if self.ingester is not None:
            self.ingester.reader.generation = generation
        if fresh:
            self.incarnation += 1
            self.replaced_silent = self.given_up
            self.directory = self.ingester = self.telling = None
            self.gone = self.seen = self.wait = None
            self.given_up = False
            self.missing = 0
            self.reported = ""


@dataclass
class LiveRun:
    """A run that is not over. Owned by the loop's thread. `row` is as last recorded; its `desired` follows what users
    ask for."""

    row: RunRow
    job: Job
    parts: tuple[RoleTasks, ...]
    """Of the job, with what its framework adds."""
    attempt: AttemptRow | None = None
    tasks: dict[str, LiveTask] = field(default_factory=dict)
    """Of the current attempt, in the order of their ranks."""
    assembly: Assembly | None = None
    """Puts together the parts of its tasks' checkpoints. None: the run has one task, or no world has begun."""
    submitted: bool = False
    """The engine has been asked for the newest incarnation of every task."""
    first_up: float | None = None
    """Monotonic time at which the first task of a gang that is not complete was up."""
    let_go: int = 0
    """How often it gave back its places because its other tasks found no room."""
    closing: Outcome | None = None
    """How the attempt ends once all its tasks have ended."""
    reforming: Outcome | None = None
    """Why the world starts again once all its members have ended."""
    form_at: float = 0.0
    """Monotonic time before which the next generation does not start (backoff)."""
    regroup: bool = False
    """`reforming` is no failure: tasks join or leave."""
    waits_since: float | None = None
    """Monotonic time since which all joining tasks are up."""
    fresh_checkpoint: bool = False
    """A checkpoint was committed since `waits_since`."""
    left: dict[str, LiveTask] = field(default_factory=dict)
    """Released tasks, by name. Each keeps its place until the engine reports that it has ended."""
    preempt: bool = False
    progressed: bool = False
    """The current attempt committed a checkpoint since its last failure."""
    fruitless: int = 0
    """Failures in a row without a new checkpoint between them."""
    newest_order: int = 0
    """The highest generation in the orders of its tasks."""
    redaction: Redaction = NOTHING
    """Removes its secrets from what its tasks write; made when the attempt comes up."""
    lost_files: str = ""
    """The warning about lost files of tasks that was last recorded; empty: none."""
    hung: str | None = None
    """The recorded reason that its whole world hangs; None: it does not hang."""
    dirty: bool = False
    working: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

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
    def alone(self) -> bool:
        """It has one task in every attempt, and no world."""
        return len(self.parts) == 1 and self.parts[0].count == 1

    @property
    def launched(self) -> bool:
        """Every member was reached and has its order."""
        members = [task for task in self.tasks.values() if not task.joining]
        return bool(members) and all(task.ingester is not None for task in members)

    @property
    def places(self) -> tuple[Place, ...]:
        assert self.attempt is not None
        return places_of(self.attempt)

    @property
    def handle(self) -> Handle:
        assert self.attempt is not None
        return self.attempt.handle or {"run": self.attempt.run, "attempt": self.attempt.number}

    @property
    def usage(self) -> dict[str, Any]:
        """Of all tasks together."""
        return usage_of(task.usage for task in self.tasks.values())

    @property
    def wait(self) -> Wait | None:
        """Why it is not up yet: the wait of the first task that has one."""
        return next((task.wait for task in self.tasks.values() if task.wait is not None), None)

    @property
    def world_size(self) -> int:
        """The number of training processes."""
        found = self.tasks.values()
        return sum(task.part.job.processes or 1 for task in found if task.part.ends and not task.joining) or 1

    def due(self) -> float:
        """Seconds of backoff until it enters the queue. Bounded, so that a jump of the clock cannot hold it."""
        return min(max(0.0, self.row.not_before - time.time()), 600.0)

    def begin(self, attempt: AttemptRow) -> None:
        self.attempt = attempt
        self.submitted = self.preempt = self.progressed = self.regroup = self.fresh_checkpoint = False
        self.waits_since = self.assembly = None
        self.newest_order = 0
        self.lost_files = ""
        self.redaction = NOTHING
        self.left = {}
        self.closing = self.reforming = self.first_up = None
        self.form_at = 0.0
        self.tasks = tasks_of(self.parts, attempt)

    def tried(self, failed: bool) -> None:
        """A generation or attempt is over. `failed`: by the run's own fault."""
        self.fruitless = 0 if self.progressed else self.fruitless + failed
        self.progressed = False

    def outgoing(self, name: str) -> LiveTask | None:
        """The released task of this name, if it is not known to have ended."""
        task = self.left.get(name)
        return task if task is not None and task.gone is None else None

    def leave(self) -> None:
        self.attempt = None
        self.tasks, self.left = {}, {}

    def after(self, event: RunEvent) -> RunState:
        """The state that follows. The caller records it, then updates the row."""
        return RUN_TABLE.after(self.state, event, run=self.id, attempt=self.row.attempt)

    def update(self, **values: Any) -> None:
        self.row = replace(self.row, **values)


def tasks_of(parts: Iterable[RoleTasks], attempt: AttemptRow) -> dict[str, LiveTask]:
    """The tasks of an attempt as they were placed."""
    found = {}
    for part in parts:
        for index, name in enumerate(part.names):
            if (place := attempt.placement.get(name)) is not None:
                if place.ordered is None:
                    # Rows of earlier versions only have the handle: with it, all tasks had orders.
                    place = replace(place, ordered=place.incarnation if attempt.handle else 0)
                found[name] = LiveTask(
                    name=name,
                    part=part,
                    index=index,
                    incarnation=place.incarnation,
                    generation=place.generation,
                    place=place,
                    replaced_silent=place.given_up,
                )
    return found


def places_of(attempt: AttemptRow) -> tuple[Place, ...]:
    return tuple(Place(node=place.node or "", gpus=place.gpus) for place in attempt.placement.values())


def numbers_of(attempt: AttemptRow) -> list[int]:
    """The queue's numbers of its tasks, in the order of their places."""
    return [place.number for place in attempt.placement.values()]


def usage_of(usages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of the usage of several tasks, without steps; of one task: as it is."""
    total: dict[str, Any] = {}
    known = [dict(usage) for usage in usages]
    if len(known) == 1:
        return known[0]
    for usage in known:
        for key, value in usage.items():
            if key not in ("step", "step_seconds"):
                total[key] = total.get(key, 0) + value
    return total
