"""What a launcher detects about its container. Real containers are in tests/integration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher.process import container_env, exit_reason, spawn
from stoker.launcher.telemetry.cgroup_usage import Cgroup
from stoker.task.formats import Order, TaskInfo

STARTED = {"seq": 4, "generation": 2, "memory": {"group": "boot 1 77", "kills": 3}}


def files(folder: Path, **content: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def test_own_group_of_version_2_in_its_namespace(tmp_path: Path) -> None:
    """containerd and podman: the group of the container looks like the root."""
    where = files(
        tmp_path,
        memory__current="5000\n",
        memory__max="9000\n",
        memory__peak="7000\n",
        memory__events="low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n",
        memory__stat="inactive_file 1000\n",
        cpu__stat="usage_usec 2500000\nuser_usec 1\n",
        pids__current="7\n",
    )
    mountinfo = f"600 500 0:28 / {where} ro,nosuid - cgroup2 cgroup rw\n"
    found = container_env.own_group(mountinfo, "0::/\n")
    assert found == {"version": 2, "memory": where, "cpu": where, "pids": where}
    group = Cgroup(found)
    assert (group.oom_kills(), group.memory_limit(), group.memory_peak()) == (1, 9000, 7000)
    assert (group.memory(), group.cpu_seconds(), group.pids()) == (4000, 2.5, 7)
    assert group.identity() and group.limits_memory


def test_own_group_of_version_1(tmp_path: Path) -> None:
    """The kubelet's path is that of the machine; the container sees only its own part, read-only."""
    unlimited = str(0x7FFFFFFFFFFFF000)
    memory = files(
        tmp_path / "memory", memory__usage_in_bytes="5", memory__limit_in_bytes=unlimited, memory__failcnt="3"
    )
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    cpu = files(tmp_path / "cpu", cpuacct__usage="1500000000")
    path = "/kubepods/burstable/pod1/abc"
    mountinfo = (
        f"31 24 0:26 {path} {cpu} ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 24 0:27 {path} {memory} ro - cgroup cgroup rw,memory\n"
        f"33 24 0:29 / {tmp_path}/unified ro - cgroup2 cgroup2 rw\n"
    )
    found = container_env.own_group(mountinfo, f"4:memory:{path}\n2:cpu,cpuacct:{path}\n0::/\n")
    assert found == {"version": 1, "memory": memory, "cpuacct": cpu}
    group = Cgroup(found)
    assert (group.oom_kills(), group.memory_limit(), group.cpu_seconds()) == (2, None, 1.5)
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert (group.oom_kills(), group.memory_hits()) == (None, 3)


def test_no_visible_group() -> None:
    assert container_env.own_group("", "0::/\n") is None
    assert container_env.own_group("600 500 0:28 / /nowhere ro - cgroup2 cgroup rw\n", "0::/\n") is None


def test_limits_of_a_container_are_not_changed() -> None:
    info = container_env.adapted(TaskInfo("r", 1, "worker-0", cpu=1.0, memory=5, pid_namespace=True))
    assert (info.cpu, info.memory, info.pid_namespace) == (None, 5, False)
    assert spawn.affinity(info) is None
    assert "procs" not in (info.cgroup or {})


@pytest.mark.parametrize(
    ("environ", "home", "expected"),
    [
        ({"HOME": "{ok}", "USER": "ada"}, None, {"HOME": "{ok}", "USER": "ada", "LOGNAME": "ada"}),
        ({"HOME": "{ok}/not/there"}, "{ok}", {"HOME": "{ok}"}),
        ({"HOME": "/", "PATH": "/opt/bin"}, "{ok}", {"HOME": "{ok}", "PATH": "/opt/bin"}),
        ({}, "{ok}", {"PATH": container_env.DEFAULT_PATH}),
        ({"STOKER_KEY": "x", "PWD": "/x", "SHLVL": "1", "LANG": "C"}, "{ok}", {"LANG": "C"}),
    ],
)
def test_what_a_body_inherits(
    environ: dict[str, str],
    home: str | None,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(container_env, "_user", lambda: ("nobody", "/nonexistent"))

    def here(text: str) -> str:
        return text.replace("{ok}", str(tmp_path))

    found = container_env.inherited({k: here(v) for k, v in environ.items()}, here(home) if home else None)
    assert {**found, **{k: here(v) for k, v in expected.items()}} == found
    assert {"PATH", "HOME", "USER", "LOGNAME"} <= set(found)
    assert not {"STOKER_KEY", "PWD", "SHLVL"} & set(found)


def test_the_environment_of_the_job_overrides_that_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        container_env, "environ", lambda: {"A": "image", "B": "image", "CUDA_VISIBLE_DEVICES": "3"}
    )
    order = Order(1, 1, "run", env={"B": "job"}, inherit=True)
    env = spawn.environment(
        str(tmp_path), TaskInfo("r", 1, "worker-0", gpus=None), order, {"S": "secret"}, None
    )
    assert (env["A"], env["B"], env["S"], env["CUDA_VISIBLE_DEVICES"]) == ("image", "job", "secret", "3")
    env = spawn.environment(str(tmp_path), TaskInfo("r", 1, "worker-0"), order, {}, None)
    assert env["CUDA_VISIBLE_DEVICES"] == ""


