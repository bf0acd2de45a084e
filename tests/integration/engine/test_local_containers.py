"""Tasks in real containers of podman and docker: started, adopted, stopped, resized, entered, proven gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.base import Attempt, Handle, Observation, Presence, Resizes, Shows, TaskPlan
from stoker.engine.local.containers import commands, tasks
from stoker.engine.local.host import cgroups, processes
from stoker.errors import Refused
from stoker.linux.syscalls import children
from stoker.spec import Job
from stoker.task import formats, layout
from support import container_runtimes
from support.container_runtimes import BARE, IMAGE, Runtime

FOREVER = "trap 'echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done"


@pytest.fixture(scope="module", params=["podman", "docker"])
def storage(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    if why := container_runtimes.missing(request.param):
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="stoker-boxes-") as root:
        made = container_runtimes.RUNTIMES[request.param](Path(root))
        try:
            made.make_images()
            yield made
        finally:
            made.close()


@pytest.fixture
def runtime(storage: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    for name, value in storage.env.items():
        monkeypatch.setenv(name, value)
    yield storage
    left = storage("ps", "--all")
    storage.remove_all()  # one failure must not affect later tests
    assert len(left.splitlines()) == 1, left + storage.last_words()


async def submit(box: Any, name: str = "run-1", *, plan: TaskPlan | None = None, **job: Any) -> Handle:
    wanted = {"image": IMAGE, "run": "true", **job}
    asked = Job.from_json({key: value for key, value in wanted.items() if value is not None})
    box.engine.refuse(asked)
    return await box.engine.submit(Attempt(name, 1, (plan or TaskPlan("worker-0"),), job=asked))


async def order(box: Any, handle: Handle, *argv: str, **more: Any) -> None:
    directory = await box.directory(handle)

    async def there() -> bool | None:
        seen = {found.run: found for found in await box.engine.observe()}[handle["run"]]
        assert seen.presence is Presence.ALIVE, seen
        return directory.exists() or None

    await box.until(there, "the task directory")
    directory.write_order(formats.Order(1, 1, "run", argv=list(argv), inherit=True, grace=30, **more))


async def nothing_left(box: Any, runtime: Runtime) -> None:
    """A container may exist for a moment after its processes have ended."""

    async def look() -> bool | None:
        return await asyncio.to_thread(runtime, "ps", "--all", "--quiet") == "" or None

    await box.until(look, "the last container to be removed")


async def stopped(box: Any, handle: Handle) -> None:
    """Kill the task and wait until it is proven gone."""
    await box.engine.stop(handle, grace=timedelta(0))
    assert (await observed(box)).presence is Presence.GONE


async def observed(box: Any, run: str = "run-1") -> Observation:
    return next(found for found in await box.engine.observe() if found.run == run)


def test_a_task_in_a_container(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        plan = TaskPlan("worker-0", cpu=0.5, memory=128 << 20, pids=200)
        handle = await submit(box, plan=plan, resources={"shm": "32Mi"})
        assert (await observed(box)).waiting.startswith(("looking for", "pulling", "starting"))
        await order(box, handle, "python3", "-c", SHOW, env={"LR": "0.1"})
        assert (await box.ended(handle)).code == 0, await box.lines(handle)
        shown = json.loads((await box.lines(handle))[-1])
        directory = await box.directory(handle)
        env = shown["env"]
        assert (shown["cwd"], shown["uid"], shown["parent"]) == ("/workdir", os.getuid(), 1)
        assert (env["OF_THE_IMAGE"], env["LR"], env["STOKER_TASK_DIR"]) == ("yes", "0.1", directory.root)
        assert (env["CUDA_VISIBLE_DEVICES"], env["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")
        assert shown["shm"] == 32 << 20
        assert shown["home"] == sorted(["engine", "setups", "tasks"])
        assert (shown["tasks"], shown["engine"]) == (["run-1"], ["bundle"])
        (name,) = runtime("ps", "--format", "{{.Names}}").split()
        assert name == commands.name_of(cgroups.home_name(box.home.root), _place(), 1)
        limits = json.loads(runtime("inspect", name))[0]["HostConfig"]
        assert (limits["Memory"], limits["PidsLimit"], limits["NanoCpus"]) == (128 << 20, 200, 5 * 10**8)
        # Another server adopts the task. After a release it ends and leaves nothing.
        await box.restart()
        assert (await observed(box)).presence is Presence.ALIVE
        directory.write_order(formats.Order(2, 1, "release"))
        assert "is gone" in (await box.gone()).proof
        await nothing_left(box, runtime)

    box.run(story)


SHOW = """
import json, os
room = os.statvfs("/dev/shm")
home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.environ["STOKER_TASK_DIR"]))))
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "uid": os.getuid(), "parent": os.getppid(),
    "shm": room.f_blocks * room.f_frsize, "home": sorted(os.listdir(home)), "tasks": os.listdir(home + "/tasks"),
    "engine": os.listdir(home + "/engine")}))
