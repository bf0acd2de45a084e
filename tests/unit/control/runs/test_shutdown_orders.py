"""A task is stopped by an order. The engine ends it only where files of the run block the order."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.control.policy.task_phases import TaskPhase
from stoker.control.runs.shutdown import Shutdown
from stoker.control.state import LiveTask
from stoker.frameworks.roles import parts_of
from stoker.spec import Job
from stoker.spec.states import RunState
from stoker.task.local_directory import UnsafePath


class Directory:
    """A task directory in which no order can be written. `before` runs when its status is read."""

    root = "/nowhere"

    def __init__(self, error: OSError, before: Any = None) -> None:
        self.error, self.before = error, before

    def order(self) -> None:
        return None

    def status(self) -> None:
        if self.before is not None:
            self.before()

    def write_order(self, order: Any) -> None:
        raise self.error


def ended(directory: Directory, task: Any) -> list[str]:
    """The tasks that the engine was asked to end."""
    found: list[str] = []

    async def stop(handle: Any, *, grace: Any, tasks: list[str]) -> None:
        found.extend(tasks)

    async def story() -> None:
        spawned: list[asyncio.Task[None]] = []

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            spawned.append(asyncio.ensure_future(work))

        ctx = SimpleNamespace(
            fleet=SimpleNamespace(engine=lambda name: SimpleNamespace(stop=stop)),
            wakeups=SimpleNamespace(spawn=spawn, observe_from_anywhere=lambda: None),
        )
        live = SimpleNamespace(
            id="digits-7f3k",
            row=SimpleNamespace(desired="run"),
            job=Job.from_json({"run": "x"}),
            state=RunState.RUNNING,
            closing=None,
            attempt=object(),
            engine="lab",
            handle={},
        )
        task.directory = directory
        await Shutdown(ctx).stop(live, [task], brief=True)  # type: ignore[arg-type]
        await asyncio.gather(*spawned)

    asyncio.run(story())
    return found


@pytest.fixture
def task() -> Any:
    [part] = parts_of(Job.from_json({"name": "digits", "run": "train", "workers": 2}))
    return LiveTask("worker-1", part, 1, phase=TaskPhase.RUNNING)


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOTDIR, errno.ELOOP])
def test_the_engine_ends_a_task_whose_order_is_blocked(task: Any, number: int) -> None:
    assert ended(Directory(OSError(number, "no")), task) == ["worker-1"]


def test_the_engine_ends_a_task_whose_directory_is_a_link(task: Any) -> None:
    assert ended(Directory(UnsafePath("a link")), task) == ["worker-1"]


@pytest.mark.parametrize("number", [errno.EHOSTDOWN, errno.EIO, errno.ENOSPC])
def test_an_unreachable_task_keeps_its_time(task: Any, number: int) -> None:
    assert ended(Directory(OSError(number, "no")), task) == []
    assert task.phase is TaskPhase.STOPPING and task.stop_deadline


def test_a_task_replaced_meanwhile_is_left_alone(task: Any) -> None:
    """The engine finds tasks by name, and would end the new one."""

    def replace() -> None:
        task.incarnation = 2

    assert ended(Directory(OSError(errno.EISDIR, "no"), replace), task) == []