_SHELL = {"OMP_NUM_THREADS": "3"}
_THREADS = dict.fromkeys(spawn.THREADS, "4")


@pytest.mark.parametrize(
    ("image", "env", "threads", "found"),
    [
        ({}, {}, 4, _THREADS),
        ({}, {}, None, {}),
        ({}, _SHELL, 4, _SHELL),
        (_SHELL, {}, 4, _SHELL),
        ({"MKL_NUM_THREADS": "1"}, {}, 4, {**_THREADS, "MKL_NUM_THREADS": "1"}),
    ],
)
def test_numbers_of_threads_are_set_where_none_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: Any, env: Any, threads: Any, found: Any
) -> None:
    """With OMP_NUM_THREADS alone, MKL and OpenBLAS go by it: a default of their own would overrule it."""
    monkeypatch.setattr(container_env, "environ", lambda: image)
    order = Order(1, 1, "run", env=env, inherit=True, threads=threads)
    seen = spawn.environment(str(tmp_path), TaskInfo("r", 1, "worker-0"), order, {}, None)
    assert {name: value for name, value in seen.items() if name in spawn.THREADS} == found


def test_secrets_from_files(tmp_path: Path) -> None:
    """A mounted Secret consists of links into a versioned directory."""
    version = tmp_path / "..2026_01_01"
    version.mkdir()
    (version / "TOKEN").write_text("one\r\ntwo\n")
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "TOKEN").symlink_to("..data/TOKEN")
    info = TaskInfo("r", 1, "worker-0", secrets_dir=str(tmp_path))
    assert spawn.read_secrets("/nowhere", info) == {"TOKEN": "one\r\ntwo\n"}
    info.secrets_dir = str(tmp_path / "none")
    assert spawn.read_secrets("/nowhere", info) == {}
    if os.geteuid() != 0:
        (version / "TOKEN").chmod(0)
        info.secrets_dir = str(tmp_path)
        with pytest.raises(PermissionError):
            spawn.read_secrets("/nowhere", info)


@pytest.mark.parametrize(
    ("memory", "kind"),
    [
        (exit_reason.Memory("boot 1 77", 4, limit=64 << 20), "oom"),
        (exit_reason.Memory("boot 1 77", 3, limit=64 << 20), "lost"),
        (exit_reason.Memory("boot 1 78", 9, limit=64 << 20), "lost"),
    ],
)
def test_a_body_whose_end_was_not_observed(memory: exit_reason.Memory, kind: str) -> None:
    """The count of the same group proves it; the count of another group, after a restart of the container,
    proves nothing."""
    found = exit_reason.lost(STARTED, 5.0, memory)
    assert (found.kind, found.seq, found.generation, found.limit) == (kind, 4, 2, 64 << 20)
    assert exit_reason.lost({**STARTED, "memory": "x"}, 5.0, memory).kind == "lost"


def test_killed_at_the_limit_by_a_kernel_that_does_not_count() -> None:
    facts = exit_reason.ExitFacts(status=9, limit_reached=True, limit=64 << 20)
    assert exit_reason.ending(Order(1, 1, "run"), facts).kind == "oom"
    facts.status = 1 << 8
    assert exit_reason.ending(Order(1, 1, "run"), facts).kind == "exit"
