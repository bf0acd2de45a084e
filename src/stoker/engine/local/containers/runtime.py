"""Calls to podman or docker. Functions that are not `async` block: call them from a thread."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from stoker.engine.local.containers import commands
from stoker.engine.local.containers.commands import Runtime
from stoker.engine.local.host import processes
from stoker.errors import EngineError, EngineUnavailable

T = TypeVar("T")

CALL_SECONDS = 60.0
"""Seconds that a runtime may take for anything except `pull` and `create`, which copy an image."""
INFO_SECONDS = 15.0
"""Seconds for the check whether the runtime works."""
LATE_SECONDS = 600.0
"""Seconds in which a container may still appear after its creation was cancelled: a daemon continues without its client."""
END_SECONDS = 10.0
"""Seconds that a cancelled client may take to end by itself."""
DOCKER = "unix:///var/run/docker.sock"
CGROUPS = Path("/sys/fs/cgroup")
CDI = ("/etc/cdi", "/var/run/cdi")
MISSING = "image: needs podman or docker on this machine"


class ImageUnavailable(EngineError):
    """The image is not on this machine and cannot be pulled."""


@dataclass(frozen=True)
class Image:
    id: str
    entrypoint: tuple[str, ...]
    arguments: tuple[str, ...]
    """The default arguments of the entrypoint."""


@dataclass(frozen=True)
class State:
    running: bool
    pid: int
    exit_code: int
    out_of_memory: bool


def likely() -> bool:
    """Whether a runtime probably exists, by a quick check."""
    if shutil.which("podman") is not None:
        return True
    return shutil.which("docker") is not None and _answers(os.environ.get("DOCKER_HOST", DOCKER))


def _answers(host: str) -> bool:
    """Whether a docker daemon listens. A remote one is checked when it is needed."""
    if not host.startswith("unix://"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(host.removeprefix("unix://"))
        except OSError:
            return False
    return True


def find() -> Runtime | None:
    """The runtime that works, podman before docker; None: there is none. A client without its daemon does not count."""
    for program in commands.RUNTIMES:
        path = shutil.which(program)
        if path is None:
            continue
        try:
            how = "json" if program == "podman" else "{{json .}}"
            raw = json.loads(_run([path, "info", "--format", how], timeout=INFO_SECONDS))
            return _podman(path, raw) if program == "podman" else _docker(path, raw)
        except (EngineError, ValueError):
            continue
    return None


def describe() -> Runtime | None:
    """Like `find`, but without a call to podman: its first call by an ordinary user leaves a process and directories
    behind. So its version is not known, and its limits are those that the machine would allow."""
    path = shutil.which("podman")
    if path is None:
        return find()  # docker's daemon runs in any case
    rootless = os.geteuid() != 0
    limits = frozenset({"cpu", "memory", "pids"} & _controllers(os.geteuid()))
    return Runtime("podman", path, rootless=rootless, limits=limits, cdi=cdi_names())


def _controllers(user: int, top: Path = CGROUPS) -> set[str]:
    """The controllers podman may use: in version 2 those that systemd delegates to the user, in version 1 only as root."""
    if (top / "cgroup.controllers").exists():
        inside = f"user.slice/user-{user}.slice/user@{user}.service" if user else ""
        return set(processes.read_text(str(top / inside / "cgroup.controllers")).split())
    return set() if user else {path.name for path in top.glob("*")}


def _podman(path: str, raw: dict[str, Any]) -> Runtime:
    host = raw.get("host") or {}
    controllers = set(host.get("cgroupControllers") or ())
    return Runtime(
        program="podman",
        path=path,
        version=str((raw.get("version") or {}).get("Version", "")),
        rootless=bool((host.get("security") or {}).get("rootless")),
        limits=frozenset({"cpu", "memory", "pids"} & controllers),
        cdi=cdi_names(),
    )


def _docker(path: str, raw: dict[str, Any]) -> Runtime:
    if not raw.get("ServerVersion"):
        raise EngineUnavailable("the docker daemon does not answer")
    flags = {"cpu": "CpuCfsQuota", "memory": "MemoryLimit", "pids": "PidsLimit"}
    return Runtime(
        program="docker",
        path=path,
        version=str(raw["ServerVersion"]),
        rootless=any("rootless" in str(option) for option in raw.get("SecurityOptions") or ()),
        limits=frozenset(kind for kind, flag in flags.items() if raw.get(flag)),
        cdi=cdi_names() if raw.get("CDISpecDirs") else frozenset(),
    )


def cdi_names(places: Sequence[str] = CDI) -> frozenset[str]:
    """The GPUs that the machine's CDI specifications name."""
    found: set[str] = set()
    for path in (path for place in places for path in sorted(Path(place).glob("*.*"))):
        try:
            raw = yaml.safe_load(path.read_text()) if path.suffix in (".yaml", ".yml", ".json") else None
        except (OSError, ValueError, yaml.YAMLError):
            continue  # a file of another program; without it no GPU is found, which `refuse` reports
        if isinstance(raw, dict) and raw.get("kind") == "nvidia.com/gpu":
            found.update(str(device.get("name")) for device in raw.get("devices") or ())
    return frozenset(found)