"""


def _place() -> Any:
    from stoker.engine.local.tasks.directories import TaskPlace

    return TaskPlace("run-1", 1, "worker-0")


def test_the_image_s_own_command_and_a_setup(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        handle = await submit(box, run=None)
        await order(box, handle)
        assert (await box.ended(handle)).code == 0, await box.lines(handle)
        assert await box.lines(handle) == ["of the image"]
        other = await submit(box, "run-2")
        directory = await box.directory(other)
        await box.until(lambda: _true(Path(directory.root, "code").is_dir()), "the task directory")
        Path(directory.root, "code", "x.py").touch()
        setup = {"command": "echo made > made", "directory": f"{box.home.setups}/key1", "key": "key1"}
        await order(box, other, "sh", "-c", "cat made; echo $VIRTUAL_ENV", setup=setup)
        assert (await box.ended(other)).code == 0, await box.lines(other)
        made, where = (await box.lines(other))[-2:]
        assert (
            made == "made" and where.startswith(f"{box.home.setups}/image-") and where.endswith("/key1/env")
        )

    box.run(story)


def test_mounts_and_arguments_of_the_job(box: Any, runtime: Runtime, tmp_path: Path) -> None:
    """Folders at the job's paths, a scratch volume, and the image's command with the job's arguments."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("from outside\n")
    (tmp_path / "out").mkdir()
    mounts = {"/my/data": f"{tmp_path}/data:ro", "/out": f"{tmp_path}/out", "/scratch": "empty"}

    async def story() -> None:
        handle = await submit(box, mounts=mounts, run=None, args=["/my/data/x", "mark"])
        await order(box, handle)
        assert (await box.ended(handle)).code == 0, await box.lines(handle)
        assert await box.lines(handle) == ["from outside", "of the image"]
        other = await submit(box, "run-2", mounts=mounts)
        await order(
            box,
            other,
            "sh",
            "-c",
            "echo 1 > /out/y; echo 2 > /scratch/z && cat /scratch/z; ! touch /my/data/w",
        )
        assert (await box.ended(other)).code == 0, await box.lines(other)
        assert "2" in await box.lines(other)
        assert (tmp_path / "out" / "y").read_text() == "1\n"
        third = await submit(box, "run-3", image=BARE, launcher="none", run=None, args=["mark", "mark"])
        await order(box, third)
        assert (await box.ended(third)).code == 0, await box.lines(third)
        assert await box.lines(third) == ["of the image", "of the image"]

    box.run(story)
    for wrong in ({"/d": f"{tmp_path}/none"}, {"/d": "pvc://claim"}):
        with pytest.raises(Refused):
            box.engine.refuse(Job.from_json({"image": IMAGE, "run": "x", "mounts": wrong}))
    with pytest.raises(Refused, match="needs an image here"):
        box.engine.refuse(Job.from_json({"run": "x", "mounts": {"/d": "empty"}}))


async def _true(value: bool) -> bool | None:
    return value or None


def test_stopping_gives_the_body_its_grace(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        handle = await submit(box)
        await order(box, handle, "sh", "-c", FOREVER)
        await box.said(handle, "up")
        await box.engine.stop(handle, grace=timedelta(seconds=30))
        ending = await box.ended(handle)
        assert (ending.kind, ending.code) == ("stopped", 3)
        assert "saved" in await box.lines(handle)
        assert (await observed(box)).presence is Presence.GONE
        await nothing_left(box, runtime)
        await box.engine.remove(handle)

    box.run(story)


def test_out_of_memory_and_other_kills(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        limit = 96 << 20
        greedy = await submit(box, "run-1", plan=TaskPlan("worker-0", memory=limit))
        killed = await submit(box, "run-2")
        await order(box, greedy, "python3", "-c", "b = bytearray(300 << 20)")
        await order(box, killed, "sh", "-c", FOREVER)
        ending = await box.ended(greedy)
        assert (ending.kind, ending.limit, ending.signal) == ("oom", limit, signal.SIGKILL)
        await box.said(killed, "up")
        inside = children(processes.Identity.from_json(_record(box, "run-2")).pid)
        assert await box.engine.hurt(killed, "worker-0", "launcher")
        seen = await box.gone("run-2")
        assert "is gone" in seen.proof
        assert inside and not any(processes.stat_fields(pid) for pid in inside)

    box.run(story)


def _record(box: Any, run: str = "run-1") -> dict[str, Any]:
    return json.loads(box.record(run).read_text())


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("localhost:1/no/such:1", "cannot be pulled"),
        (BARE, "no Python 3.9 or newer in this image"),
    ],
)
def test_an_image_that_cannot_be_used(box: Any, runtime: Runtime, image: str, words: str) -> None:
    async def story() -> None:
        handle = await submit(box, image=image)
        seen = await box.gone()
        assert seen.cause == "image" and words in seen.proof and seen.evidence["hint"]
        await nothing_left(box, runtime)
        await box.engine.stop(handle, grace=timedelta(0))
        await box.engine.remove(handle)
        assert await box.engine.observe() == []

    box.run(story)


