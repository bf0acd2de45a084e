"""Parts of the local engine that need no launcher: rendering, GPUs, capacity, directories, hints, doctor."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.engine.base import Attempt, Gpu, TaskPlan
from stoker.engine.change_feed import ChangeFeed
from stoker.engine.local import doctor
from stoker.engine.local.host import capacity, cgroups, gpus, isolation, processes
from stoker.engine.local.host.gpus import Gpus, Seen
from stoker.engine.local.host.isolation import Isolation
from stoker.engine.local.host.processes import Identity
from stoker.engine.local.tasks import directories, watcher
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.engine.local.tasks.task_info import render
from stoker.errors import EngineError
from stoker.linux import process
from stoker.settings import Home, LocalSettings, Settings
from stoker.task import formats
from stoker.task.formats import TaskInfo

GIB = 1 << 30


# -- render ------------------------------------------------------------------------------------------------------


def test_render_lists_every_file_that_will_be_written() -> None:
    attempt = Attempt(
        "digits-7f3k",
        3,
        (TaskPlan("worker-1", index=1, incarnation=2, cpu=2.0, memory=GIB, gpus=("GPU-a",)),),
    )
    tree = cgroups.CgroupTree(1, {"memory": "/sys/fs/cgroup/memory/stoker-1"})
    (info,) = render(attempt, Isolation(processes=isolation.PID_NAMESPACE, tree=tree))
    assert info.to_json() == {
        "run": "digits-7f3k",
        "attempt": 3,
        "task": "worker-1",
        "role": "worker",
        "index": 1,
        "incarnation": 2,
        "cpu": 2.0,
        "memory": GIB,
        "pids": 4096,
        "gpus": ["GPU-a"],
        "cgroup": {
            "version": 1,
            "procs": ["/sys/fs/cgroup/memory/stoker-1/digits-7f3k.3.worker-1/cgroup.procs"],
            "memory": "/sys/fs/cgroup/memory/stoker-1/digits-7f3k.3.worker-1",
        },
        "pid_namespace": True,
        "log_budget": 1 << 30,
        "log_segment": 8 << 20,
        "sample_every": 5.0,
        "secrets_dir": None,
        "setups": None,
        "workdir": None,
        "home": None,
        "command": [],
        "container": None,
        "lease": None,
        "near": True,
        "common": None,
        "guards": False,
        "exclusive": False,
        "format": 1,
    }


def test_render_without_isolation() -> None:
    (info,) = render(Attempt("r", 1, (TaskPlan("worker-0", pids=9),)), Isolation())
    assert (info.cgroup, info.pid_namespace, info.pids, info.memory) == (None, False, 9, None)


# -- GPUs --------------------------------------------------------------------------------------------------------


def seen(**more: Any) -> Seen:
    return Seen(**{"id": "GPU-a", "index": 0, "model": "H200", "memory": 140 * GIB, **more})


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        (seen(), ""),
        (seen(used=500 << 20), ""),
        (
            seen(used=int(2.1 * GIB), holders=((4_000_001, int(2.1 * GIB)),)),
            "2.1 GiB still held by pid 4000001",
        ),
        (seen(used=3 * GIB), "3 GiB still held by no visible process"),
        (seen(used=3 * GIB, graphics=int(2.5 * GIB)), ""),
        (seen(xid=79), "Xid 79"),
        (seen(uncorrected=2), "2 uncorrectable memory errors since the driver was loaded"),
        (seen(remap="bad memory rows could not be remapped"), "bad memory rows could not be remapped"),
        (seen(lost=True), "it does not answer (fell off the bus?)"),
    ],
)
def test_which_gpus_are_handed_out(fact: Seen, reason: str) -> None:
    assert gpus.judge(fact, set()) == Gpu("GPU-a", 0, "H200", 140 * GIB, healthy=not reason, reason=reason)


def test_memory_of_its_own_task_is_no_fault_of_a_gpu() -> None:
    busy = seen(used=100 * GIB, holders=((1234, 100 * GIB),))
    assert gpus.judge(busy, {"GPU-a"}).healthy
    assert not gpus.judge(seen(xid=79), {"GPU-a"}).healthy


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["GPU-a1", "GPU-b2", "GPU-c3"]),
        ("", []),
        ("-1", []),
        ("1", ["GPU-b2"]),
        ("2,0", ["GPU-c3", "GPU-a1"]),
        ("GPU-b", ["GPU-b2"]),
        ("0,7,1", ["GPU-a1"]),
        ("0, 0", ["GPU-a1"]),
    ],
)
def test_visible_devices_of_the_server_are_respected(setting: str | None, expected: list[str]) -> None:
    all_of_them = [seen(id=name, index=index) for index, name in enumerate(("GPU-a1", "GPU-b2", "GPU-c3"))]
    assert [one.id for one in gpus.visible(all_of_them, setting)] == expected


class NVMLError(Exception):
    value = 0


def driver(**changed: Any) -> SimpleNamespace:
    """The part of NVML that is used, for two GPUs."""
    memory = SimpleNamespace(total=80 * GIB, used=0)
    calls: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle, *version: memory,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}".encode(),
        "nvmlDeviceGetName": lambda handle: "H200",
        "nvmlDeviceGetMinorNumber": lambda handle: handle + 4,
    }
    return SimpleNamespace(**{**calls, **changed})


def with_driver(nvml: SimpleNamespace) -> Gpus:
    found = Gpus(visible="0,1")
    found._nvml = nvml
    return found


def test_a_plain_driver_gives_two_healthy_gpus_and_their_devices() -> None:
    found = with_driver(driver())
    assert [(gpu.id, gpu.healthy) for gpu in found.look(set())] == [("GPU-0", True), ("GPU-1", True)]
    assert found.denied(["GPU-0"]) == ((195, 5),)
    assert found.denied([]) == ((195, 4), (195, 5))


def test_a_gpu_that_fell_off_the_bus_is_set_aside_and_the_other_is_not() -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise NVMLError("GPU is lost")
        return index

    found = with_driver(driver(nvmlDeviceGetHandleByIndex=handle))
    assert [gpu.healthy for gpu in found.look(set())] == [True, False]


def test_a_driver_that_does_not_answer_is_a_problem_not_a_crash() -> None:
    def count() -> int:
        raise NVMLError("driver/library version mismatch")

    found = with_driver(driver(nvmlDeviceGetCount=count))
    assert found.look(set()) == []
    assert "driver/library version mismatch" in found.problem


def test_mig_slices_are_gpus_of_their_own() -> None:
    def piece(parent: int, number: int) -> int:
        if number > 1:
            raise NVMLError("no slice there")
        return parent * 10 + 100 + number

    nvml = driver(
        nvmlDeviceGetMigMode=lambda handle: (1, 1) if handle == 0 else (0, 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=piece,
    )
    assert [gpu.id for gpu in with_driver(nvml).look(set())] == ["GPU-100", "GPU-101", "GPU-1"]


# -- capacity ----------------------------------------------------------------------------------------------------


def test_an_operator_sets_what_runs_may_use() -> None:
    assert capacity.cpus(LocalSettings(cpu=1.5)) == 1.5
    assert capacity.memory(LocalSettings(memory=GIB)) == GIB


def test_a_share_of_the_memory_is_kept_back() -> None:
    whole, most = (
        capacity.memory(LocalSettings(memory_reserve=0.0)),
        capacity.memory(LocalSettings(memory_reserve=0.25)),
    )
    assert most == pytest.approx(0.75 * whole, rel=0.01)
    assert 0 < capacity.cpus(LocalSettings()) <= (os.cpu_count() or 1)


# -- processes ---------------------------------------------------------------------------------------------------


def test_a_process_is_identified_by_boot_id_and_start_time() -> None:
    start = int(processes.stat_fields(os.getpid())[19])
    me = Identity(process.boot_id(), os.getpid(), start)
    assert processes.is_alive(me, "")
    assert not processes.is_alive(Identity("another", me.pid, start), "")
    assert not processes.is_alive(Identity(me.boot_id, me.pid, start + 1), "")
    assert processes.open_pidfd(Identity(me.boot_id, me.pid, start + 1)) is None
    assert not processes.send(Identity(me.boot_id, me.pid, start + 1), 9)


@pytest.mark.parametrize("raw", [{}, {"pid": "x"}, {"pid": None}, {"pid": 1}, {"pid": 0}, {"pid": -1}])
def test_an_invalid_record_names_no_process(raw: dict[str, Any]) -> None:
    assert Identity.from_json(raw) is None


# -- directories -------------------------------------------------------------------------------------------------


def test_scan_skips_other_directories(tmp_path: Path) -> None:
    for name in (
        "run-1/1/worker-0",
        "run-1/1/worker-0.1",
        "run-1/1.removed/worker-0",
        "run-1/x/worker-0",
        "run-2/2",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "run-3").symlink_to(tmp_path / "run-1")
    assert [place for place, _ in directories.scan(tmp_path)] == [TaskPlace("run-1", 1, "worker-0")]
    directories.discard_unfinished(tmp_path)
    assert not (tmp_path / "run-1" / "1.removed").exists()


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    for name in ("..", "a/b", "", "-x", "a\n"):
        with pytest.raises(EngineError):
            directories.path_of(tmp_path, TaskPlace(name, 1, "worker-0"))


def test_archives_never_overwrite_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        directories.create(tmp_path / "worker-0", TaskInfo("r", 1, "worker-0"))
        directories.archive(tmp_path / "worker-0", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0.1", "worker-0.2", "worker-0.3"]


@pytest.mark.parametrize("content", [b"", b"[]", b"nonsense", b'{"run": 1}', b"\xff\xfe"])
def test_an_invalid_task_json_reads_as_absent(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "task.json").write_bytes(content)
    assert directories.read_info(tmp_path) is None


# -- hints -------------------------------------------------------------------------------------------------------


def test_each_task_waits_once_and_the_end_comes_last() -> None:
    async def story() -> list[tuple[str, int, str]]:
        hints = ChangeFeed()
        for run in ("a", "b", "a"):
            hints.put((run, 1, "worker-0"))
        hints.close()
        return [key async for key in hints]

    assert asyncio.run(story()) == [("a", 1, "worker-0"), ("b", 1, "worker-0")]


def test_hints_from_another_thread_wake_the_reader() -> None:
    async def story() -> None:
        hints = ChangeFeed()
        waiting = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0)
        await asyncio.to_thread(hints.put, ("a", 1, "w"))
        assert await asyncio.wait_for(waiting, 30) == ("a", 1, "w")

    asyncio.run(story())


@pytest.mark.parametrize("refused", [False, True], ids=["inotify", "no inotify left"])
def test_a_changed_status_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    def no_more() -> None:
        raise OSError(24, "Too many open files")

    async def story() -> None:
        tasks = watcher.Watcher(lambda key: None)
        hints = tasks.subscribe()
        tasks.add(("r", 1, "worker-0"), str(tmp_path / "worker-0"), None)
        (tmp_path / "worker-0" / "code" / "noise").touch()
        formats.write_json(str(tmp_path / "worker-0" / "status.json"), {"phase": "ready"})
        assert await asyncio.wait_for(anext(hints), 30) == ("r", 1, "worker-0")
        assert bool(tasks.problem) is refused
        tasks.close()
        assert [key async for key in hints] == []

    if refused:
        monkeypatch.setattr(watcher, "Inotify", no_more)
    directories.create(tmp_path / "worker-0", TaskInfo("r", 1, "worker-0"))
    asyncio.run(story())


# -- isolation and doctor ----------------------------------------------------------------------------------------


def test_isolation_that_is_switched_off_is_reported(tmp_path: Path) -> None:
    found = isolation.probe(tmp_path, "none")
    assert found.summary() == {
        "processes": "guardian",
        "memory": "watchdog",
        "cpu": "affinity",
        "pids": "watchdog",
        "gpu": "CUDA_VISIBLE_DEVICES only",
    }
    assert set(found.missing) == set(found.summary())


def test_doctor_names_each_kind_of_isolation_with_reason_and_fix(tmp_path: Path) -> None:
    found = isolation.probe(tmp_path, "none")
    facts = {fact.name: fact for fact in doctor.doctor_facts(Settings(Home(tmp_path / "not" / "yet")), found)}
    memory = facts["isolation: memory"]
    assert memory.status == "warn" and "switched off" in memory.text and "auto" in memory.fix
    assert {
        "python",
        "system",
        "boot id",
        "cpu",
        "memory",
        "disk",
        "open files",
        "inotify",
        "clock",
    } <= set(facts)
    assert any(name.startswith("gpu") for name in facts)
    assert all(fact.fix for fact in facts.values() if fact.status != "ok"), "what is wrong comes with a fix"


def test_doctor_starts_no_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `podman info` of an ordinary user leaves a process and directories in /tmp."""
    podman = tmp_path / "bin" / "podman"
    podman.parent.mkdir()
    podman.write_text(f"#!/bin/sh\n: > {tmp_path}/started\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", str(podman.parent))
    facts = {fact.name: fact for fact in doctor.doctor_facts(Settings(Home(tmp_path)), Isolation())}
    assert facts["containers"].text.startswith(f"podman {podman} (")
    assert not (tmp_path / "started").exists()