def image(runtime: Runtime, reference: str) -> Image | None:
    """The image if it is on this machine, else None."""
    try:
        raw = json.loads(_run([runtime.path, "image", "inspect", reference]))[0]
    except EngineUnavailable:
        raise
    except (EngineError, ValueError, IndexError):
        return None
    config = raw.get("Config") or {}
    entrypoint, arguments = (
        tuple(str(word) for word in config.get(key) or ()) for key in ("Entrypoint", "Cmd")
    )
    return Image(str(raw.get("Id", "")).removeprefix("sha256:"), entrypoint, arguments)


async def pull(runtime: Runtime, reference: str) -> None:
    """Pull the image. Raises ImageUnavailable with the registry's reason."""
    try:
        await _run_long([runtime.path, "pull", "--quiet", reference])
    except EngineUnavailable:
        raise
    except EngineError as exc:
        raise ImageUnavailable(
            f"the image {reference} cannot be pulled: {exc.message}",
            hint=f"Check its name, and `{runtime.program} login` for its registry.",
        ) from exc


async def create(runtime: Runtime, container: commands.Container) -> None:
    """Create the container, replacing one of that name that was never started. May take long: without storage layers,
    or with mapped users, the whole image is copied. After a cancel or failure the container may still appear."""
    argv = commands.create(runtime, container)
    until, removed = time.monotonic() + LATE_SECONDS, False
    while True:
        try:
            await _run_long(argv)
            return
        except EngineError as exc:
            there = await uninterrupted(asyncio.to_thread(state, runtime, container.name)) is not None
            if there and not removed:
                await uninterrupted(asyncio.to_thread(remove, runtime, container.name))
                removed = True
            elif not there and commands.is_taken(exc.message) and time.monotonic() < until:
                await asyncio.sleep(
                    1
                )  # a cancelled creation holds the name, and its container does not exist yet
            else:
                raise


async def uninterrupted(work: Coroutine[Any, Any, T], *, final: bool = False) -> T:
    """Wait for a thread's work even when cancelled: it cannot be interrupted, and the cancelling code must see its
    result. `final`: after success there is nothing left to cancel, so the cancel is ignored."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None and (task.exception() is not None or not final):
        raise cancelled
    return task.result()


def start(runtime: Runtime, name: str) -> None:
    _run(commands.start(runtime, name))


def state(runtime: Runtime, name: str) -> State | None:
    """None: there is no such container. Raises EngineUnavailable if the state is unknown."""
    try:
        raw = json.loads(_run([runtime.path, "container", "inspect", name]))[0]
    except EngineUnavailable:
        raise
    except EngineError as exc:
        if commands.is_absent(exc.message):
            return None
        raise EngineUnavailable(
            f"{runtime.program} does not report the state of {name}: {exc.message}"
        ) from exc
    except (ValueError, IndexError) as exc:
        raise EngineUnavailable(f"{runtime.program} does not report the state of {name}") from exc
    return State(*commands.state_of(raw))


def last_output(runtime: Runtime, name: str) -> str:
    """The last output of a container; empty if it is not known."""
    try:
        return _run([runtime.path, "logs", "--tail", "20", name], both=True)
    except EngineError:
        return ""


def remove(runtime: Runtime, name: str) -> None:
    """End and remove a container. An absent one is success."""
    try:
        _run(commands.remove(runtime, name))
    except EngineUnavailable:
        raise
    except EngineError:
        if state(runtime, name) is not None:
            raise


def update(runtime: Runtime, name: str, cpu: float | None, memory: int | None) -> None:
    _run(commands.update(runtime, name, cpu, memory))


def names(runtime: Runtime, home: str) -> list[str]:
    """All containers of this home, running or not."""
    return _run(commands.listing(runtime, home)).split()


def client_environment() -> dict[str, str]:
    """The variables of the server's environment that the runtime's command needs."""
    wanted = ("PATH", "HOME", "USER", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "TMPDIR")
    more = ("CONTAINERS_", "DOCKER_", "PODMAN_", "STORAGE_")
    return {name: value for name, value in os.environ.items() if name in wanted or name.startswith(more)}


def _run(argv: Sequence[str], *, timeout: float = CALL_SECONDS, both: bool = False) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if both else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout,
            env=client_environment(),
            cwd="/",
            start_new_session=True,
            check=False,
        )
    except OSError as exc:
        raise EngineUnavailable(f"cannot run {argv[0]}: {exc.strerror}") from exc
    except subprocess.TimeoutExpired as exc:
        raise EngineUnavailable(f"{Path(argv[0]).name} {argv[1]} took longer than {timeout:.0f} s") from exc
    if done.returncode != 0:
        raise _failed(argv, done.stderr or done.stdout or "")
    return done.stdout


def _failed(argv: Sequence[str], output: str) -> EngineError:
    reason = commands.failure(Path(argv[0]).name, output)
    return EngineUnavailable(reason) if commands.is_unreachable(reason) else EngineError(reason)


async def _run_long(argv: Sequence[str]) -> None:
    """Run without a time limit; ended when cancelled."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=client_environment(),
            cwd="/",
            start_new_session=True,
        )
    except OSError as exc:
        raise EngineUnavailable(f"cannot run {argv[0]}: {exc.strerror}") from exc
    try:
        output, _ = await process.communicate()
    except BaseException:  # mostly a cancel; raised again: the process must not run on unattended
        await uninterrupted(_end(process))
        raise
    if process.returncode != 0:
        raise _failed(argv, output.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """With its helper processes, which hold the pipe of its output."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            await asyncio.wait_for(process.wait(), END_SECONDS)
            return
        except ProcessLookupError:
            return
        except TimeoutError:
            continue
