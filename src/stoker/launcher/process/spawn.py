"""Starts a process for a task: its environment, and everything between fork and exec.

User code is always exec'ed, in its own session, and inherits nothing of the launcher: no descriptors except 0, 1 and 2, no
signal settings, no variables except those of the order, the secrets and this module.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import zlib
from typing import Any, Dict, Mapping, NoReturn, Optional, Sequence, Set, Tuple

from stoker.launcher import task_files
from stoker.launcher.process import container_env, process_tree
from stoker.linux import syscalls
from stoker.linux.descriptors import Closing
from stoker.task import layout
from stoker.task.formats import Order, TaskInfo

THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class CannotStart(Exception):
    """The process could not be started, and none is left."""

    def __init__(self, number: int, message: str, code: int) -> None:
        super().__init__(message)
        self.errno = number
        self.message = message
        self.code = code
        """127: no such command, 126: it cannot be run."""


def environment(
    directory: str, info: TaskInfo, order: Order, secrets: Mapping[str, str], bundle: Optional[str]
) -> Dict[str, str]:
    """The environment of the body: the variables of the order, the secrets, and those that the launcher sets."""
    env = container_env.inherited(container_env.environ(), info.home) if order.inherit else {}
    env.update(order.env)
    env.update(secrets)
    env.setdefault("PYTHONUNBUFFERED", "1")
    default_threads(env, order.threads)
    checkpoint_directory = os.path.join(directory, layout.checkpoints(order.generation))
    env.update(identity(info, order))
    env.update(
        STOKER_TASK_DIR=directory,
        STOKER_CHECKPOINT_DIR=checkpoint_directory,
        STOKER_OUTPUT_DIR=os.path.join(directory, layout.OUTPUT),
    )
    if info.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(info.gpus)
    env.pop("STOKER_RESUME_FROM", None)
    if order.resume_from:
        env["STOKER_RESUME_FROM"] = os.path.join(checkpoint_directory, order.resume_from)
    if bundle:
        # Last: a Stoker on the user's own PYTHONPATH takes precedence.
        env["PYTHONPATH"] = os.pathsep.join(part for part in (env.get("PYTHONPATH"), bundle) if part)
    return env


def default_threads(env: Dict[str, str], threads: Optional[int]) -> None:
    """Set the numbers of threads that are not set. Where OMP_NUM_THREADS is, the other libraries read that."""
    if threads is not None and THREADS[0] not in env:
        for name in THREADS:
            env.setdefault(name, str(threads))


def identity(info: TaskInfo, order: Order) -> Dict[str, str]:
    """The variables that identify the body."""
    return {
        "STOKER_RUN": info.run,
        "STOKER_ATTEMPT": str(info.attempt),
        "STOKER_GENERATION": str(order.generation),
        "STOKER_ROLE": info.role,
        "STOKER_TASK_INDEX": str(info.index),
    }


def working_directory(code: str, info: TaskInfo, order: Order, shipped: bool) -> str:
    """The working directory of the body: the shipped code (`shipped`: there is some). Without code, and for the image's own
    command, it is the image's working directory."""
    own = not order.argv or order.argv == info.command
    return os.path.abspath(info.workdir) if info.workdir is not None and (own or not shipped) else code


def has_code(code: str) -> bool:
    try:
        return bool(os.listdir(code))
    except OSError:
        return True


def setup_directory(setup: Mapping[str, Any], info: TaskInfo) -> str:
    """The directory for the environment of an order's setup."""
    directory = str(setup["directory"])
    if info.setups is not None:
        directory = os.path.join(info.setups, os.path.basename(directory))
    return os.path.abspath(directory)


def read_secrets(directory: str, info: TaskInfo) -> Dict[str, str]:
    """Name -> value, from secrets.json or from one file per secret. Raises OSError for a file that cannot be read."""
    if info.secrets_dir is None:
        known = task_files.read_json(os.path.join(directory, layout.SECRETS)) or {}
        return {str(name): str(value) for name, value in known.items()}
    try:
        names = os.listdir(info.secrets_dir)
    except FileNotFoundError:
        return {}
    # In a mounted Secret, Kubernetes keeps versions under names that begin with two dots.
    paths = {name: os.path.join(info.secrets_dir, name) for name in names if not name.startswith(".")}
    return {name: _content(path) for name, path in paths.items() if os.path.isfile(path)}