def test_a_server_that_died_while_it_started_one(box: Any, runtime: Runtime) -> None:
    """A started container without a record is found by its name; one that never started is removed."""

    async def story() -> None:
        handle = await submit(box)
        await order(box, handle, "sh", "-c", FOREVER)
        await box.said(handle, "up")
        directory = await box.directory(handle)
        record = _record(box)
        await box.engine.close()
        box.record().unlink()
        box.engine = box.make()
        await box.until(lambda: _alive(box), "the container to be found")
        assert _record(box)["pid"] == record["pid"]
        await box.engine.stop(handle, grace=timedelta(0))
        await box.engine.remove(handle)

        info = formats.TaskInfo(
            "run-1", 1, "worker-0", container={"runtime": runtime.program, "image": IMAGE}
        )
        info.pid_namespace = True
        Path(directory.root).mkdir(parents=True)
        formats.write_json(f"{directory.root}/{layout.TASK}", info.to_json())
        name = commands.name_of(cgroups.home_name(box.home.root), _place(), 1)
        runtime("create", "--name", name, "--label", f"stoker={cgroups.home_name(box.home.root)}", IMAGE)
        await box.restart()
        assert (await box.gone()).proof == "its launcher was never started"
        await nothing_left(box, runtime)

    box.run(story)


async def _alive(box: Any) -> bool | None:
    return (await observed(box)).presence is Presence.ALIVE or None


