"""A server without HTTP for runs of several tasks: fake engine, real store and task directories."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.blobs import BlobStore
from stoker.control.controller import Controller
from stoker.engine.base import Node, Presence
from stoker.settings import ControlSettings, Home, Settings
from stoker.store import Store
from stoker.store.placement import TaskPlacement
from stoker.store.rows import RunRow
from stoker.task.formats import Order, TaskInfo
from stoker.task.local_directory import LocalTaskDir
from stoker.testing.fake_engine import Behaviour, FakeEngine
from support.control.rigs import Watched
from support.waiting import wait

LONG = Behaviour(hang=True)
FAIL = Behaviour(exit_code=3, lines=("ValueError: no",))
DIE = Behaviour(launcher_dies=True)
DONE = Behaviour()


class Gang(Watched):
    """`bodies`: the behaviour of each (task, generation); all others use `otherwise`."""

    def __init__(self, root: Path, *nodes: Node, **control: float) -> None:
        rhythms = {"poll": 0.05, "retry_backoff": 0.01, "retry_backoff_max": 0.05}
        rhythms |= {"grow_after": 0.05, "grow_patience": 0.1, **control}
        self.settings = Settings(Home(root / "home"), control=ControlSettings(fault_retries=3, **rhythms))
        self.settings.home.root.mkdir(parents=True, exist_ok=True)
        self.nodes = nodes or (Node("local", cpu=4, memory=8 << 30),)
        self.bodies: dict[tuple[str, int], Behaviour] = {}
        self.otherwise: Behaviour = DONE
        self.started: list[tuple[str, int, int]] = []
        self.blobs = BlobStore(self.settings.home.blobs)
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.settings.home.database)
        self.engine = FakeEngine(self.settings.home, self._script, nodes=self.nodes)
        self.controller = Controller(self.settings, self.store, self.blobs, self.engine)
        self.controller.start()

    def _script(self, info: TaskInfo, order: Order) -> Behaviour:
        started = (info.task, info.incarnation, order.generation)
        if started not in self.started:
            self.started.append(started)
        return self.bodies.get((info.task, order.generation), self.otherwise)

    def restart(self) -> None:
        self.close()
        self.open()

    def submit(self, **job: Any) -> RunRow:
        key = f"key-{time.monotonic_ns()}"
        row, _ = self.controller.submit(
            key=key, job={"run": ["train"], **job}, code=None, secrets={}, record={}, user="ada"
        )
        return row

    def end(self, run: str, until: Callable[[RunRow], bool] | None = None) -> RunRow:
        """Advance the time until the run has ended, or until the given condition holds."""

        def look() -> RunRow:
            self.engine.advance(1)
            return self.store.run(run)

        return wait(look, until or (lambda row: row.state in ("succeeded", "failed", "stopped")))

    def order(self, run: str, task: str) -> Order:
        """The newest order to run."""
        look = LocalTaskDir(str(self.settings.home.tasks / run / "1" / task)).order
        return wait(look, lambda found: found is not None and found.verb == "run")

    def workers(self, run: str) -> list[str]:
        """The current members of the world."""
        return sorted(name for name, place in self.placement(run).items() if not place.joining)

    def placement(self, run: str) -> Mapping[str, TaskPlacement]:
        return self.store.attempt(run, 1).placement if self.store.run(run).attempt else {}

    def generation(self, run: str) -> int:
        return self.store.attempt(run, 1).generation if self.store.run(run).attempt else 0

    def ended(self, run: str) -> bool:
        return self.store.run(run).state in ("succeeded", "failed", "stopped")

    def alive(self, run: str) -> list[str]:
        """The tasks whose launchers are alive."""
        seen = asyncio.run(self.engine.observe())
        return sorted(one.task for one in seen if one.run == run and one.presence is Presence.ALIVE)

    def said(self, run: str) -> str:
        return "\n".join(event.text for event in self.store.events(run))

    def kinds(self, run: str) -> list[str]:
        return [event.kind for event in self.store.events(run)]


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    made = Gang(tmp_path)
    yield made
    made.close()
