from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.waiting import is_there, wait_async

pytest.register_assert_rewrite("stoker.testing.engine_suite")

from stoker.engine.base import Attempt, Handle, Observation, Presence, TaskPlan  # noqa: E402
from stoker.engine.local import LocalEngine  # noqa: E402
from stoker.settings import Home, LocalSettings, Settings  # noqa: E402
from stoker.task import formats, layout  # noqa: E402
from stoker.task.local_directory import LocalTaskDir  # noqa: E402

T = TypeVar("T")
WAIT = 60.0


class Box:
    """A home with a local engine, and bodies written in Python."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.isolation = "auto"
        self.engine: LocalEngine

    def run(self, story: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a story with an engine; afterwards all tasks it started are ended."""

        async def work() -> T:
            self.engine = self.make()
            try:
                return await asyncio.wait_for(story(), WAIT * 2)
            finally:
                for seen in await self.engine.observe():
                    await self.engine.stop(seen.handle, grace=timedelta(0))
                await self.engine.close()

        return asyncio.run(work())

    def make(self) -> LocalEngine:
        return LocalEngine(Settings(self.home, local=LocalSettings(isolation=self.isolation)))

    async def restart(self) -> None:
        await self.engine.close()
        self.engine = self.make()

    async def start(
        self, code: str, plan: TaskPlan | None = None, *, run: str = "run-1", **env: str
    ) -> Handle:
        plan = plan or TaskPlan("worker-0")
        handle = await self.engine.submit(Attempt(run, 1, (plan,)))
        directory = await self.engine.reach(handle, plan.name)
        directory.write_order(
            formats.Order(
                seq=1,
                generation=1,
                verb="run",
                argv=[sys.executable, "-u", "-c", code],
                env={"PATH": os.environ["PATH"], **env},
                grace=5.0,
            )
        )
        return handle

    def record(self, run: str = "run-1") -> Path:
        """The engine's record of the task's launcher."""
        return self.home.engine / "tasks" / f"{run}.1.worker-0.json"

    async def directory(self, handle: Handle) -> LocalTaskDir:
        return await self.engine.reach(handle, "worker-0")

    async def lines(self, handle: Handle) -> list[str]:
        directory = await self.directory(handle)
        data = b"".join(directory.read(f"{layout.LOG}/{name}") for name in directory.list(layout.LOG))
        return [formats.LogLine.decode(line).text.decode() for line in data.splitlines()]

    async def ended(self, handle: Handle) -> formats.Ending:
        directory = await self.directory(handle)

        async def look() -> formats.Ending | None:
            status = directory.status()
            return formats.Ending.from_json(status.ending) if status is not None and status.ending else None

        return await self.until(look, "the body's end")

    async def said(self, handle: Handle, text: str) -> str:
        async def look() -> str | None:
            return next((line for line in await self.lines(handle) if text in line), None)

        return await self.until(look, f"{text!r} in the log")

    async def gone(self, run: str = "run-1") -> Observation:
        async def look() -> Observation | None:
            found = [seen for seen in await self.engine.observe() if seen.run == run]
            return found[0] if found and found[0].presence is Presence.GONE else None

        return await self.until(look, f"{run} to be gone")

    async def until(self, probe: Callable[[], Awaitable[T | None]], what: str) -> T:
        return await wait_async(probe, is_there, what=what)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    yield Box(tmp_path / "home")
