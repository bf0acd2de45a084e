"""The whole controller on the fake engine, with a clock that the test drives: no sleeping, no polling.

Everything runs in the thread of the test. Work for other threads is done at once, and the clock stands
still while there is work. `settle` runs until nothing is left to do at this time, `advance` moves the clock
from timer to timer.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import json
import os
import selectors
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stoker.blobs import BlobStore
from stoker.control.controller import Controller
from stoker.control.loop import ControlLoop
from stoker.control.state import LiveRun, LiveTask
from stoker.engine.base import Node
from stoker.settings import ControlSettings, Home, Settings
from stoker.spec.run_transitions import TABLE
from stoker.spec.states import RunState
from stoker.store import Store
from stoker.store.rows import AttemptRow, Change, EventRow, RunRow
from stoker.task import layout
from stoker.task.formats import Order, StagedCheckpoint, TaskInfo
from stoker.task.local_directory import LocalTaskDir
from stoker.testing.fake_engine import Behaviour, FakeEngine
from stoker.testing.fake_machine import Simulated

T = TypeVar("T")

LONG = Behaviour(hang=True)
STUBBORN = Behaviour(hang=True, stubborn=True)
FAIL = Behaviour(exit_code=3, lines=("ValueError: no",))
DONE = Behaviour()
DIE = Behaviour(launcher_dies=True)
NODE = Node("local", cpu=4, memory=8 << 30)
RECORD: dict[str, Any] = {"packages": {}}
"""No inspection of the Python of a run."""
MEMORY = Path("/dev/shm")
"""A transaction there need not wait for a disk."""


class Clock:
    """Replaces `time.monotonic` and `time.time` until `undo`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._epoch = time.time() - self.now
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(time, "monotonic", lambda: self.now)
        self._patch.setattr(time, "time", lambda: self._epoch + self.now)
        self._patch.setattr(ThreadPoolExecutor, "submit", _at_once)

    def undo(self) -> None:
        self._patch.undo()