def test_unknown_containers_are_removed(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        home = cgroups.home_name(box.home.root)
        runtime("create", "--name", f"{home}.gone.1.worker-0.1", "--label", f"stoker={home}", IMAGE)
        runtime("create", "--name", "of-another-owner", IMAGE)
        handle = await submit(box)
        await order(box, handle, "true")
        await box.ended(handle)

        async def tidy() -> bool | None:
            names = await asyncio.to_thread(runtime, "ps", "--all", "--format", "{{.Names}}")
            return len(names.split()) == 2 or None

        await box.until(tidy, "the leftover to be removed")
        assert "of-another-owner" in runtime("ps", "--all", "--format", "{{.Names}}")
        runtime("rm", "of-another-owner")

    box.run(story)


def _instead(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run a script before the runtime, in the test's folder. `$real` is the real runtime."""
    folder = tmp_path / "instead"
    folder.mkdir()
    real = runtime.root / "bin" / runtime.program
    program = folder / runtime.program
    program.write_text(
        f'#!/bin/sh\nreal={real}\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\ncd {tmp_path}\n{script}\nexec $real "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(tasks, "PAUSES", (0.1, 60.0))


def test_a_start_that_is_given_up_leaves_nothing(
    box: Any, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gives up a start that the runtime still completes: the container is found and ended."""
    _instead(runtime, tmp_path, monkeypatch, 'if [ "$1" = start ]; then : > asked; sleep 1; fi')

    async def story() -> None:
        handle = await submit(box)
        await box.until(lambda: _true((tmp_path / "asked").exists()), "the start")
        await stopped(box, handle)
        await nothing_left(box, runtime)

    box.run(story)


def test_a_container_that_comes_late_is_removed(
    box: Any, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docker's daemon creates the container although the command that requested it was killed."""
    script = """
if [ "$1" = create ]; then
    setsid sh -c ': > asked; sleep 2; "$@" > made' sh "$real" "$@" </dev/null >/dev/null 2>&1 &
    sleep 1000
fi"""
    _instead(runtime, tmp_path, monkeypatch, script)

    async def story() -> None:
        handle = await submit(box)
        await box.until(lambda: _true((tmp_path / "asked").exists()), "the request")
        await stopped(box, handle)
        made = tmp_path / "made"
        await box.until(lambda: _true(made.exists() and made.read_text() != ""), "the late container")
        await nothing_left(box, runtime)

    box.run(story)


def test_a_container_that_cannot_be_removed_at_once(
    box: Any, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
if [ "$1" = rm ] && [ "$(cat refused)" != 3 ]; then
    echo $(( $(cat refused) + 1 )) > refused
    echo "Error: device or resource busy" >&2; exit 1
fi"""
    (tmp_path / "refused").write_text("0")
    _instead(runtime, tmp_path, monkeypatch, script)

    async def story() -> None:
        handle = await submit(box)
        await order(box, handle, "true")
        await box.ended(handle)
        await stopped(box, handle)
        await nothing_left(box, runtime)
        assert (tmp_path / "refused").read_text().strip() == "3"

    box.run(story)


def test_a_container_that_may_run_is_not_reported_gone(
    box: Any, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime reported a failed start and could not remove the container: it is found and continues."""
    script = """
if [ "$1" = start ]; then "$real" "$@"; echo "Error: timed out" >&2; exit 1; fi
if [ "$1" = rm ] && [ ! -e refused ]; then : > refused; echo "Error: timed out" >&2; exit 1; fi"""
    _instead(runtime, tmp_path, monkeypatch, script)

    async def story() -> None:
        handle = await submit(box)

        async def alive() -> bool | None:
            seen = await observed(box)
            assert seen.presence is not Presence.GONE, seen
            return ((tmp_path / "refused").exists() and seen.presence is Presence.ALIVE) or None

        await box.until(alive, "it to be found")
        await order(box, handle, "echo", "here")
        assert (await box.ended(handle)).code == 0
        assert await box.lines(handle) == ["here"]

    box.run(story)


def test_resizing_and_entering(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        assert isinstance(box.engine, Resizes) and isinstance(box.engine, Shows)
        handle = await submit(box, plan=TaskPlan("worker-0", cpu=0.5, memory=128 << 20))
        await order(box, handle, "sh", "-c", FOREVER, env={"LR": "0.1"})
        await box.said(handle, "up")
        assert await box.engine.resize(handle, "worker-0", cpu=1.5, memory=256 << 20) is None
        reason = await box.engine.resize(handle, "worker-0", cpu=None, memory=2 << 20)
        assert reason is not None and "too much for a limit of 2 MiB" in reason
        way = await box.engine.shell(handle, "worker-0")
        argv = [word for word in way["argv"] if word != "--tty"]
        done = subprocess.run([*argv, "sh", "-c", LIMITS], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["0.1", "/workdir", str(256 << 20), "150000"], done.stderr

    box.run(story)


LIMITS = (
    "echo $LR; pwd; cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/cpu/cpu.cfs_quota_us"
    " 2>/dev/null || { cat /sys/fs/cgroup/memory.max; read quota _ </sys/fs/cgroup/cpu.max; echo $quota; }"
)


def test_without_a_launcher_the_image_runs_as_it_is(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        handle = await submit(box, image=BARE, launcher="none", run=None, secrets=["TOKEN"])
        directory = await box.directory(handle)
        directory.write_secrets({"TOKEN": "very secret"})
        await order(box, handle)
        assert (await box.ended(handle)).code == 0, await box.lines(handle)
        assert await box.lines(handle) == ["of the image"]
        other = await submit(
            box, "run-2", image=BARE, launcher="none", plan=TaskPlan("worker-0", memory=64 << 20)
        )
        await order(
            box, other, "sh", "-c", "echo $STOKER_RUN $LR; ls /tmp; echo up; " + FOREVER, env={"LR": "0.1"}
        )
        await box.said(other, "up")
        assert (await box.lines(other))[:2] == ["run-2 0.1", "up"]
        await box.engine.stop(other, grace=timedelta(seconds=30))
        ending = await box.ended(other)
        assert (ending.kind, ending.code) == ("stopped", 3)
        await nothing_left(box, runtime)

    box.run(story)


def test_without_a_launcher_a_lost_one_leaves_no_container(box: Any, runtime: Runtime) -> None:
    async def story() -> None:
        handle = await submit(box, image=BARE, launcher="none")
        await order(box, handle, "sh", "-c", "echo up; sleep 1000")
        await box.said(handle, "up")
        await box.engine.hurt(handle, "worker-0", "launcher")
        await box.gone()
        await nothing_left(box, runtime)
        bad = await submit(box, "run-2", image="localhost:1/no/such:1", launcher="none")
        await order(box, bad, "true")
        ending = await box.ended(bad)
        assert ending.kind == "start-failed" and "could not be started" in ending.message

    box.run(story)


def test_a_machine_without_a_runtime_refuses(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    engine = box.make()
    with pytest.raises(Refused, match="image: needs podman or docker on this machine") as caught:
        engine.refuse(Job.from_json({"image": IMAGE, "run": "true"}))
    assert caught.value.hint
    asyncio.run(engine.close())


def test_a_home_that_never_had_an_image_starts_no_podman(
    box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an ordinary user, every first podman command leaves a process behind."""
    podman = tmp_path / "bin" / "podman"
    podman.parent.mkdir()
    podman.write_text(f"#!/bin/sh\n: > {tmp_path}/started\nexit 1\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{podman.parent}:{os.environ['PATH']}")

    async def story() -> None:
        handle = await box.start("print('hello')")
        await box.ended(handle)
        await box.restart()
        await box.engine.observe()
        assert {"containers"} <= {fact["name"] for fact in await box.engine.check()}

    box.run(story)
    assert not (tmp_path / "started").exists()
