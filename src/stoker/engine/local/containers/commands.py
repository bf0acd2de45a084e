"""Command lines of podman and docker for a task in a container. Pure.

The task directory has the same path inside and outside the container. The launcher is init of its PID namespace and is
known by its pid on this machine, and the server watches it like other launchers. Two things differ: the runtime sets
the limits, and with `launcher: none` the image runs unchanged and without the task directory, as the only process of
a launcher outside the container.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.engine.local.tasks.directories import TaskPlace
from stoker.task import container_layout

LABEL = "stoker"
MOST_PROCESSES = 32_768
"""podman lowers its own process limit to this, and can give no container more."""
RUNTIMES = ("podman", "docker")


@dataclass(frozen=True)
class Runtime:
    program: str
    """podman | docker"""
    path: str
    version: str = ""
    rootless: bool = False
    """User ids inside a container differ from those of the machine."""
    limits: frozenset[str] = frozenset({"cpu", "memory", "pids"})
    """The limits it can enforce."""
    cdi: frozenset[str] = frozenset()
    """Names of the GPUs that it can assign."""


@dataclass(frozen=True)
class Container:
    name: str
    image: str
    labels: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[tuple[str, str]] = ()
    """(path, `rw` or `ro`), the same inside and out."""
    binds: Sequence[tuple[str, str, str]] = ()
    """(path outside, path inside, `rw` or `ro`): the job's mounts."""
    user: tuple[int, int] | None = None
    """Numeric user and group; None: the image's own."""
    cpu: float | None = None
    memory: int | None = None
    pids: int | None = None
    shm: int | None = None
    gpus: Sequence[str] = ()
    """The runtime's names of the GPUs."""
    open_files: tuple[int, int] | None = None
    processes: tuple[int, int] | None = None
    command: Sequence[str] = ()
    """Replaces the image's command; empty: the image's own."""


def name_of(home: str, place: TaskPlace, incarnation: int) -> str:
    """The container of a task, the same for every server of this home. `home`: its name (cgroups.home_name)."""
    return f"{home}.{place.run}.{place.attempt}.{place.task}.{incarnation}"


def labels_of(home: str, place: TaskPlace, more: Mapping[str, str]) -> dict[str, str]:
    found = {f"{LABEL}.{key}": value for key, value in more.items()}
    found[LABEL] = home
    found[f"{LABEL}.run"] = place.run
    found[f"{LABEL}.task"] = f"{place.attempt}/{place.task}"
    return found


def launcher(bundle: str, directory: str, python: str | None) -> list[str]:
    return container_layout.command(bundle, "launch", directory, python=python)


def create(runtime: Runtime, container: Container) -> list[str]:
    """Creates the container; `start` starts it. With two steps, a container whose server died in between never starts."""
    argv = [runtime.path, "create", "--name", container.name, "--pull", "never"]
    return [*argv, *_options(runtime, container), *_image_and_command(container.image, container.command)]


def run(runtime: Runtime, container: Container) -> list[str]:
    """Pulls the image and runs it in the foreground; image name and command are appended by the caller."""
    return [runtime.path, "run", "--name", container.name, "--pull", "missing", *_options(runtime, container)]


def start(runtime: Runtime, name: str) -> list[str]:
    return [runtime.path, "start", name]


def remove(runtime: Runtime, name: str) -> list[str]:
    """Ends it at once, if it runs. docker does so by default, podman would wait."""
    timeout = ["--time", "0"] if runtime.program == "podman" else []
    return [runtime.path, "rm", "--force", *timeout, name]


def update(runtime: Runtime, name: str, cpu: float | None, memory: int | None) -> list[str]:
    argv = [runtime.path, "update"]
    if cpu is not None:
        argv += ["--cpus", f"{cpu:g}"]
    if memory is not None:
        argv += ["--memory", str(memory), "--memory-swap", str(memory)]
    return [*argv, name]


def listing(runtime: Runtime, home: str) -> list[str]:
    return [runtime.path, "ps", "--all", "--filter", f"label={LABEL}={home}", "--format", "{{.Names}}"]


