"""An engine without processes: real task directories, simulated launchers.

Everything the server sees is as with real launchers (task.json, order.json, journal, status, log, engine.json), so the
control loop runs against it unchanged; only no process is started. A thousand running tasks cost a dictionary entry
each. Time is counted in steps that the test takes (`advance`), so nothing sleeps.

The launchers' memory is on disk: a new `FakeEngine` on the same home is the same machine for a restarted server.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from stoker.engine.base import Attempt, Handle, Needs, Node, Observation, Presence, Surroundings
from stoker.engine.change_feed import ChangeFeed
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.errors import Conflict, EngineError, EngineUnavailable, NotFound
from stoker.launcher.recovery import collect
from stoker.settings import Home
from stoker.spec import Job, refuse_unsupported
from stoker.task import formats, layout
from stoker.task.local_directory import LocalTaskDir
from stoker.testing.fake_machine import Behaviour, FakeMachine, Script, Simulated, at_once, ended

__all__ = ["Behaviour", "FakeEngine", "FakeTaskDir", "Script", "at_once"]


class FakeTaskDir(LocalTaskDir):
    """A task directory with a simulated launcher, which acts on an order as soon as it is written."""

    def __init__(
        self, root: str, ordered: Callable[[], None], arrived: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(root, collect)
        self._ordered = ordered
        self._arrived = arrived

    def exists(self) -> bool:
        return self._arrived() and super().exists()

    def write_order(self, order: formats.Order) -> None:
        # Without fsync: there is no power cut, and a benchmark of a thousand tasks must not wait for disks.
        formats.write_json(f"{self.root}/{layout.ORDER}", order.to_json(), mode=0o600)
        self._ordered()


class FakeEngine:
    """Implements Engine, Watches and Drills for tests and benchmarks.

    `script` decides what each body does. It must give the same answer for the same order, because it is called again
    after a restart. `before` and `after` are called with the name of each engine method and its first argument. What
    they raise comes out of that call, before or after it took effect (an answer that was lost). Use it from one event
    loop; `advance`, `kill_launcher` and the like are plain calls.
    """

    def __init__(
        self,
        home: Home,
        script: Script = at_once,
        *,
        name: str = "fake",
        nodes: Sequence[Node] | None = None,
        stop_steps: int = 1,
    ) -> None:
        self.name = name
        self.home = home
        self.nodes: list[Node] = list(nodes or [Node("local", cpu=8, memory=32 << 30)])
        self.unavailable = False
        """While True every call raises EngineUnavailable."""
        self.silent: set[tuple[str, int, str]] = set()
        """Tasks that are neither seen nor proven dead."""
        self.waiting: tuple[str, str, float] | None = None
        """(why, hopeless cause, patience): while set, submitted tasks do not come up."""
        self.node_ready: bool | None = None
        """Readiness of the nodes of silent tasks."""
        self.on_nodes: dict[tuple[str, int, str], str] = {}
        """Task -> its node."""
        self.resize_problem = ""
        """Why a task cannot be resized in place; empty: it can."""
        self.before: Callable[[str, Any], None] = _nothing
        self.after: Callable[[str, Any], None] = _nothing
        self.calls: dict[str, int] = {}
        self._lock = threading.RLock()
        self._listeners: set[ChangeFeed] = set()
        self._machine = FakeMachine(home, script, stop_steps, self._changed)
        self.nodes = [replace(node, boot_id=self._machine.boot_id) for node in self.nodes]

    # -- Engine ----------------------------------------------------------------------------------------------

    def needs(self, job: Job) -> Needs:
        resources = job.resources
        cpu = 1.0 if resources.cpu is None else resources.cpu
        tags = frozenset({self.name}) if any(node.tags for node in self.nodes) else frozenset[str]()
        return Needs(cpu, resources.memory or 0, resources.gpu or 0, tags)

    def refuse(self, job: Job) -> None:
        if self.name in ("fake", "local"):
            refuse_unsupported(job, "local")

    def surroundings(self, job: Job) -> Surroundings:
        return Surroundings(here=self.name == "local" and job.image is None)

    async def capacity(self) -> Sequence[Node]:
        with self._call("capacity", None):
            return list(self.nodes)

    async def submit(self, attempt: Attempt) -> Handle:
        with self._call("submit", attempt):
            for plan in attempt.tasks:
                self.on_nodes[attempt.run, attempt.number, plan.name] = plan.node
                self._machine.submit(attempt, plan)
            return {"engine": self.name, "run": attempt.run, "attempt": attempt.number}

    async def observe(self) -> Sequence[Observation]:
        with self._call("observe", None):
            return [self._observation(task) for task in self._machine.tasks.values()]

    async def stop(self, handle: Handle, *, grace: timedelta, tasks: Sequence[str] = ()) -> None:
        with self._call("stop", handle):
            for task in self._of(handle):
                if not task.alive or (tasks and task.place.task not in tasks):
                    continue
                if grace > timedelta(0):
                    self._machine.end_body(task, ended(task, "stopped", signal_number=signal.SIGTERM))
                self._machine.die(task, f"launcher {task.pid} is gone")

    async def reach(self, handle: Handle, task: str) -> LocalTaskDir:
        with self._call("reach", handle):
            place = TaskPlace(str(handle["run"]), int(handle["attempt"]), task)
            path = directories.path_of(self.home.tasks, place)
            return FakeTaskDir(str(path), lambda: self._ordered(place), lambda: self.waiting is None)

    async def remove(self, handle: Handle) -> None:
        with self._call("remove", handle):
            tasks = self._of(handle)
            if alive := [task.place.task for task in tasks if task.alive]:
                raise Conflict(f"{handle['run']} attempt {handle['attempt']} still has {', '.join(alive)}")
            for task in tasks:
                del self._machine.tasks[task.place]
            attempt = self.home.tasks / str(handle["run"]) / str(int(handle["attempt"]))
            directories.remove_tree(attempt)
            directories.remove_empty(attempt.parent)

    async def close(self) -> None:
        """Stop the server; the machine keeps running."""
        for listener in self._listeners:
            listener.close()

    # -- Watches, Drills -------------------------------------------------------------------------------------

    async def changes(self) -> AsyncIterator[tuple[str, int, str]]:
        hints = ChangeFeed()
        self._listeners.add(hints)
        try:
            async for key in hints:
                yield key
        finally:
            self._listeners.discard(hints)

    async def hurt(self, handle: Handle, task: str, how: str) -> str:
        with self._call("hurt", handle):
            place = TaskPlace(str(handle["run"]), int(handle["attempt"]), task)
            found = self._machine.tasks.get(place)
            if found is None or not found.alive:
                raise NotFound(f"{task} of {place.run} is not running")
            if how == "launcher":
                self.kill_launcher(*place.key())
                return f"killed launcher {found.pid}"
            if how != "process":
                raise EngineError(f"cannot inject the fault {how!r}", hint="Choices: process, launcher.")
            if not found.has_body:
                raise NotFound(f"{task} of {place.run} has no training process")
            self._machine.end_body(found, ended(found, "signal", signal_number=signal.SIGKILL))
            return f"killed process {found.pid + 1}"

    async def resize(self, handle: Handle, task: str, *, cpu: float | None, memory: int | None) -> str | None:
        with self._call("resize", (cpu, memory)):
            return self.resize_problem or None

    # -- controls --------------------------------------------------------------------------------------------

    def advance(self, steps: int = 1) -> None:
        """Lets time pass: bodies whose steps are over end."""
        with self._lock:
            self._machine.advance(steps)

    def kill_launcher(self, run: str, attempt: int, task: str) -> None:
        """SIGKILL of a launcher: its body dies too, and nothing is written."""
        with self._lock:
            found = self._machine.tasks[TaskPlace(run, attempt, task)]
            self._machine.die(found, f"launcher {found.pid} is gone")

    def terminate_launcher(self, run: str, attempt: int, task: str) -> None:
        """SIGTERM of a launcher, as when its pod is deleted: the body is stopped, and none is started any more."""
        with self._lock:
            self._machine.terminate(self._machine.tasks[TaskPlace(run, attempt, task)])

    def notice(self, run: str, attempt: int, task: str) -> None:
        """Announce that a test wrote into the task's directory."""
        with self._lock:
            self._changed(self._machine.tasks[TaskPlace(run, attempt, task)])

    def reboot(self) -> None:
        """Restarts the machine: everything is gone, and the boot id is new."""
        with self._lock:
            self._machine.reboot()
            self.nodes = [replace(node, boot_id=self._machine.boot_id) for node in self.nodes]

    def set_gpu(self, gpu: str, *, healthy: bool, reason: str = "") -> None:
        for number, node in enumerate(self.nodes):
            gpus = tuple(replace(g, healthy=healthy, reason=reason) if g.id == gpu else g for g in node.gpus)
            self.nodes[number] = replace(node, gpus=gpus)

    def starts(self, run: str, attempt: int, task: str) -> list[tuple[int, int]]:
        """(seq, generation) of every body started there, from the journal."""
        path = directories.path_of(self.home.tasks, TaskPlace(run, attempt, task))
        entries, _ = LocalTaskDir(str(path)).journal()
        return [(entry["seq"], entry["generation"]) for entry in entries if entry.get("k") == "starting"]

    # -- internals -------------------------------------------------------------------------------------------

    def _call(self, method: str, argument: Any) -> _Call:
        return _Call(self, method, argument)

    def _ordered(self, place: TaskPlace) -> None:
        with self._lock:
            self._machine.ordered(place)

    def _changed(self, task: Simulated) -> None:
        for listener in list(self._listeners):
            listener.put(task.place.key())

    def _of(self, handle: Handle) -> list[Simulated]:
        run, attempt = str(handle["run"]), int(handle["attempt"])
        return [
            task
            for place, task in self._machine.tasks.items()
            if place.run == run and place.attempt == attempt
        ]

    def _observation(self, task: Simulated) -> Observation:
        presence = Presence.ALIVE if task.alive else Presence.GONE
        if task.place.key() in self.silent:
            presence = Presence.SILENT
        waiting, hopeless, patience = self.waiting or ("", "", 600.0)
        return Observation(
            node=self.on_nodes.get(task.place.key(), ""),
            node_ready=self.node_ready,
            waiting=waiting,
            hopeless=hopeless,
            patience=patience,
            run=task.place.run,
            attempt=task.place.attempt,
            task=task.place.task,
            incarnation=task.info.incarnation,
            presence=presence,
            proof=task.proof if presence is Presence.GONE else "",
            handle={"engine": self.name, "run": task.place.run, "attempt": task.place.attempt},
        )


class _Call:
    """Wraps every engine method: counts it, and lets tests make it fail before or after it took effect."""

    def __init__(self, engine: FakeEngine, method: str, argument: Any) -> None:
        self._engine, self._method, self._argument = engine, method, argument

    def __enter__(self) -> None:
        calls = self._engine.calls
        calls[self._method] = calls.get(self._method, 0) + 1
        if self._engine.unavailable:
            raise EngineUnavailable("the fake engine does not answer")
        self._engine.before(self._method, self._argument)
        self._engine._lock.acquire()

    def __exit__(self, kind: object, *_: object) -> None:
        self._engine._lock.release()
        if kind is None:
            self._engine.after(self._method, self._argument)


def _nothing(method: str, argument: Any) -> None:
    """No fault."""