def _at_once(pool: Any, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
    """In place of `ThreadPoolExecutor.submit`."""
    if pool._shutdown:
        raise RuntimeError("cannot schedule new futures after shutdown")
    future: Future[T] = Future()
    try:
        future.set_result(work(*args, **kwargs))
    except BaseException as exc:
        future.set_exception(exc)
    return future


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Reports when an event loop would wait."""

    idle: Callable[[], None] = staticmethod(lambda: None)

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout != 0:
            self.idle()
        return ready


class DrivenLoop(asyncio.SelectorEventLoop):
    """An event loop that stops instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        selector = _Selector()
        super().__init__(selector)
        selector.idle = self.stop

    def time(self) -> float:
        return self._clock.now

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def settle(self) -> None:
        """Run until there is nothing more to do at this time."""
        self.run_forever()

    def turn(self, count: int) -> None:
        """Run at most so many turns."""
        for _ in range(count):
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        until = self._clock.now + seconds
        self.settle()
        while (due := self.next_timer()) is not None and due <= until:
            self._clock.now = max(self._clock.now, due)
            self.settle()
        self._clock.now = until

    def next_timer(self) -> float | None:
        while self._timers and (self._timers[0][2].cancelled() or self._timers[0][0] <= self._clock.now):
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None


class Driven:
    """A server without HTTP and without threads. `bodies`: the behaviour of each (task, generation); all
    others use `otherwise`. Every body that starts is recorded."""

    def __init__(self, root: Path, *nodes: Node, **control: float) -> None:
        self.clock = Clock()
        rhythms = {
            "poll": 2.0,
            "retry_backoff": 1.0,
            "retry_backoff_max": 8.0,
            "backup_every": 1e9,
            **control,
        }
        self.settings = Settings(Home(root / "home"), control=ControlSettings(fault_retries=3, **rhythms))
        self.settings.home.root.mkdir(parents=True, exist_ok=True)
        self.nodes: Sequence[Node] = nodes or (NODE,)
        self.bodies: dict[tuple[str, int], Behaviour] = {}
        self.otherwise: Behaviour = LONG
        self.started: list[tuple[str, int, str, int]] = []
        """(run, attempt, task, generation) of every body."""
        self.wrong: list[str] = []
        """Violations: states out of order, errors that the loop survives."""
        self._chosen: dict[tuple[str, int, str, int, int], Behaviour] = {}
        self.states: dict[str, list[RunState]] = {}
        """The recorded states by run."""
        self._keys = itertools.count()
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.settings.home.database)
        self._record()
        self.blobs = BlobStore(self.settings.home.blobs)
        self.engine = FakeEngine(self.settings.home, self._script, nodes=self.nodes)
        self._write_down_bodies()
        self.event_loop = DrivenLoop(self.clock)
        self.controller = Controller(self.settings, self.store, self.blobs, self.engine)
        self.loop: ControlLoop = self.controller._loop
        self.loop.ask = self._ask  # type: ignore[method-assign]
        self._main = self.event_loop.create_task(self.loop._main())
        self.settle()

    def close(self) -> None:
        if self.event_loop.is_closed():
            return
        try:
            self.halt()
        finally:
            self.clock.undo()

    def halt(self) -> None:
        """Stop the server where it is."""
        self._main.cancel()
        self.settle()
        assert self._main.done(), "the session does not end"
        self.loop.context.packages.shutdown()
        self.loop.context.ports.close()
        self.store.close()
        self.event_loop.close()

    def restart(self, *, after: float = 0.0) -> None:
        self.halt()
        self.clock.now += after
        self.open()

    # -- time ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.event_loop.settle()

    def turn(self, count: int) -> None:
        self.event_loop.turn(count)

    def advance(self, seconds: float) -> None:
        self.event_loop.advance(seconds)

    def steps(self, count: int = 1) -> None:
        """Let the bodies proceed."""
        self.engine.advance(count)
        self.settle()

    def until(self, good: Callable[[], object], limit: float = 600.0) -> None:
        """Move the clock from timer to timer until a condition holds."""
        self.settle()
        end = self.clock.now + limit
        while not good():
            due = self.event_loop.next_timer()
            assert due is not None and due <= end, "the condition never held"
            self.advance(due - self.clock.now)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, to its end."""
        task = self.event_loop.create_task(work)
        self.until(task.done)
        return task.result()

    def _ask(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float = 30.0) -> T:
        return self.do(work())

    # -- runs ------------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        code: str | None = None,
        secrets: Mapping[str, str] | None = None,
        shell_secrets: Sequence[str] = (),
        settle: bool = True,
        **job: Any,
    ) -> str:
        wanted = {
            "run": ["train"],
            "name": "digits",
            "secrets": sorted({*(secrets or ())} - {*shell_secrets}),
            **job,
        }
        row, _ = self.controller.submit(
            key=f"key-{next(self._keys)}",
            job=wanted,
            code=code,
            secrets=secrets or {},
            record={**RECORD, **({"secrets": list(shell_secrets)} if shell_secrets else {})},
            user="ada",
        )
        if settle:
            self.settle()
        return row.id

    def stop(self, run: str, *, kill: bool = False) -> None:
        self.controller.stop_run(run, kill=kill, by="ada")
        self.settle()

    def resume(self, run: str, **more: Any) -> None:
        self.controller.resume(run, key=f"key-{next(self._keys)}", secrets={}, changes=[], **more)
        self.settle()

    def row(self, run: str) -> RunRow:
        return self.store.run(run)

    def state(self, run: str) -> RunState:
        return RunState(self.row(run).state)

    def attempt(self, run: str) -> AttemptRow:
        return self.store.attempt(run, self.row(run).attempt)

    def live(self, run: str) -> LiveRun:
        return self.loop.context.runs[run]

    def task(self, run: str, name: str = "worker-0") -> LiveTask:
        return self.live(run).tasks[name]

    def directory(self, run: str, task: str = "worker-0", attempt: int = 0) -> Path:
        """The directory of the run's task in its newest attempt."""
        return self.settings.home.tasks / run / str(attempt or self.row(run).attempt) / task

    def order(self, run: str, task: str = "worker-0") -> Order:
        found = LocalTaskDir(str(self.directory(run, task))).order()
        assert found is not None
        return found

    def kick(self, run: str) -> None:
        """Send the run a wake-up."""
        self.loop.kick(self.live(run))
        self.settle()

    def events(self, run: str, *kinds: str) -> list[EventRow]:
        return [event for event in self.store.events(run) if not kinds or event.kind in kinds]

    def said(self, run: str) -> str:
        return "\n".join(event.text for event in self.store.events(run))

    def kill_launcher(self, run: str, task: str = "worker-0") -> None:
        """Kill a launcher, and let the loop observe it."""
        self.engine.kill_launcher(run, self.row(run).attempt, task)
        self.look()

    def look(self) -> None:
        """Observe the engine now."""
        self.loop.observe_soon()
        self.settle()

    # -- records ---------------------------------------------------------------------------------------------

    def _script(self, info: TaskInfo, order: Order) -> Behaviour:
        key = (info.run, info.attempt, info.task, info.incarnation, order.generation)
        return self._chosen.setdefault(key, self.bodies.get((info.task, order.generation), self.otherwise))

    def _write_down_bodies(self) -> None:
        write = self.engine._machine._journal

        def written(task: Simulated, entry: dict[str, Any]) -> None:
            if entry["k"] == "starting":
                self.started.append((task.place.run, task.place.attempt, task.place.task, task.generation))
            write(task, entry)

        self.engine._machine._journal = written  # type: ignore[method-assign]

    def starts(self, run: str, attempt: int, task: str) -> list[tuple[int, int]]:
        return self.engine.starts(run, attempt, task)

    def _record(self) -> None:
        """Check each recorded state of a run against the table of transitions."""
        apply, steps = self.store.apply, {(one.before, one.after) for one in TABLE.transitions}

        def recorded(changes: Sequence[Change]) -> None:
            apply(changes)
            for change in changes:
                state = getattr(change, "values", {}).get("state")
                run = getattr(change, "id", None)
                if state is None or run is None:
                    continue
                known = self.states.setdefault(run, [RunState.QUEUED])
                if RunState(state) is not known[-1]:
                    if (known[-1], RunState(state)) not in steps:
                        self.wrong.append(f"{run}: {known[-1]} to {state}")
                    known.append(RunState(state))

        resume = self.store.resume

        def resumed(run: str, **more: Any) -> tuple[RunRow, bool]:
            row, created = resume(run, **more)
            if created:
                self.states[run].append(RunState(row.state))
            return row, created

        self.store.apply = recorded  # type: ignore[method-assign]
        self.store.resume = resumed  # type: ignore[method-assign]


