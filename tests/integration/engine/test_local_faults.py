"""Faults around the local engine: restarts, reboots, crashes between two steps, hostile directories."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from stoker.engine.base import Attempt, Presence, TaskPlan
from stoker.engine.local.host import processes
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.errors import EngineUnavailable
from stoker.launcher.forkserver import child
from stoker.launcher.task_files import take_lock
from stoker.linux import process
from stoker.linux.syscalls import children
from stoker.task.formats import TaskInfo

SLEEP = "import time; print('up'); time.sleep(600)"


def test_after_a_restart_of_the_machine_everything_is_gone(box) -> None:
    async def story() -> None:
        handle = await box.start(SLEEP)
        await box.said(handle, "up")
        record = box.record()
        launcher = json.loads(record.read_text())["pid"]
        await box.engine.close()
        os.kill(launcher, signal.SIGKILL)
        record.write_text(
            json.dumps({**json.loads(record.read_text()), "boot_id": "another-boot", "pid": os.getpid()})
        )
        box.engine = box.make()
        seen = await box.gone()
        assert seen.proof == "the machine was restarted"

    box.run(story)


def test_a_reused_pid_is_not_the_launcher(box) -> None:
    async def story() -> None:
        handle = await box.start(SLEEP)
        await box.said(handle, "up")
        record = box.record()
        raw = json.loads(record.read_text())
        await box.engine.close()
        os.kill(raw["pid"], signal.SIGKILL)
        record.write_text(json.dumps({**raw, "pid": os.getpid()}))
        box.engine = box.make()
        assert (await box.gone()).proof == f"launcher {os.getpid()} is gone"
        # It is not signalled: the signal would end this test.
        await box.engine.stop(handle, grace=timedelta(0))

    box.run(story)


def test_a_crash_between_the_directory_and_the_start_is_repaired(box) -> None:
    async def story() -> None:
        path = directories.path_of(box.home.tasks, TaskPlace("run-1", 1, "worker-0"))
        directories.create(path, TaskInfo("run-1", 1, "worker-0"))
        (seen,) = await box.engine.observe()
        assert (seen.presence, seen.proof) == (Presence.GONE, "its launcher was never started")
        handle = await box.start("print('hello')")
        assert (await box.ended(handle)).code == 0

    box.run(story)


def test_when_the_fork_server_dies_another_one_is_started(box) -> None:
    async def story() -> None:
        first = await box.start(SLEEP, run="first")
        await box.said(first, "up")
        (pid,) = [child for child in children(os.getpid()) if _name(child) == "stoker-forksrv"]
        os.kill(pid, signal.SIGKILL)
        second = await box.start("print('hello')", run="second")
        assert (await box.ended(second)).code == 0
        presence = {seen.run: seen.presence for seen in await box.engine.observe()}
        assert presence == {"first": Presence.ALIVE, "second": Presence.ALIVE}

    box.run(story)


def test_a_launcher_that_an_earlier_server_asked_for_is_waited_for(box) -> None:
    """The server died before it recorded the launcher, which has the directory and does nothing yet."""

    async def story() -> None:
        _, lock = _taken(box)
        box.record().parent.mkdir(parents=True)
        earlier = await asyncio.create_subprocess_exec("sleep", "600")
        try:
            submitting = asyncio.create_task(box.engine.submit(Attempt("run-1", 1, (TaskPlan("worker-0"),))))
            await asyncio.wait([submitting], timeout=0.5)
            assert not submitting.done() and not box.record().exists()
            recorded = child.record(str(box.record()), process.boot_id(), earlier.pid)
            handle = await submitting
            (seen,) = await box.engine.observe()
            assert seen.presence is Presence.ALIVE
            assert json.loads(box.record().read_text())["pid"] == recorded["pid"] == earlier.pid
            await box.engine.stop(handle, grace=timedelta(0))
            assert await earlier.wait() == -signal.SIGKILL
        finally:
            os.close(lock)
            if earlier.returncode is None:
                earlier.kill()
                await earlier.wait()

    box.run(story)


def test_a_launcher_that_an_earlier_server_asked_for_may_end_at_its_start(box) -> None:
    async def story() -> None:
        _, lock = _taken(box)
        starting_ = asyncio.create_task(box.start("print('hello')"))
        await asyncio.wait([starting_], timeout=0.5)
        os.close(lock)
        assert (await box.ended(await starting_)).code == 0

    box.run(story)


def test_a_directory_that_cannot_be_removed_does_not_end_the_run(box, monkeypatch) -> None:
    monkeypatch.setattr("stoker.engine.local.tasks.starter.DIRECTORY_SECONDS", 0.2)

    async def story() -> None:
        _, lock = _taken(box)
        with pytest.raises(EngineUnavailable, match="no launcher is recorded for it"):
            await box.start("print('hello')")
        os.close(lock)
        assert (await box.ended(await box.start("print('hello')"))).code == 0

    box.run(story)


def test_after_a_restart_adopted_tasks_are_watched(box) -> None:
    async def story() -> None:
        handle = await box.start(
            "import os, time\nprint('up')\nwhile not os.path.exists('../go'): time.sleep(0.02)\n"
            "print('line')\ntime.sleep(600)"
        )
        await box.said(handle, "up")
        await box.restart()
        await box.engine.observe()
        hints = box.engine.changes()
        first = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0)
        Path((await box.directory(handle)).root, "go").touch()
        assert await asyncio.wait_for(first, 60) == ("run-1", 1, "worker-0")
        await box.said(handle, "line")
        await hints.aclose()

    box.run(story)


def test_a_talkative_task_does_not_flood_the_hints(box) -> None:
    async def story() -> None:
        handle = await box.start("import time\nfor i in range(400): print(i); time.sleep(0.002)")
        loop = asyncio.get_running_loop()
        count, start = 0, loop.time()

        async def listen() -> None:
            nonlocal count
            async for _ in box.engine.changes():
                count += 1

        listening = asyncio.create_task(listen())
        await box.ended(handle)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        assert 1 <= count <= 25 * (loop.time() - start) + 5

    box.run(story)


def test_removing_follows_no_links_and_opens_closed_directories(box, tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")

    async def story() -> None:
        handle = await box.start(
            f"import os\nos.symlink({str(precious)!r}, '../output/link')\n"
            "os.makedirs('../output/a/b'); open('../output/a/b/c', 'w').close()\n"
            "os.chmod('../output/a/b', 0o000); os.chmod('../output/a', 0o500)\n"
            "os.chdir('../output')\n"
            "for _ in range(400): os.mkdir('d'); os.chdir('d')"
        )
        assert (await box.ended(handle)).code == 0
        await box.engine.stop(handle, grace=timedelta(0))
        await box.engine.remove(handle)
        assert list(box.home.tasks.iterdir()) == []
        assert (precious / "file").read_text() == "keep"

    box.run(story)


def test_a_home_that_cannot_be_read_is_not_an_empty_one(box) -> None:
    async def story() -> None:
        await box.start(SLEEP)
        box.home.tasks.rename(box.home.root / "away")
        box.home.tasks.symlink_to("tasks")  # a loop
        try:
            with pytest.raises(EngineUnavailable):
                await box.engine.observe()
        finally:
            box.home.tasks.unlink()
            (box.home.root / "away").rename(box.home.tasks)

    box.run(story)


def test_a_gang_starts_together(box) -> None:
    async def story() -> None:
        plans = tuple(TaskPlan(f"worker-{index}", index=index) for index in range(8))
        handle = await box.engine.submit(Attempt("gang", 1, plans))
        seen = await box.engine.observe()
        assert {found.task for found in seen if found.presence is Presence.ALIVE} == {
            plan.name for plan in plans
        }
        await box.engine.stop(handle, grace=timedelta(0))
        assert {found.presence for found in await box.engine.observe()} == {Presence.GONE}

    box.run(story)


def _name(pid: int) -> str:
    return processes.read_text(f"/proc/{pid}/comm").strip()


def _taken(box) -> tuple[Path, int]:
    """A task's directory, locked as by a launcher that is not recorded yet; and the lock."""
    path = directories.path_of(box.home.tasks, TaskPlace("run-1", 1, "worker-0"))
    directories.create(path, TaskInfo("run-1", 1, "worker-0"))
    lock = take_lock(str(path))
    assert lock is not None
    return path, lock
