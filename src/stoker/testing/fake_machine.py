"""A machine that exists only on disk: launchers are simulated, their files are real.

A launcher's memory is in its files, so a machine loaded again from the same home continues.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.errors import Conflict
from stoker.settings import Home
from stoker.task import formats, layout
from stoker.task.local_directory import LocalTaskDir


@dataclass(frozen=True)
class Behaviour:
    """What a simulated body does. The default ends at once with exit code 0."""

    exit_code: int = 0
    steps: int = 0
    """Steps that it runs; 0: it has ended when the order is written."""
    hang: bool = False
    """Never ends by itself."""
    stubborn: bool = False
    """Ignores SIGTERM: a stop takes `stop_steps` more steps and ends by SIGKILL."""
    signal: int | None = None
    """Ends by this signal instead of an exit code."""
    kind: str = "exit"
    """Ending.kind, for `oom`, `setup`, `timeout`, `start-failed`, `disk`."""
    launcher_dies: bool = False
    """At its end the launcher and the body die, and no ending is written."""
    lines: tuple[str, ...] = ()
    """Lines that it prints, all at its start."""
    metrics: tuple[tuple[int, Mapping[str, float]], ...] = ()
    """(step, values) that it reports, all at its start."""
    message: str = ""


Script = Callable[[formats.TaskInfo, formats.Order], Behaviour]


def at_once(info: formats.TaskInfo, order: formats.Order) -> Behaviour:
    """The default script: every body succeeds at once."""
    return Behaviour()


@dataclass
class Simulated:
    """One simulated launcher."""

    place: TaskPlace
    path: Path
    info: formats.TaskInfo
    pid: int
    boot_id: str
    proof: str = ""
    """Proof of its death; empty while it lives."""
    phase: str = "ready"
    seq: int = 0
    generation: int = 0
    behaviour: Behaviour = field(default_factory=Behaviour)
    ends_at: int | None = None
    started_at: float | None = None
    stopping: bool = False
    terminated: bool = False
    """It was told from outside to end: it keeps its state and starts no body."""
    lines: int = 0
    log_bytes: int = 0
    ending: dict[str, Any] | None = None

    @property
    def alive(self) -> bool:
        return not self.proof

    @property
    def has_body(self) -> bool:
        return self.alive and self.phase in ("running", "stopping")


class FakeMachine:
    """Simulated launchers and their clock. `changed` is called for each task whose files or presence changed."""

    def __init__(
        self, home: Home, script: Script, stop_steps: int, changed: Callable[[Simulated], None]
    ) -> None:
        self.home = home
        self.script = script
        self.stop_steps = stop_steps
        self.tasks: dict[TaskPlace, Simulated] = {}
        self._running: set[TaskPlace] = set()
        self._changed = changed
        self._state = home.engine / "fake.json"
        self._load()

    @property
    def boot_id(self) -> str:
        return f"fake-boot-{self._boot}"

    def advance(self, steps: int) -> None:
        """Lets time pass: bodies whose steps are over end."""
        for _ in range(steps):
            self._clock += 1
            for place in sorted(self._running):
                task = self.tasks[place]
                if task.ends_at is not None and task.ends_at <= self._clock:
                    self._finish(task)
        self._save()

    def reboot(self) -> None:
        self._boot += 1
        self._save()
        for task in self.tasks.values():
            if task.alive:
                self.die(task, "the machine was restarted")

    def _load(self) -> None:
        self._clock, self._boot, self._pids = 0, 1, 1000
        if self._state.exists():
            state = json.loads(self._state.read_text())
            self._clock, self._boot, self._pids = state["clock"], state["boot"], state["pids"]
        for place, path in directories.scan(self.home.tasks):
            info, record = directories.read_info(path), _record_in(path)
            if info is None or record is None:
                continue  # a crash before its launcher started: the next submit continues from there
            self._pids = max(self._pids, record["pid"] + 1)
            self._adopt(Simulated(place, path, info, record["pid"], record["boot_id"]), record)

    def _save(self) -> None:
        state = {"clock": self._clock, "boot": self._boot, "pids": self._pids}
        self._state.parent.mkdir(parents=True, exist_ok=True)
        formats.write_json(str(self._state), state)

    def _adopt(self, task: Simulated, record: Mapping[str, Any]) -> None:
        """Rebuilds a launcher's memory from its files, then handles an order that it has not acted on yet."""
        self.tasks[task.place] = task
        directory = LocalTaskDir(str(task.path))
        status = directory.status()
        order = directory.order()
        if status is not None:
            task.phase, task.seq, task.generation = status.phase, status.seq, status.generation
            task.started_at, task.ending, task.log_bytes = status.started_at, status.ending, status.log_bytes
        task.stopping = task.phase == "stopping"
        task.proof = str(record.get("proof", ""))
        task.terminated = bool(record.get("terminated"))
        task.ends_at = record.get("ends_at")
        if order is not None and order.verb == "run":
            task.behaviour = self.script(task.info, order)
        if task.alive and task.boot_id != self.boot_id:
            self.die(task, "the machine was restarted")
        if task.has_body:
            self._running.add(task.place)
        self.ordered(task.place)

    def submit(self, attempt: Attempt, plan: TaskPlan) -> None:
        place = TaskPlace(attempt.run, attempt.number, plan.name)
        path = directories.path_of(self.home.tasks, place)
        known = self.tasks.get(place)
        if known is not None and known.info.incarnation >= plan.incarnation:
            if known.alive and not path.is_dir():
                self.die(known, "its task directory was deleted")
            return
        if plan.started:
            self.tasks[place] = Simulated(place, path, attempt.info(plan), self._pids, self.boot_id)
            self.tasks[place].proof = "nothing is left of it"
            return
        if known is not None:
            if known.alive and not plan.given_up:
                raise Conflict(
                    f"{plan.name} of {place.run} still lives at incarnation {known.info.incarnation}"
                )
            if known.alive:
                self.die(known, "its place was given to another one")
            directories.archive(path, known.info.incarnation)
        info = attempt.info(plan)
        directories.create(path, info)
        task = Simulated(place, path, info, self._pids, self.boot_id)
        self._pids += 2
        self.tasks[place] = task
        self._record(task)
        self._publish(task)

    # -- the simulated launcher ------------------------------------------------------------------------------

    def ordered(self, place: TaskPlace) -> None:
        task = self.tasks.get(place)
        if task is None or not task.alive:
            return
        order = LocalTaskDir(str(task.path)).order()
        if order is None or order.seq <= task.seq:
            return
        task.seq, task.generation = order.seq, order.generation
        if order.verb == "run" and not task.has_body:
            self._start(task, order)
        elif order.verb == "stop":
            self._stop_body(task, order)
        elif order.verb == "release":
            self.end_body(task, ended(task, "stopped", signal_number=signal.SIGTERM))
            self.die(task, f"launcher {task.pid} is gone")

    def _start(self, task: Simulated, order: formats.Order) -> None:
        task.stopping, task.ending, task.started_at = False, None, time.time()
        if task.terminated:
            task.phase = "running"
            self.end_body(task, replace(ended(task, "stopped"), final=True))
            return
        task.behaviour = self.script(task.info, order)
        self._journal(task, {"k": "starting"})
        if task.behaviour.kind in ("start-failed", "setup"):
            task.phase = "running"
            self.end_body(task, ended(task, task.behaviour.kind, code=task.behaviour.exit_code or 1))
            return
        self._journal(task, {"k": "started", "pid": task.pid + 1})
        self._print(task)
        task.ends_at = None if task.behaviour.hang else self._clock + task.behaviour.steps
        task.phase = "running"
        self._running.add(task.place)
        self._record(task)
        if task.ends_at == self._clock:
            self._finish(task)
        else:
            self._publish(task)

    def _stop_body(self, task: Simulated, order: formats.Order) -> None:
        if not task.has_body:
            self._publish(task)
            return
        if task.behaviour.stubborn and not order.kill:
            task.phase, task.stopping, task.ends_at = "stopping", True, self._clock + self.stop_steps
            self._record(task)
            self._publish(task)
            return
        number = signal.SIGKILL if order.kill else signal.SIGTERM
        self.end_body(task, ended(task, "stopped", signal_number=number))

    def _finish(self, task: Simulated) -> None:
        """Ends a body whose time is over."""
        behaviour = task.behaviour
        if task.stopping:
            self.end_body(task, ended(task, "stopped", signal_number=signal.SIGKILL))
        elif behaviour.launcher_dies:
            self.die(task, f"launcher {task.pid} is gone")
        elif behaviour.signal is not None:
            self.end_body(task, ended(task, "signal", signal_number=behaviour.signal))
        else:
            self.end_body(task, ended(task, behaviour.kind, code=behaviour.exit_code))

    def end_body(self, task: Simulated, ending: formats.Ending) -> None:
        if not task.has_body:
            return
        self._running.discard(task.place)
        task.phase, task.ending = "ended", ending.to_json()
        self._journal(task, {"k": "ended", **task.ending})
        self._publish(task)

    def terminate(self, task: Simulated) -> None:
        task.terminated = True
        self._record(task)
        ending = ended(task, "stopped", signal_number=signal.SIGTERM)
        self.end_body(task, replace(ending, final=True))

    def die(self, task: Simulated, proof: str) -> None:
        task.proof = proof
        self._running.discard(task.place)
        self._record(task)
        self._changed(task)

    # -- its files -------------------------------------------------------------------------------------------

    def _record(self, task: Simulated) -> None:
        record = {"boot_id": task.boot_id, "pid": task.pid, "start_time": task.pid, "ends_at": task.ends_at}
        if task.proof:
            record["proof"] = task.proof
        if task.terminated:
            record["terminated"] = True
        if task.path.is_dir():
            formats.write_json(str(task.path / layout.ENGINE), record)

    def _publish(self, task: Simulated) -> None:
        status = formats.Status(
            phase=task.phase,
            seq=task.seq,
            generation=task.generation,
            pid=task.pid + 1 if task.has_body else None,
            started_at=task.started_at,
            ending=task.ending,
            log_bytes=task.log_bytes,
            launcher_pid=task.pid,
            boot_id=task.boot_id,
        )
        formats.write_json(str(task.path / layout.STATUS), status.to_json())
        self._changed(task)

    def _journal(self, task: Simulated, entry: dict[str, Any]) -> None:
        entry = {"k": "", "seq": task.seq, "generation": task.generation, "at": time.time(), **entry}
        _append(task.path / layout.JOURNAL, [entry])

    def _print(self, task: Simulated) -> None:
        now = time.time()
        if task.behaviour.lines:
            frames = [formats.LogLine("o", int(now * 1000), line.encode()) for line in task.behaviour.lines]
            data = b"".join(frame.encode() for frame in frames)
            with open(task.path / layout.segment(0), "ab") as file:
                file.write(data)
            task.log_bytes += len(data)
        if task.behaviour.metrics:
            entries = [{"step": step, "t": now, "v": dict(values)} for step, values in task.behaviour.metrics]
            _append(task.path / layout.METRICS / f"{task.generation}-{task.pid + 1}.jsonl", entries)


def ended(
    task: Simulated, kind: str, *, code: int | None = None, signal_number: int | None = None
) -> formats.Ending:
    return formats.Ending(
        seq=task.seq,
        generation=task.generation,
        kind=kind,
        code=code,
        signal=None if signal_number is None else int(signal_number),
        message=task.behaviour.message,
        limit=task.info.memory if kind == "oom" else None,
        peak=task.info.memory if kind == "oom" else None,
        at=time.time(),
        last_lines=list(task.behaviour.lines[-5:]),
    )


def _record_in(path: Path) -> dict[str, Any] | None:
    """The record of a simulated launcher, which is trusted."""
    raw = LocalTaskDir(str(path)).read(layout.ENGINE)
    return json.loads(raw) if raw else None


def _append(path: Path, entries: list[dict[str, Any]]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        for entry in entries:
            formats.append_line(fd, entry)
    finally:
        os.close(fd)