@contextmanager
def driven(*nodes: Node, **control: float) -> Iterator[Driven]:
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as root:
        made = Driven(Path(root), *nodes, **control)
        try:
            yield made
        finally:
            made.close()
        assert made.wrong == []
        assert len(made.started) == len(set(made.started)), "a body started twice"


def stage(
    directory: Path,
    number: int,
    name: str,
    *,
    step: int | None,
    file: str = "",
    generation: int = 1,
    data: bytes = b"w",
) -> None:
    """A committed and staged checkpoint of one file, which has the checkpoint's name unless it is given."""
    place = directory / layout.staged(number)
    place.mkdir(parents=True)
    (place / (file or name)).write_bytes(data)
    entry = {
        "path": file or name,
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "mode": 0o644,
    }
    staged = StagedCheckpoint(
        number=number,
        generation=generation,
        name=name,
        how="sdk",
        files=[entry],
        step=step,
        at=50.0,
        written_at=50.0,
    )
    journal(directory, {"k": "checkpoint", **staged.to_json()})


def journal(directory: Path, entry: dict[str, Any]) -> None:
    with open(directory / layout.JOURNAL, "a") as file:
        file.write(json.dumps(entry) + "\n")


def scanned(directory: Path, scans: int) -> None:
    """The task's launcher has finished so many scans."""
    path = directory / layout.STATUS
    path.write_text(json.dumps({**json.loads(path.read_text()), "scans": scans}))