def test_doctor_finds_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 60)
    facts = {fact.name: fact for fact in doctor.doctor_facts(Settings(Home(tmp_path)), Isolation())}
    assert facts["disk"].status == "warn" and "Make room" in facts["disk"].fix


# -- unknown facts ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not processes.LINUX, reason="needs /proc")
def test_a_process_is_not_called_dead_without_free_descriptors() -> None:
    code = """
        import os, resource
        from stoker.engine.local.host import cgroups, processes
        from stoker.linux import process
        me = processes.Identity(process.boot_id(), os.getpid(), int(processes.stat_fields(os.getpid())[19]))
        assert processes.is_alive(me, "")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        for ask in (lambda: processes.is_alive(me, ""), lambda: cgroups.procs({"procs": ["/sys/fs/cgroup/cgroup.procs"]})):
            try:
                print("answered", ask())
            except OSError as exc:
                print(exc.errno)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EMFILE)] * 2, done.stderr


def test_a_directory_is_created_although_its_parent_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last attempt of a run removes the directory of the run just before the next one is created in
    it."""
    path = tmp_path / "run" / "2" / "worker-0"
    make, left = os.mkdir, []

    def leave(where: Any, mode: int = 0o777) -> None:
        if Path(where) == path and path.parent.exists() and not left:
            left.append(where)
            directories.remove_empty(path.parent)
        make(where, mode)

    monkeypatch.setattr(os, "mkdir", leave)
    directories.make_directory(path, 0o700)
    assert left and path.stat().st_mode & 0o777 == 0o700


def test_an_archived_directory_stays_for_a_while_and_is_no_task(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for number in (1, 2):
        task = directories.path_of(tasks, TaskPlace("r", number, "worker-0"))
        (task / "checkpoints").mkdir(parents=True)
        (task / "checkpoints" / "a.pt").write_text(str(number))
        (task / "secrets.json").write_text("{}")
        earlier = task.with_name("worker-0.1")
        (earlier / "secrets.json").mkdir(parents=True)
        # A server was killed halfway; the next one repeats it.
        directories.set_aside(task.parent)
        directories.set_aside(task.parent)
    assert list(directories.scan(tasks)) == []
    directories.discard_unfinished(tasks)
    first, second = (directories.aside(tasks / "r" / str(number)) for number in (1, 2))
    assert (first / "worker-0" / "checkpoints" / "a.pt").read_text() == "1"
    assert not list(tasks.rglob("secrets.json"))
    os.utime(first, (1.0, 1.0))
    directories.discard_old(tasks)
    assert (first.exists(), second.exists()) == (False, True)
    os.utime(second, (1.0, 1.0))
    directories.discard_old(tasks)
    assert list(tasks.iterdir()) == []
