"""Resizing and entering a running task, on the real kernel."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from stoker.engine.base import Resizes, Shows, TaskPlan
from stoker.engine.local.host import processes
from stoker.errors import NotFound
from stoker.task.formats import TaskInfo

FOREVER = "import time; b = bytearray(30 << 20); print('up'); time.sleep(1000)"


def need_groups(box: Any, info: TaskInfo) -> dict[str, Any]:
    if info.cgroup is None or not {"memory", "cpu"} <= set(info.cgroup):
        pytest.skip(f"no cgroups here: {box.engine.isolation.missing}")
    return info.cgroup


def limits(group: dict[str, Any]) -> tuple[int, int]:
    """Memory in bytes and CPU in microseconds per 100 ms, as the kernel has them."""
    if group["version"] == 1:
        memory = processes.read_text(f"{group['memory']}/memory.limit_in_bytes")
        return int(memory), int(processes.read_text(f"{group['cpu']}/cpu.cfs_quota_us"))
    quota = processes.read_text(f"{group['cpu']}/cpu.max").split()[0]
    return int(processes.read_text(f"{group['memory']}/memory.max")), int(quota)


def test_a_running_task_is_resized_in_place(box: Any) -> None:
    async def story() -> None:
        assert isinstance(box.engine, Resizes)
        handle = await box.start(FOREVER, TaskPlan("worker-0", cpu=1.0, memory=128 << 20))
        await box.said(handle, "up")
        group = need_groups(box, (await box.directory(handle)).info())
        for cpu, memory in ((2.0, 512 << 20), (0.5, 100 << 20), (None, 256 << 20), (1.0, None)):
            before = limits(group)
            assert await box.engine.resize(handle, "worker-0", cpu=cpu, memory=memory) is None
            assert limits(group) == (memory or before[0], int(cpu * 100_000) if cpu else before[1])
        before = limits(group)
        reason = await box.engine.resize(handle, "worker-0", cpu=2.0, memory=16 << 20)
        assert reason is not None and "now, too much for a limit of 16 MiB" in reason
        assert limits(group) == before
        with pytest.raises(NotFound):
            await box.engine.resize(handle, "worker-1", cpu=2.0, memory=None)

    box.run(story)


def test_an_ending_at_a_new_limit_names_the_new_limit(box: Any) -> None:
    async def story() -> None:
        code = "import time\nprint('up')\nx = []\nwhile True:\n    x.append(bytearray(4 << 20)); time.sleep(0.02)"
        handle = await box.start(code, TaskPlan("worker-0", memory=4 << 30))
        await box.said(handle, "up")
        need_groups(box, (await box.directory(handle)).info())
        assert await box.engine.resize(handle, "worker-0", cpu=None, memory=200 << 20) is None
        ending = await box.ended(handle)
        assert (ending.kind, ending.limit) == ("oom", 200 << 20) and "200 MiB" in ending.message

    box.run(story)


def test_without_groups_it_says_why_not(box: Any) -> None:
    box.isolation = "none"

    async def story() -> None:
        handle = await box.start(FOREVER, TaskPlan("worker-0", cpu=1.0, memory=256 << 20))
        await box.said(handle, "up")
        reason = await box.engine.resize(handle, "worker-0", cpu=2.0, memory=None)
        assert reason is not None and "cannot be changed while it runs" in reason and "isolation" in reason

    box.run(story)


@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_a_user_enters_a_task(box: Any, isolation: str) -> None:
    """The shell has the task's environment, directory, processes and limits, also after the body failed."""
    box.isolation = isolation
    look = 'echo "$STOKER_RUN $LR $PWD"; for p in /proc/[0-9]*; do cat $p/comm; done; cat /proc/self/cgroup'

    async def story() -> None:
        assert isinstance(box.engine, Shows)
        handle = await box.start("raise SystemExit(1)", LR="0.1")
        assert (await box.ended(handle)).code == 1
        directory = await box.directory(handle)
        way = await box.engine.shell(handle, "worker-0")
        done = subprocess.run([*way["argv"], "sh", "-c", look], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        first, *rest = done.stdout.splitlines()
        assert first == f"run-1 0.1 {directory.root}/code"
        info = directory.info()
        if info.pid_namespace:
            assert len([name for name in rest if ":" not in name]) <= 5
        if info.cgroup is not None:
            assert any(line.endswith("/run-1.1.worker-0") for line in rest)

    box.run(story)


def test_the_engine_reports_what_works_here(box: Any) -> None:
    async def story() -> None:
        found = {entry["name"]: entry for entry in await box.engine.check()}
        assert found["python"]["ok"] is True
        assert {"isolation: memory", "containers", "disk"} <= set(found)
        assert all(entry["hint"] for entry in found.values() if entry["ok"] is False)

    box.run(story)
