"""One job cannot harm another, measured with real processes. Skipped where the kernel does not allow it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from stoker.engine.base import Attempt, Presence, TaskPlan
from stoker.engine.local.host import cgroups, isolation, processes
from stoker.engine.local.tasks import directories
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.engine.local.tasks.task_info import group_name, render
from stoker.errors import EngineError

MIB = 1 << 20
FREEZER = Path("/sys/fs/cgroup/freezer")
HERE = isolation.probe(Path("/nonexistent/stoker-test-isolation"))

needs_cgroups = pytest.mark.skipif(HERE.memory == isolation.WATCHDOG, reason="no cgroups for this user")


@needs_cgroups
def test_a_job_over_its_memory_limit_ends_as_oom_and_its_neighbour_runs_on(box) -> None:
    async def story() -> None:
        neighbour = await box.start(
            "import os, time\nx = bytearray(50 << 20)\nprint('up')\n"
            "while not os.path.exists('../go'): time.sleep(0.02)\nprint('sum', sum(x[::4096]))",
            TaskPlan("worker-0", memory=200 * MIB),
            run="neighbour",
        )
        await box.said(neighbour, "up")
        greedy = await box.start(
            "x = bytearray(600 << 20)\nprint('got it')", TaskPlan("worker-0", memory=100 * MIB)
        )
        ending = await box.ended(greedy)
        assert (ending.kind, ending.limit) == ("oom", 100 * MIB)
        assert ending.peak is not None and 90 * MIB <= ending.peak <= 120 * MIB
        assert "got it" not in await box.lines(greedy)
        Path((await box.directory(neighbour)).root, "go").touch()
        assert (await box.ended(neighbour)).code == 0
        assert "sum 0" in await box.lines(neighbour)

    box.run(story)


@needs_cgroups
def test_cpu_limits_hold_under_contention(box) -> None:
    burn = (
        "import os, time\nprint('up')\n"
        "while not os.path.exists('../go'): time.sleep(0.01)\n"
        "wall, cpu = time.monotonic(), time.process_time()\n"
        "while time.monotonic() - wall < 2.0: pass\n"
        "print('share', (time.process_time() - cpu) / (time.monotonic() - wall))"
    )

    async def story() -> None:
        handles = {}
        for name, cpu in (("small", 0.1), ("large", 0.6), ("free", None)):
            handles[name] = await box.start(burn, TaskPlan("worker-0", cpu=cpu), run=name)
        for handle in handles.values():
            await box.said(handle, "up")
        for handle in handles.values():
            Path((await box.directory(handle)).root, "go").touch()
        shares = {
            name: float((await box.said(handle, "share")).split()[1]) for name, handle in handles.items()
        }
        assert shares["small"] <= 0.1 * 1.3
        assert shares["large"] <= 0.6 * 1.2
        assert shares["small"] < shares["large"]

    box.run(story)


@needs_cgroups
def test_a_fork_bomb_stays_in_its_group(box) -> None:
    bomb = (
        "import os, time\ncount = 0\n"
        "for _ in range(20000):\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(600); os._exit(0)\n"
        "        count += 1\n"
        "    except OSError: break\n"
        "print('forked', count)\ntime.sleep(600)"
    )

    async def story() -> None:
        handle = await box.start(bomb, TaskPlan("worker-0", pids=64), run="bomb")
        assert int((await box.said(handle, "forked")).split()[1]) <= 64
        neighbour = await box.start(
            "import subprocess\nprint(subprocess.run(['true']).returncode)", run="neighbour"
        )
        assert (await box.ended(neighbour)).code == 0
        await box.engine.stop(handle, grace=_seconds(2))
        assert (await box.gone("bomb")).proof

    box.run(story)


@needs_cgroups
def test_a_fork_bomb_without_a_limit_of_its_own_meets_the_default(box) -> None:
    async def story() -> None:
        handle = await box.start("print(open('/proc/self/cgroup').read())")
        await box.ended(handle)
        info = (await box.directory(handle)).info()
        assert info is not None and info.pids == 4096 and info.cgroup is not None
        assert Path(info.cgroup["pids"], "pids.max").read_text().strip() == "4096"
        assert any(line.endswith("run-1.1.worker-0") for line in await box.lines(handle))

    box.run(story)


def test_nothing_of_the_server_or_of_another_job_leaks_into_a_job(box, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SERVER_SECRET", "hunter2")
    show = (
        "import json, os\nfound = []\n"
        "for fd in range(3, 256):\n"
        "    try: found.append(os.readlink(f'/proc/self/fd/{fd}'))\n"
        "    except OSError: pass\n"
        "print('JSON', json.dumps({'fds': found, 'env': dict(os.environ)}))"
    )

    async def story() -> None:
        await box.start("import time; time.sleep(600)", run="other", OTHERS_SECRET="swordfish")
        handle = await box.start(show, run="probe", MINE="yes")
        found = json.loads((await box.said(handle, "JSON"))[5:])
        assert found["fds"] == []
        assert found["env"]["MINE"] == "yes"
        assert not {"SERVER_SECRET", "OTHERS_SECRET", "STOKER_HOME", "PYTEST_CURRENT_TEST"} & set(
            found["env"]
        )
        assert "hunter2" not in json.dumps(found) and "swordfish" not in json.dumps(found)

    with open(tmp_path / "open-in-the-server", "w") as file:
        os.set_inheritable(file.fileno(), True)
        box.run(story)


@pytest.mark.skipif(not HERE.pid_namespace, reason="no PID namespaces for this user")
def test_a_job_sees_only_its_own_processes(box) -> None:
    async def story() -> None:
        await box.start("import time; time.sleep(600)", run="other")
        handle = await box.start("import os\nprint('pids', *[p for p in os.listdir('/proc') if p.isdigit()])")
        assert {int(word) for word in (await box.said(handle, "pids")).split()[1:]} <= {1, 2, 3, 4}

    box.run(story)


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_what_escaped_into_the_background_dies_with_the_launcher(box, mode: str) -> None:
    """A daemon: double fork, new session, all descriptors closed."""
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.closerange(0, 64)\n"
        "        while True:\n"
        "            open('../alive', 'w').close(); time.sleep(0.02)\n"
        "    os._exit(0)\n"
        "while not os.path.exists('../alive'): time.sleep(0.01)\n"
        "print('up')\ntime.sleep(600)"
    )

    async def story() -> None:
        handle = await box.start(daemon)
        await box.said(handle, "up")
        await box.engine.hurt(handle, "worker-0", "launcher")
        await box.gone()
        mark = Path((await box.directory(handle)).root, "alive")
        mark.unlink()

        await asyncio.sleep(0.3)
        assert not mark.exists(), "reported gone while a process of the task still ran"

    box.isolation = mode
    box.run(story)


@needs_cgroups
def test_no_groups_are_left_behind(box) -> None:
    async def story() -> None:
        handle = await box.start("pass")
        await box.ended(handle)
        info = (await box.directory(handle)).info()
        assert info is not None and info.cgroup is not None
        groups = [Path(path).parent for path in info.cgroup["procs"]]
        assert all(group.is_dir() for group in groups)
        await box.engine.stop(handle, grace=_seconds(0))
        assert not any(group.exists() for group in groups)

    box.run(story)


@needs_cgroups
def test_the_group_of_a_task_that_has_not_started_stays_for_its_start(box) -> None:
    """An observation in between does not remove the group; the end of the task does."""

    async def story() -> None:
        await box.engine.capacity()
        (info,) = render(Attempt("run-1", 1, (TaskPlan("worker-0", cpu=1.0),)), box.engine.isolation)
        place = TaskPlace("run-1", 1, "worker-0")
        directories.create(directories.path_of(box.home.tasks, place), info)
        tree = box.engine.isolation.tree
        assert info.cgroup is not None and tree is not None
        cgroups.make(tree, group_name(*place.key()), cgroups.Limits(cpu=1.0))
        groups = cgroups.directories(info.cgroup)
        await box.restart()
        (seen,) = await box.engine.observe()
        assert seen.proof == "its launcher was never started"
        assert all(Path(group).is_dir() for group in groups)
        await box.engine.stop(seen.handle, grace=_seconds(0))
        await box.engine.remove(seen.handle)
        assert not any(Path(group).exists() for group in groups)

    box.run(story)


@needs_cgroups
def test_a_restarted_task_starts_within_its_limits_during_observations(box) -> None:
    """Proving that the previous incarnation is gone removes its group, whose name is used again."""

    async def story() -> None:
        for incarnation in range(1, 16):
            plan = TaskPlan("worker-0", incarnation=incarnation, cpu=1.0)
            looking = [asyncio.create_task(box.engine.observe()) for _ in range(4)]
            handle = await box.start("print('up'); import time; time.sleep(600)", plan)
            await asyncio.gather(*looking)
            await box.said(handle, "up")
            launcher = json.loads(box.record().read_text())["pid"]
            os.kill(launcher, signal.SIGKILL)
            while processes.stat_fields(launcher)[:1] not in ([], ["Z"]):
                await asyncio.sleep(0.001)

    box.run(story)


@pytest.mark.skipif(not FREEZER.is_dir(), reason="needs the freezer of cgroup v1, in which nothing dies")
def test_a_launcher_that_does_not_die_is_not_reported_gone(box, monkeypatch) -> None:
    monkeypatch.setattr("stoker.engine.local.tasks.terminator.KILL_SECONDS", 0.3)
    ice = FREEZER / f"stoker-test-ice-{os.getpid()}"

    async def story() -> None:
        handle = await box.start("print('up'); import time; time.sleep(600)")
        await box.said(handle, "up")
        launcher = json.loads(box.record().read_text())["pid"]
        (ice / "cgroup.procs").write_text(str(launcher))
        (ice / "freezer.state").write_text("FROZEN")
        try:
            with pytest.raises(EngineError, match=f"process {launcher} of run-1 does not end"):
                await box.engine.stop(handle, grace=_seconds(0))
            (seen,) = await box.engine.observe()
            assert seen.presence is not Presence.GONE
        finally:
            (ice / "freezer.state").write_text("THAWED")
        assert (await box.gone()).proof == f"launcher {launcher} is gone"

    ice.mkdir()
    try:
        box.run(story)
    finally:
        ice.rmdir()


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=number)