def _content(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


PIPES, OWN_FILES = 2, 128
"""Descriptors for each process that the launcher starts, and for the launcher itself."""
_open_files: Optional[Tuple[int, int]] = None
"""The launcher's original limit, if it has raised its own. The body gets the original one."""


def room_for(processes: int) -> None:
    """Raise the launcher's limit of open files for the pipes of so many processes, as far as allowed."""
    global _open_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = PIPES * processes + OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _open_files = _open_files or (soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def affinity(info: TaskInfo) -> Optional[Set[int]]:
    """Cores for a task whose CPU limit is not enforced by a cgroup; None: all of them.

    Tasks start at different cores, so that two of them seldom share one while others are idle.
    """
    whole = info.cpu is not None and info.cpu >= 1 and float(info.cpu).is_integer()
    if not whole or (info.cgroup or {}).get("cpu") or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    count = int(info.cpu or 0)
    if count >= len(cores):
        return None
    first = zlib.crc32(f"{info.run}/{info.attempt}/{info.task}".encode()) % len(cores)
    return {cores[(first + step) % len(cores)] for step in range(count)}


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    directory: str,
    stdout: int,
    stderr: int,
    info: TaskInfo,
    keep: Sequence[int] = (),
    victim: Optional[int] = None,
) -> int:
    """Start a process in its own session and return its pid. Raises CannotStart.

    `keep`: more descriptors to inherit. `victim`: the memory limit that it shares with the launcher, if any.
    """
    if not argv or not argv[0]:
        raise CannotStart(errno.EINVAL, "the command is empty", 127)
    cores = affinity(info)
    reader, writer = os.pipe()
    launcher = os.getpid()
    try:
        pid = os.fork()
    except OSError as exc:
        os.close(reader)
        os.close(writer)
        raise CannotStart(exc.errno or 0, f"cannot start {argv[0]!r}: fork: {exc.strerror}", 126) from exc
    if pid == 0:
        _child(argv, env, directory, stdout, stderr, writer, info, cores, keep, launcher, victim)
    os.close(writer)
    with open(reader, "rb") as report:
        failure = report.read()
    if not failure:
        process_tree.remember(pid)
        return pid
    os.waitpid(pid, 0)
    stage, number, what = failure.decode("utf-8", "replace").split(" ", 2)
    raise _explain(stage, int(number), what, argv, env, directory)


def _child(
    argv: Sequence[str],
    env: Mapping[str, str],
    directory: str,
    stdout: int,
    stderr: int,
    report: int,
    info: TaskInfo,
    cores: Optional[Set[int]],
    keep: Sequence[int],
    launcher: int,
    victim: Optional[int],
) -> NoReturn:
    stage, what = "prepare", ""
    try:
        os.setsid()
        if launcher != 1:
            syscalls.die_with_parent(signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(127)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        syscalls.close_fds([report, *keep])
        for fd in keep:
            os.set_inheritable(fd, True)
        stage = "cgroup"
        for what in (info.cgroup or {}).get("procs", []):
            join(what)
        stage, what = "prepare", ""
        if cores:
            os.sched_setaffinity(0, cores)
        container_env.prefer_body(victim)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if _open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, _open_files)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        stage, what = "directory", directory
        os.chdir(directory)
        stage, what = "exec", argv[0]
        execute(argv, env)
    except OSError as exc:
        os.write(report, f"{stage} {exc.errno or 0} {what}".encode("utf-8", "replace"))
    except BaseException as exc:  # noqa: BLE001 - the child must never continue in the launcher's code
        os.write(report, f"prepare 0 {type(exc).__name__}: {exc}".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def join(path: str) -> None:
    with Closing(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as fd:
        os.write(fd, b"0")


def execute(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    name = argv[0]
    if "/" in name:
        os.execve(name, list(argv), env)
    problem = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in env.get("PATH", container_env.DEFAULT_PATH).split(os.pathsep):
        try:
            os.execve(os.path.join(folder or ".", name), list(argv), env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as exc:
            problem = exc
    raise problem


def _explain(
    stage: str, number: int, what: str, argv: Sequence[str], env: Mapping[str, str], directory: str
) -> CannotStart:
    reason = os.strerror(number) if number else what
    command = argv[0]
    if stage == "cgroup":
        return CannotStart(number, f"cannot start {command!r} within its limits: {what}: {reason}", 126)
    if stage != "exec":
        return CannotStart(number, f"cannot start {command!r}: {what}: {reason}".replace(": : ", ": "), 126)
    found = _found(command, env, directory)
    if number in (errno.ENOENT, errno.ENOTDIR) and found is None:
        where = "in the working directory" if "/" in command else "on PATH"
        hint = _hint(command, directory, env.get("PATH"))
        return CannotStart(number, f"no such command {where}: {command!r}{hint}", 127)
    if number == errno.ENOENT:
        return CannotStart(
            number, f"cannot run {command!r}: the interpreter named in its first line is not there", 127
        )
    if number == errno.ENOEXEC:
        hint = "begin it with `#!` and an interpreter, or name one: `sh script`, `python script`"
        return CannotStart(number, f"cannot run {command!r}: not a program; {hint}", 126)
    if number == errno.EACCES:
        hint = f"make it executable (`chmod +x {command}`) or name an interpreter"
        return CannotStart(number, f"cannot run {command!r}: permission denied; {hint}", 126)
    return CannotStart(number, f"cannot run {command!r}: {reason}", 126)


def _found(command: str, env: Mapping[str, str], directory: str) -> Optional[str]:
    if "/" in command:
        path = os.path.join(directory, command)
        return path if os.path.lexists(path) else None
    return shutil.which(command, mode=os.F_OK, path=env.get("PATH", container_env.DEFAULT_PATH))


def _hint(command: str, directory: str, path: Optional[str]) -> str:
    """A hint why the command was not found."""
    if "/" in command or not os.path.lexists(os.path.join(directory, command)):
        if command == "python" and shutil.which("python3", path=path):
            return "; `python3` is there"
        if " " in command:
            return "; it has spaces in it: give the command and its arguments as separate words"
        return "; check its name, and that `setup` or the environment provides it"
    if command.endswith(".py"):
        return f"; it is in the working directory: run `python {command}`"
    return f"; it is in the working directory: run `./{command}`"
