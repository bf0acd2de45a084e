"""Exact command lines for podman and docker, how their output is read, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.local import shell
from stoker.engine.local.containers import commands, tasks
from stoker.engine.local.containers import runtime as runtimes
from stoker.engine.local.containers.commands import Container, Runtime
from stoker.engine.local.containers.tasks import ContainerTasks
from stoker.engine.local.host import cgroups, resize
from stoker.engine.local.host.gpus import Gpus
from stoker.engine.local.host.isolation import Isolation, Missing
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.engine.local.tasks.records import TaskRecords
from stoker.engine.local.tasks.registry import LocalTask
from stoker.engine.local.tasks.task_info import render
from stoker.errors import EngineUnavailable, Refused
from stoker.settings import Home, Settings
from stoker.spec import Job
from stoker.task import container_layout
from stoker.task.formats import TaskInfo

PODMAN = Runtime("podman", "/usr/bin/podman", "4.3.1")
ROOTLESS = replace(PODMAN, rootless=True)
DOCKER = Runtime("docker", "/usr/bin/docker", "27.1")
PLACE = TaskPlace("digits-7f3k", 2, "worker-0")
BOX = Container(
    name="stoker-abc.digits-7f3k.2.worker-0.1",
    image="harbor.example.com/team/torch:2.9",
    labels={"stoker": "stoker-abc"},
    mounts=[("/home/ada/tasks/t", "rw"), ("/home/ada/bundle", "ro")],
    user=(1000, 1001),
    cpu=1.5,
    memory=1 << 30,
    pids=4096,
    shm=2 << 30,
    open_files=(1024, 4096),
    processes=(3000, 3000),
    command=["/bin/sh", "-c", "x", "y z"],
)
LIMITS = [
    *("--cpus", "1.5", "--memory", "1073741824", "--memory-swap", "1073741824", "--pids-limit", "4096"),
    *("--shm-size", "2147483648", "--ulimit", "nofile=1024:4096", "--ulimit", "nproc=3000:3000"),
]
REST = [
    *("--env", "NVIDIA_VISIBLE_DEVICES=void", "--volume", "/home/ada/tasks/t:/home/ada/tasks/t:rw"),
    *("--volume", "/home/ada/bundle:/home/ada/bundle:ro"),
]


def test_mounts_of_a_job() -> None:
    box = replace(BOX, binds=[("/home/ada/data", "/data", "ro"), ("/t/scratch-1", "/scratch", "rw")])
    words = commands.create(PODMAN, box)
    assert [words[n + 1] for n, word in enumerate(words) if word == "--volume"][2:] == [
        "/home/ada/data:/data:ro",
        "/t/scratch-1:/scratch:rw",
    ]


@pytest.mark.parametrize(
    ("runtime", "user"),
    [
        (PODMAN, ["--user", "1000:1001"]),
        (ROOTLESS, ["--userns", "keep-id"]),
        (DOCKER, ["--user", "1000:1001"]),
        (replace(DOCKER, rootless=True), ["--user", "0:0"]),
    ],
)
def test_a_container_for_each_runtime(runtime: Runtime, user: list[str]) -> None:
    assert commands.create(runtime, BOX) == [
        *(runtime.path, "create", "--name", "stoker-abc.digits-7f3k.2.worker-0.1", "--pull", "never"),
        *("--network", "host", "--security-opt", "label=disable", "--label", "stoker=stoker-abc"),
        *user,
        *LIMITS,
        *REST,
        *("--entrypoint", "/bin/sh", "harbor.example.com/team/torch:2.9", "-c", "x", "y z"),
    ]


def test_limits_that_a_runtime_cannot_set_are_not_asked_of_it() -> None:
    argv = commands.create(replace(ROOTLESS, limits=frozenset({"pids"})), BOX)
    assert not {"--cpus", "--memory", "--memory-swap"} & set(argv) and "--pids-limit" in argv


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (DOCKER, ["--gpus", '"device=GPU-a,GPU-b"']),
        (replace(DOCKER, cdi=frozenset({"GPU-a", "GPU-b"})), None),
        (replace(PODMAN, cdi=frozenset({"GPU-a", "GPU-b"})), None),
    ],
)
def test_gpus(runtime: Runtime, words: list[str] | None) -> None:
    argv = commands.create(runtime, replace(BOX, gpus=("GPU-a", "GPU-b")))
    expected = words or ["--device", "nvidia.com/gpu=GPU-a", "--device", "nvidia.com/gpu=GPU-b"]
    at = argv.index(expected[0])
    assert argv[at : at + len(expected)] == expected
    assert "NVIDIA_VISIBLE_DEVICES=void" not in argv


def test_the_other_commands() -> None:
    assert commands.start(PODMAN, "n") == ["/usr/bin/podman", "start", "n"]
    assert commands.remove(PODMAN, "n") == ["/usr/bin/podman", "rm", "--force", "--time", "0", "n"]
    assert commands.remove(DOCKER, "n") == ["/usr/bin/docker", "rm", "--force", "n"]
    assert commands.update(DOCKER, "n", 2.0, None) == ["/usr/bin/docker", "update", "--cpus", "2", "n"]
    assert commands.update(PODMAN, "n", None, 5) == [
        *("/usr/bin/podman", "update", "--memory", "5", "--memory-swap", "5", "n")
    ]
    assert commands.listing(DOCKER, "h") == [
        *("/usr/bin/docker", "ps", "--all", "--filter", "label=stoker=h", "--format", "{{.Names}}")
    ]
    assert commands.enter(DOCKER, "n", ["sh"]) == [
        *("/usr/bin/docker", "exec", "--interactive", "--tty", "n", "sh")
    ]
    assert commands.create(DOCKER, Container("n", "image"))[-1] == "image"


# -- output of runtimes ------------------------------------------------------------------------------------------


def test_podman_and_docker_are_identified(monkeypatch: pytest.MonkeyPatch) -> None:
    podman = {
        "host": {"cgroupControllers": ["memory", "pids"], "security": {"rootless": True}},
        "version": {"Version": "5.1"},
    }
    docker = {
        "ServerVersion": "27.1",
        "MemoryLimit": True,
        "CpuCfsQuota": True,
        "PidsLimit": False,
        "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"],
    }
    there = {"podman": podman, "docker": docker}
    monkeypatch.setattr(runtimes.shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    monkeypatch.setattr(
        runtimes,
        "_run",
        lambda argv, **_: json.dumps(there[Path(argv[0]).name]),  # the output of `info`
    )
    monkeypatch.setattr(runtimes, "cdi_names", lambda: frozenset({"0"}))
    assert runtimes.find() == Runtime(
        "podman", "/bin/podman", "5.1", True, frozenset({"memory", "pids"}), frozenset({"0"})
    )
    del there["podman"]
    assert runtimes.find() == Runtime("docker", "/bin/docker", "27.1", True, frozenset({"cpu", "memory"}))
    docker["ServerVersion"] = ""  # the client is installed, and no daemon runs
    assert runtimes.find() is None


def test_the_limits_that_podman_can_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_1, version_2 = tmp_path / "1", tmp_path / "2"
    for name in ("cpu", "memory", "systemd"):
        (version_1 / name).mkdir(parents=True)
    delegated = version_2 / "user.slice/user-7.slice/user@7.service"
    delegated.mkdir(parents=True)
    (version_2 / "cgroup.controllers").write_text("cpu io memory pids\n")
    (delegated / "cgroup.controllers").write_text("memory pids\n")
    assert runtimes._controllers(0, version_1) >= {"cpu", "memory"}
    assert runtimes._controllers(7, version_1) == set()
    assert runtimes._controllers(0, version_2) == {"cpu", "io", "memory", "pids"}
    assert runtimes._controllers(7, version_2) == {"memory", "pids"}
    assert runtimes._controllers(8, version_2) == set(), "nothing is delegated to this one"

    monkeypatch.setattr(runtimes.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(runtimes, "_run", lambda argv, **_: pytest.fail("podman was started"))
    monkeypatch.setattr(runtimes, "_controllers", lambda user: {"memory", "io"})
    monkeypatch.setattr(runtimes.os, "geteuid", lambda: 7)
    found = runtimes.describe()
    assert found is not None and found.limits == {"memory"} and found.rootless
    assert commands.summary(found) == "podman /bin/podman (rootless, without limits on cpu, pids)"


def test_states() -> None:
    raw = {"State": {"Running": False, "Pid": 0, "ExitCode": 137, "OOMKilled": True}}
    assert commands.state_of(raw) == (False, 0, 137, True)
    assert commands.failure("podman", "Trying...\nError: no such tag\n  more\n") == "Error: no such tag"
    assert commands.failure("podman", "") == "podman gave no reason"


def test_gpus_of_a_cdi_specification(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n- name: GPU-a\n- name: all\n"
    )
    (tmp_path / "other.json").write_text('{"kind": "vendor.com/net", "devices": [{"name": "x"}]}')
    (tmp_path / "broken.yaml").write_text("{")
    assert runtimes.cdi_names((str(tmp_path), "/nowhere")) == {"0", "GPU-a", "all"}


# -- tasks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> ContainerTasks:
    return ContainerTasks(
        Settings(Home(tmp_path)), "stoker-abc", Gpus(), (1024, 4096), set, TaskRecords(tmp_path / "records")
    )


def attempt(**job: Any) -> Attempt:
    asked = Job.from_json({"run": "x", **job})
    return Attempt(
        "digits-7f3k", 2, (TaskPlan("worker-0", cpu=1.0, memory=1 << 30, gpus=("GPU-a",)),), job=asked
    )


def test_a_task_with_the_launcher_inside(made: ContainerTasks) -> None:
    wanted = attempt(image="team/torch:2")
    (plain,) = render(wanted, Isolation(tree=cgroups.CgroupTree(1, {"memory": "/m"})))
    info = made.info(PODMAN, plain, wanted)
    assert (info.cgroup, info.pid_namespace, info.workdir) == (None, True, ".")
    assert (info.cpu, info.memory, info.gpus) == (1.0, 1 << 30, ["GPU-a"])
    assert info.container == {"runtime": "podman", "image": "team/torch:2"}
    pinned = replace(wanted, image={"reference": "team/torch@sha256:1"})
    assert made.info(PODMAN, plain, pinned).container == {"runtime": "podman", "image": "team/torch@sha256:1"}


def test_a_task_without_a_launcher_inside(made: ContainerTasks) -> None:
    wanted = attempt(image="team/torch:2", launcher="none")
    (plain,) = render(wanted, Isolation(processes="pid namespace"))
    info = made.info(DOCKER, plain, wanted)
    assert (info.cgroup, info.pid_namespace, info.cpu, info.memory, info.pids) == (
        None,
        False,
        None,
        None,
        None,
    )
    assert info.container is not None
    assert info.container["name"] == "stoker-abc.digits-7f3k.2.worker-0.1"
    assert info.container["memory"] == 1 << 30
    run = info.container["run"]
    assert run[:6] == ["/usr/bin/docker", "run", "--name", info.container["name"], "--pull", "missing"]
    assert "--volume" not in run and "--user" not in run and "1073741824" in run
    assert TaskInfo.from_json(json.loads(json.dumps(info.to_json()))) == info


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"launcher": "none"}, "`launcher` needs an image here"),
        ({"python": "/usr/bin/python3"}, "`python` needs an image here"),
        ({"resources": {"shm": "4Ti"}}, "`resources.shm` needs an image here"),
        ({"inputs": {"d": "file:///no/such/place"}}, "there is no /no/such/place on this machine"),
        ({"image": "x", "launcher": "none", "inputs": {"d": "file:///usr"}}, "`inputs` needs the launcher"),
        ({"image": "x", "launcher": "none", "setup": "make"}, "`setup` needs the launcher"),
        ({"image": "x", "launcher": "none", "python": "/p"}, "`python` needs the launcher"),
        ({"image": "x", "resources": {"gpu": 1}}, "podman cannot assign GPUs here"),
    ],
)
def test_refused(made: ContainerTasks, job: dict[str, Any], words: str) -> None:
    made._runtime = PODMAN
    with pytest.raises(Refused, match=words) as caught:
        made.refuse(Job.from_json({"run": "x", **job}))
    assert caught.value.hint and caught.value.details["key"]


def test_mounts_without_an_image_have_a_way(made: ContainerTasks) -> None:
    job = Job.from_json({"run": "x", "mounts": {"/data": "/usr"}})
    with pytest.raises(Refused, match="`mounts` needs an image here") as caught:
        made.refuse(job)
    assert "file:///PATH" in str(caught.value.hint) and "ln -s" in str(caught.value.hint)


def test_the_inputs_of_a_container_are_read_only() -> None:
    job = Job.from_json({"run": "x", "image": "y", "inputs": {"d": "file:///data/set"}})
    assert tasks._binds(job, "/task") == [("/data/set", "/stoker/inputs/d", "ro")]


def test_not_refused(made: ContainerTasks) -> None:
    made._runtime = replace(PODMAN, cdi=frozenset({"GPU-a"}))
    for job in (
        {},
        {"resources": {"shm": "1Mi"}},
        {"inputs": {"d": "file:///usr/"}},
        {"image": "x", "python": "/p", "resources": {"gpu": 1, "shm": "9Gi"}},
    ):
        made.refuse(Job.from_json({"run": "x", **job}))


def test_a_machine_without_a_runtime(
    made: ContainerTasks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job.from_json({"run": "x", "image": "y"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="image: needs podman or docker on this machine"):
        made.refuse(job)
    # A docker client without a running daemon is no runtime.
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(Refused, match="image: needs podman or docker on this machine"):
        made.refuse(job)
    with pytest.raises(tasks.EngineError, match="podman or docker"):
        asyncio.run(made.runtime())


# -- while they run ----------------------------------------------------------------------------------------------


def group(root: Path, version: int, used: int, cache: int = 0) -> dict[str, Any]:
    root.mkdir()
    names = {
        1: {"memory.usage_in_bytes": used, "memory.limit_in_bytes": 100 << 20, "cpu.cfs_quota_us": -1},
        2: {"memory.current": used, "memory.max": "max", "cpu.max": "max 100000"},
    }
    for name, value in names[version].items():
        (root / name).write_text(f"{value}\n")
    (root / "memory.stat").write_text(f"total_inactive_file {cache}\ninactive_file {cache}\n")
    return {"version": version, "procs": [f"{root}/cgroup.procs"], "memory": str(root), "cpu": str(root)}


@pytest.mark.parametrize("version", [1, 2])
def test_resizing_a_group(version: int, tmp_path: Path) -> None:
    record = group(tmp_path / "g", version, used=50 << 20, cache=10 << 20)
    assert resize.resize(record, Isolation(), cpu=2.0, memory=200 << 20) is None
    files = {path.name: path.read_text() for path in (tmp_path / "g").iterdir()}
    if version == 1:
        assert files["memory.limit_in_bytes"] == files["memory.memsw.limit_in_bytes"] == str(200 << 20)
        assert (files["cpu.cfs_quota_us"], files["cpu.shares"]) == ("200000", "2048")
    else:
        assert (files["memory.max"], files["cpu.max"], files["cpu.weight"]) == (
            str(200 << 20),
            "200000 100000",
            "200",
        )
    assert resize.resize(record, Isolation(), cpu=None, memory=45 << 20) is None
    reason = resize.resize(record, Isolation(), cpu=0.5, memory=41 << 20)
    assert reason == "it uses 40 MiB now, too much for a limit of 41 MiB"


def test_swap_goes_first_when_there_is_to_be_more(tmp_path: Path) -> None:
    record = group(tmp_path / "g", 1, used=1)
    for memory, first in ((200 << 20, "memory.memsw.limit_in_bytes"), (50 << 20, "memory.limit_in_bytes")):
        (path, _), *_ = cgroups.changes(record, cgroups.Limits(memory=memory))
        assert Path(path).name == first


def test_a_refused_resize_has_a_reason(tmp_path: Path) -> None:
    isolation = Isolation(missing={"cpu": Missing("no cpu cgroup: not root; tasks are bound to whole cores")})
    reason = resize.resize(None, isolation, cpu=2.0, memory=None)
    assert (
        reason
        == "its cpu limit cannot be changed while it runs: no cpu cgroup: not root; tasks are bound to whole cores"
    )
    record = group(tmp_path / "g", 1, used=1)
    (tmp_path / "g" / "cpu.cfs_quota_us").unlink()
    (tmp_path / "g" / "cpu.cfs_quota_us").mkdir()
    reason = resize.resize(record, Isolation(), cpu=2.0, memory=300 << 20)
    assert reason is not None and reason.startswith("the kernel refused the new size: ")
    assert (tmp_path / "g" / "memory.limit_in_bytes").read_text() == str(100 << 20)


def test_shell_commands() -> None:
    known = LocalTask(PLACE, "/home/ada/tasks/t", TaskInfo("digits-7f3k", 2, "worker-0"), container="n")
    argv = shell.container_argv(DOCKER, known, "/bundle")
    assert argv[:5] == ["/usr/bin/docker", "exec", "--interactive", "--tty", "n"]
    assert argv[5:] == container_layout.command("/bundle", "shell", "/home/ada/tasks/t")


@pytest.mark.parametrize(
    ("said", "absent", "away"),
    [
        ("Error response from daemon: No such container: x", True, False),
        ('Error: no container with name or ID "x" found: no such container', True, False),
        ("Error: open /run/x: no such file or directory", False, False),
        ("Cannot connect to the Docker daemon at unix:///x.", False, True),
        ("failed to connect to the docker API at unix:///x: connect: no such file or directory", False, True),
    ],
)
def test_a_missing_container_and_a_runtime_that_does_not_answer(
    tmp_path: Path, said: str, absent: bool, away: bool
) -> None:
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    docker = Runtime("docker", str(program))
    if absent:
        assert runtimes.state(docker, "x") is None
    else:
        with pytest.raises(EngineUnavailable):
            runtimes.state(docker, "x")
    if away:
        with pytest.raises(EngineUnavailable):
            runtimes.image(docker, "x")
    else:
        assert runtimes.image(docker, "x") is None


@pytest.mark.parametrize("final", [False, True])
def test_work_in_a_thread_is_awaited_after_any_number_of_cancellations(final: bool) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> int:
        may_end.wait(60)
        ended.set()
        return 7

    async def story() -> None:
        waiting = asyncio.create_task(runtimes.uninterrupted(asyncio.to_thread(work), final=final))
        for _ in range(3):
            await asyncio.sleep(0.01)
            waiting.cancel()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        may_end.set()
        if final:
            assert await waiting == 7
        else:
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert ended.is_set()

    asyncio.run(story())


def test_an_image_without_python_is_named_also_when_its_container_was_seen_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The container ends in the moment after it was seen."""
    info = TaskInfo(run="run-1", attempt=1, task="worker-0", pid_namespace=True)
    known = LocalTask(TaskPlace("run-1", 1, "worker-0"), "/nowhere", info, container="name")
    ended = runtimes.State(pid=0, running=False, exit_code=container_layout.NO_PYTHON, out_of_memory=False)
    monkeypatch.setattr(runtimes, "state", lambda *_: ended)
    monkeypatch.setattr(runtimes, "remove", lambda *_: None)
    monkeypatch.setattr(
        runtimes, "last_output", lambda *_: "no Python 3.9 or newer in this image (PATH is /bin)\n"
    )
    assert tasks._settle(DOCKER, known, None)  # type: ignore[arg-type]
    assert known.cause == "image" and "no Python 3.9 or newer" in known.evidence["message"]
    known.cause = ""
    monkeypatch.setattr(runtimes, "last_output", lambda *_: "train.sh: not found\n")
    assert tasks._settle(DOCKER, known, None)  # type: ignore[arg-type]
    assert known.cause == "", "a command of the user's can end with that code too"
