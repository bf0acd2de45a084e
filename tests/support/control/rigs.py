"""Shared by the rigs of the control loop: a server without HTTP, asserted on through its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.blobs import BlobStore
from stoker.control.controller import Controller
from stoker.engine.base import Node
from stoker.settings import ControlSettings, Home, Settings
from stoker.store import Store
from stoker.store.rows import RunRow
from stoker.task.formats import Order, TaskInfo
from stoker.testing.fake_engine import Behaviour, FakeEngine, Script
from support.waiting import wait

ENDED = ("succeeded", "failed", "stopped")


class Watched:
    store: Store
    controller: Controller

    def close(self) -> None:
        self.controller.shutdown()
        self.store.close()

    def until(self, run: str, *states: str) -> RunRow:
        return wait(lambda: self.store.run(run), lambda row: row.state in states)

    def ended(self, run: str) -> RunRow:
        return self.until(run, *ENDED)


class Rig(Watched):
    """A server without HTTP. `restart` is a server that was killed and started again."""

    def __init__(self, root: Path, script: Script, nodes: list[Node]) -> None:
        control = ControlSettings(poll=0.05, retry_backoff=0.01, retry_backoff_max=0.05, fault_retries=3)
        self.settings = Settings(Home(root / "home"), control=control)
        self.settings.home.root.mkdir(parents=True, exist_ok=True)
        self.script, self.nodes = script, nodes
        self.store = Store.open(self.settings.home.database)
        self.blobs = BlobStore(self.settings.home.blobs)
        self.engine = FakeEngine(self.settings.home, script, nodes=nodes)
        self.controller = Controller(self.settings, self.store, self.blobs, self.engine)
        self.controller.start()
        self._keys = 0

    def restart(self, *, closed: bool = False) -> None:
        if not closed:
            self.close()
        self.store = Store.open(self.settings.home.database)
        self.engine = FakeEngine(self.settings.home, self.script, nodes=self.nodes)
        self.controller = Controller(self.settings, self.store, self.blobs, self.engine)
        self.controller.start()

    def submit(self, run: str | list[str] = "train", *, key: str | None = None, **job: Any) -> RunRow:
        self._keys += 1
        row, _ = self.controller.submit(
            key=key or f"key-{self._keys}",
            job={"run": [run] if isinstance(run, str) else run, **job},
            code=None,
            secrets={},
            record={},
            user="ada",
        )
        return row


def scripted(info: TaskInfo, order: Order) -> Behaviour:
    """The command's first word selects the body's behaviour; later words select those of later attempts."""
    words = order.argv[min(info.attempt, len(order.argv)) - 1].split(":")
    return {
        "train": lambda: Behaviour(lines=("hello", "bye"), metrics=((1, {"loss": 0.5}), (2, {"loss": 0.25}))),
        "fail": lambda: Behaviour(exit_code=3, lines=("Traceback", "ValueError: no")),
        "hang": lambda: Behaviour(hang=True),
        "stubborn": lambda: Behaviour(hang=True, stubborn=True),
        "die": lambda: Behaviour(launcher_dies=True),
        "oom": lambda: Behaviour(kind="oom", signal=9),
    }[words[0]]()
