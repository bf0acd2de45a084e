"""The engine's records name a task's process; files that a run writes into its directory are not trusted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.base import Attempt, Presence, TaskPlan
from stoker.engine.local.host import processes
from stoker.engine.local.tasks.registry import DIRECTORY_LOST, RECORD_LOST
from stoker.linux.syscalls import children
from stoker.task import layout

SLEEP = "import time; print('up'); time.sleep(600)"


async def _restarted(box: Any, damage: Callable[[Path], object]) -> None:
    """Restart the server after `damage` was done to the task directory of run-1."""
    root = Path((await box.engine.reach({"run": "run-1", "attempt": 1}, "worker-0")).root)
    await box.engine.close()
    damage(root)
    box.engine = box.make()


def _identity(pid: int) -> dict[str, Any]:
    found = processes.identity_of(pid)
    assert found is not None
    return {"boot_id": found.boot_id, "pid": pid, "start_time": found.start_time}


@pytest.mark.parametrize("lost", [False, True], ids=["with a record", "whose record is lost"])
def test_a_foreign_process_in_the_directory_is_not_signalled(box: Any, lost: bool) -> None:
    async def story() -> None:
        handle = await box.start(SLEEP)
        await box.said(handle, "up")
        launcher = json.loads(box.record().read_text())["pid"]
        foreign = await asyncio.create_subprocess_exec("sleep", "600")
        try:

            def forge(root: Path) -> None:
                (root / layout.ENGINE).write_text(json.dumps(_identity(foreign.pid)))
                if lost:
                    box.record().unlink()

            await _restarted(box, forge)
            (seen,) = await box.engine.observe()
            assert seen.presence is Presence.ALIVE
            await box.engine.stop(handle, grace=timedelta(0))
            assert foreign.returncode is None and processes.identity_of(foreign.pid)
            assert processes.identity_of(launcher) is None
        finally:
            foreign.kill()
            await foreign.wait()

    box.run(story)


def test_a_neighbours_group_in_the_directory_is_not_killed(box: Any) -> None:
    async def story() -> None:
        handle = await box.start(SLEEP)
        neighbour = await box.start(SLEEP, run="run-2")
        await box.said(handle, "up")
        await box.said(neighbour, "up")
        theirs = (await box.engine.reach(neighbour, "worker-0")).info()

        def forge(root: Path) -> None:
            mine = json.loads((root / layout.TASK).read_text())
            (root / layout.TASK).write_text(json.dumps({**mine, "cgroup": theirs.cgroup, "incarnation": 7}))

        await _restarted(box, forge)
        await box.engine.stop(handle, grace=timedelta(0))
        seen = {one.run: (one.presence, one.incarnation) for one in await box.engine.observe()}
        assert seen == {"run-1": (Presence.GONE, 1), "run-2": (Presence.ALIVE, 1)}
        record = json.loads(box.record("run-2").read_text())
        assert children(record["pid"])

    box.run(story)


def test_a_task_of_an_earlier_version_is_adopted_by_the_file_in_its_directory(box: Any) -> None:
    async def story() -> None:
        handle = await box.start(SLEEP)
        await box.said(handle, "up")
        record = json.loads(box.record().read_text())

        def as_before(root: Path) -> None:
            del record["task"]
            (root / layout.ENGINE).write_text(json.dumps(record))
            shutil.rmtree(box.record().parent)

        await _restarted(box, as_before)
        (seen,) = await box.engine.observe()
        assert seen.presence is Presence.ALIVE
        await box.engine.stop(handle, grace=timedelta(0))
        assert (await box.gone()).proof == f"launcher {record['pid']} is gone"

    box.run(story)


@pytest.mark.parametrize("what", ["directory", "record", "both"])
def test_what_ran_before_is_shown_as_lost_and_never_started_anew(box: Any, what: str) -> None:
    async def story() -> None:
        handle = await box.start(SLEEP)
        await box.said(handle, "up")
        launcher = json.loads(box.record().read_text())["pid"]
        (body,) = children(launcher)

        def lose(root: Path) -> None:
            if what == "record":
                os.kill(launcher, signal.SIGKILL)
            if what != "directory":
                box.record().unlink()
            if what != "record":
                shutil.rmtree(root)

        await _restarted(box, lose)
        again = Attempt("run-1", 1, (TaskPlan("worker-0", started=True),))
        await box.engine.submit(again)
        seen = await box.gone()
        assert seen.cause == "lost" or what == "record"
        assert seen.proof in (DIRECTORY_LOST, RECORD_LOST) or "deleted" in seen.proof
        await box.until(lambda: _ended(body), "the body to end")
        await box.engine.submit(again)
        assert not box.record().exists() or what == "directory"
        await box.engine.remove(handle)
        assert await box.engine.observe() == [] and not box.record().exists()

    box.run(story)


async def _ended(pid: int) -> bool | None:
    return processes.identity_of(pid) is None or None