def enter(runtime: Runtime, name: str, command: Sequence[str]) -> list[str]:
    return [runtime.path, "exec", "--interactive", "--tty", name, *command]


def _options(runtime: Runtime, container: Container) -> list[str]:
    argv = ["--network", "host", "--security-opt", "label=disable"]
    for key, value in sorted(container.labels.items()):
        argv += ["--label", f"{key}={value}"]
    argv += _identity(runtime, container)
    argv += _limits(runtime, container)
    argv += _devices(runtime, container)
    for path, mode in container.mounts:
        argv += ["--volume", f"{path}:{path}:{mode}"]
    for outside, inside, mode in container.binds:
        argv += ["--volume", f"{outside}:{inside}:{mode}"]
    return argv


def _identity(runtime: Runtime, container: Container) -> list[str]:
    if container.user is None:
        return []
    if runtime.rootless and runtime.program == "podman":
        # The server's user is the same inside, so that it owns the files in the task directory.
        return ["--userns", "keep-id"]
    if runtime.rootless:
        return ["--user", "0:0"]  # this is the server's user outside
    return ["--user", f"{container.user[0]}:{container.user[1]}"]


def _limits(runtime: Runtime, container: Container) -> list[str]:
    argv: list[str] = []
    if container.cpu is not None and "cpu" in runtime.limits:
        argv += ["--cpus", f"{container.cpu:g}"]
    if container.memory is not None and "memory" in runtime.limits:
        argv += ["--memory", str(container.memory), "--memory-swap", str(container.memory)]
    if container.pids is not None and "pids" in runtime.limits:
        argv += ["--pids-limit", str(container.pids)]
    if container.shm is not None:
        argv += ["--shm-size", str(container.shm)]
    for kind, limit in (("nofile", container.open_files), ("nproc", container.processes)):
        if limit is not None:
            argv += ["--ulimit", f"{kind}={limit[0]}:{limit[1]}"]
    return argv


def _devices(runtime: Runtime, container: Container) -> list[str]:
    if not container.gpus:
        # Images set `all`, and with NVIDIA's runtime as default they would get all GPUs.
        return ["--env", "NVIDIA_VISIBLE_DEVICES=void"]
    if runtime.program == "docker" and not runtime.cdi:
        return ["--gpus", f'"device={",".join(container.gpus)}"']
    return [word for gpu in container.gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]


def _image_and_command(image: str, command: Sequence[str]) -> list[str]:
    if not command:
        return [image]
    return ["--entrypoint", command[0], image, *command[1:]]


def summary(runtime: Runtime) -> str:
    """For messages."""
    how = "rootless" if runtime.rootless else "rootful"
    unlimited = sorted({"cpu", "memory", "pids"} - runtime.limits)
    more = f", without limits on {', '.join(unlimited)}" if unlimited else ""
    return f"{runtime.program} {runtime.version or runtime.path} ({how}{more})"


def failure(program: str, output: str) -> str:
    """The most informative line of a runtime's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or [f"{program} gave no reason"])[-1]


def is_absent(output: str) -> bool:
    """The runtime has no such container. "No such file" is another error."""
    words = ("no such container", "no such object", "no container with")
    return any(word in output.lower() for word in words)


def is_unreachable(output: str) -> bool:
    """The daemon cannot be reached, so the state is unknown."""
    return any(word in output.lower() for word in ("cannot connect to", "failed to connect to the docker"))


def is_taken(output: str) -> bool:
    """The name belongs to another container, or to one that is being created."""
    return "already in use" in output.lower()


def state_of(raw: Mapping[str, Any]) -> tuple[bool, int, int, bool]:
    """Running, pid, exit code, killed for memory: from one entry of `inspect`."""
    state = raw.get("State") or {}
    running = bool(state.get("Running"))
    return running, int(state.get("Pid") or 0), int(state.get("ExitCode") or 0), bool(state.get("OOMKilled"))
