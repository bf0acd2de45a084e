"""The formats of the files in a task directory, and how the files are written.

Readers ignore unknown keys, and a missing optional key has its default, so an older launcher and a newer server understand
each other. Times are wall-clock seconds since the epoch and only for display; nothing is decided by comparing them.
"""

from __future__ import annotations

import json
import math
import os
import typing
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Type, TypeVar, Union

from stoker.linux.descriptors import Closing

FORMAT = 1
"""Increased when an older reader could misread the files."""
SHORTEST_SECRET = 6
"""Shorter values are not redacted in logs, names and events: without every `1` a log could not be read."""

T = TypeVar("T", bound="Record")


@dataclass
class Record:
    """A JSON object with a known shape."""

    @classmethod
    def from_json(cls: Type[T], raw: Mapping[str, Any]) -> T:
        """TypeError when a key is missing or a value has the wrong type: user code can write these files."""
        kinds = _kinds(cls)
        known = {key: value for key, value in raw.items() if key in kinds}
        for key, value in known.items():
            if not _fits(value, kinds[key]):
                raise TypeError(f"{cls.__name__}.{key} cannot be {str(value)[:40]!r}")
        return cls(**known)

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)


@dataclass
class TaskInfo(Record):
    """task.json: identity, limits and isolation of a task. Never changes."""

    run: str
    attempt: int
    task: str
    """`worker-0`: role and index."""
    role: str = "worker"
    index: int = 0
    incarnation: int = 1
    """Increased when a lost task is replaced."""
    cpu: Optional[float] = None
    memory: Optional[int] = None
    """Bytes; None: no limit."""
    pids: Optional[int] = None
    gpus: Optional[List[str]] = field(default_factory=list)
    """UUIDs (or indexes) of the GPUs of this task. None: the container runtime assigns them, and CUDA_VISIBLE_DEVICES is
    left unchanged."""
    cgroup: Optional[Dict[str, Any]] = None
    """{"version": 1|2, "procs": [files the body writes its pid to], "memory": dir, "cpu": dir, "pids": dir,
    "freezer": dir}; None: the launcher limits by affinity, rlimits and a watchdog."""
    pid_namespace: bool = False
    """The launcher is init of its own PID namespace: when it dies, the kernel ends all processes in it."""
    log_budget: int = 1 << 30
    log_segment: int = 8 << 20
    sample_every: float = 5.0
    secrets_dir: Optional[str] = None
    """A directory with one file per secret, named after it; None: the secrets are in secrets.json."""
    setups: Optional[str] = None
    """The directory for setups, each in a subdirectory KEY. It takes precedence over the directory in the order."""
    workdir: Optional[str] = None
    """Working directory of the body when no code was shipped. A relative path is relative to the launcher's working
    directory (`.`: the image's WORKDIR). None: always `code/`."""
    home: Optional[str] = None
    """HOME for a body whose environment has none, or one that cannot be written."""
    command: List[str] = field(default_factory=list)
    """The image's own command: it runs when an order has none."""
    container: Optional[Dict[str, Any]] = None
    """The container of a task of the local engine: {"runtime": podman|docker, "image": ...}. With `launcher: none` the
    launcher runs outside and starts the container. Then it also has "name", "run" (the command up to the image) and
    "client" (the environment of that command)."""
    lease: Optional[float] = None
    """Seconds without contact (see launcher/lease.py) after which the launcher ends the body and itself; None: never."""
    near: bool = False
    """The server reads checkpoints directly from this directory and hashes them: the launcher does not hash large files."""
    common: Optional[str] = None
    """The directory that the tasks of its attempt share on this machine (`layout.COMMON`)."""
    guards: bool = False
    """Its launcher puts back torn files of the working folder. One launcher of each folder does."""
    exclusive: bool = False
    """The task may be replaced once its lease is over, so the launcher must end by then without any delay."""
    format: int = FORMAT


@dataclass
class Order(Record):
    """order.json: what the launcher has to do now. Only the newest order counts; `seq` only grows."""

    seq: int
    generation: int
    verb: str
    """run | stop | release | die (a drill: the launcher ends as if killed). `run` starts the body at most once per seq.
    `stop` ends the body: SIGTERM, grace, SIGKILL of the whole tree. `release` lets the launcher exit: the server has taken
    everything it needs out of the directory."""
    argv: List[str] = field(default_factory=list)
    env: Dict[str, str] = field(default_factory=dict)
    """The environment of the body, without secrets and without the variables that the launcher sets."""
    inherit: bool = False
    """`env` is added to the launcher's own environment (in a container: the image's)."""
    grace: float = 60.0
    timeout: Optional[float] = None
    """Seconds the body may run; the launcher counts them, so the limit holds while the server is away."""
    setup: Optional[Dict[str, Any]] = None
    """{"command": str, "directory": absolute path, "key": str}: the command runs once, under a lock; the directory is used
    afterwards."""
    processes: List[Dict[str, str]] = field(default_factory=list)
    """For several processes in this task: the variables that each has in addition to `env`. The task ends when all of them
    have ended; when one fails the others are stopped. Empty: one process."""
    warm: Optional[Dict[str, Any]] = None
    """{"python": words, "program": words, "modules": names}: `argv` is a Python command. Each main process imports the
    modules and then forks a standby process for the next generation. None: every generation starts new processes."""
    hang_after: Optional[float] = None
    """Seconds without output, reports and GPU use after which the launcher saves the stacks of all processes and
    journals `hang`, once."""
    threads: Optional[int] = None
    """For OMP_NUM_THREADS and the like, where neither `env` nor the image sets them. None: they stay unset."""
    scan_every: Optional[float] = None
    """Set when other tasks write checkpoints together with this one. The status, with the number of finished scans, is then
    written this often (seconds) in the first minute of a body, and with every sample later. None: not more often than usual."""
    resume_from: Optional[str] = None
    """Name inside this generation's checkpoint directory."""
    folders: List[str] = field(default_factory=list)
    """Empty folders that the working folder begins with."""
    links: Dict[str, str] = field(default_factory=dict)
    """Path in the working folder -> absolute target. Only on the machine of the server."""
    kill: bool = False
    """With stop: no grace."""


@dataclass
class Ending(Record):
    """How a body ended. In the journal and in the status."""

    seq: int
    generation: int
    kind: str
    """exit | signal | oom | setup | timeout | stopped | start-failed | lost | disk"""
    process: Optional[int] = None
    """Local rank of the process that failed first, where there are several."""
    code: Optional[int] = None
    signal: Optional[int] = None
    message: str = ""
    limit: Optional[int] = None
    peak: Optional[int] = None
    at: float = 0.0
    seconds: float = 0.0
    """How long the body ran, monotonic."""
    last_lines: List[str] = field(default_factory=list)
    usage: Dict[str, float] = field(default_factory=dict)
    """Total usage, as in the status. It is here too because the status is replaced after the journal is written."""
    log_dropped: int = 0
    log_dropped_lines: int = 0
    """As in the status, for the same reason."""
    final: bool = False
    """The launcher starts nothing any more: it was told to end, or its lease is over."""


@dataclass
class Status(Record):
    """status.json: the present state. Small; replaced on every change of phase and with every sample."""

    phase: str
    """ready (holding, no body) | setup | running | stopping | ended (holding until released)"""
    seq: int = 0
    """The newest order acted on."""
    generation: int = 0
    pid: Optional[int] = None
    """The body's pid in the launcher's PID namespace."""
    started_at: Optional[float] = None
    ending: Optional[Dict[str, Any]] = None
    usage: Dict[str, float] = field(default_factory=dict)
    """cpu_seconds, cpu (cores, in the last interval), cpu_peak, memory, memory_peak, pids_peak, gpu (percent, in the last
    interval, the mean of its GPUs), gpu_peak, gpu_memory_peak"""
    scans: int = 0
    """Number of finished scans of the checkpoint directory."""
    pending: List[str] = field(default_factory=list)
    """Names of checkpoints that are being written: found by the last scan, not committed yet. At most 64."""
    log_segment: int = 0
    """Number of the newest log segment."""
    log_bytes: int = 0
    """All framed bytes, dropped ones included."""
    log_dropped: int = 0
    """Framed bytes dropped to stay within the budget, or because the disk was full."""
    log_dropped_lines: int = 0
    """Number of dropped lines: each has FRAME bytes that the training did not print."""
    launcher_pid: int = 0
    boot_id: str = ""
    version: str = ""
    format: int = FORMAT


@dataclass
class CheckpointFile(Record):
    path: str
    """Relative to the checkpoint directory; the first component belongs to the checkpoint's stem."""
    size: int
    sha256: str
    """Empty: the file has not been hashed yet (see `TaskInfo.near`)."""
    mode: int = 0o644


@dataclass
class StagedCheckpoint(Record):
    """A journal entry of kind `checkpoint`: committed, copied to `staged/`, verified."""

    number: int
    """Names the directory under staged/; unique in this task directory, only grows."""
    generation: int
    name: str
    """Name of the file or directory, or stem of several files: `last.pt`, `step-100`, `ckpt-3`."""
    how: str
    """sdk | rename | quiet | verified"""
    files: List[Dict[str, Any]] = field(default_factory=list)
    step: Optional[int] = None
    metrics: Dict[str, float] = field(default_factory=dict)
    at: float = 0.0
    written_at: float = 0.0
    """Newest modification time of its files: orders the checkpoints of one generation."""


FRAME = len(b"o 1700000000000 ")
"""Bytes of a log line that are its frame: stream, milliseconds."""


@dataclass
class LogLine:
    """One framed line: `o 1731650000123 text`. `o` is stdout, `e` stderr, `s` Stoker itself. A capital letter means that
    the line continues in the next record of the same stream (a prompt, a very long line)."""

    stream: str
    ms: int
    text: bytes
    partial: bool = False

    def encode(self) -> bytes:
        letter = self.stream.upper() if self.partial else self.stream
        return b"%s %d %s\n" % (letter.encode(), self.ms, self.text.replace(b"\n", b"\\n"))

    @classmethod
    def decode(cls, raw: bytes) -> "LogLine":
        """Never fails: a line without a frame (torn by a power cut) is returned unchanged, as of Stoker."""
        parts = raw.rstrip(b"\n").split(b" ", 2)
        if len(parts) == 3 and parts[0] in (b"o", b"e", b"s", b"O", b"E", b"S") and parts[1].isdigit():
            letter = parts[0].decode()
            return cls(letter.lower(), int(parts[1]), parts[2], letter.isupper())
        return cls("s", 0, raw.rstrip(b"\n"))


_KINDS: Dict[type, Dict[str, Any]] = {}


def _kinds(cls: type) -> Dict[str, Any]:
    if cls not in _KINDS:
        _KINDS[cls] = typing.get_type_hints(cls)
    return _KINDS[cls]


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the type that a field declares. Numbers must fit into the database."""
    if kind is Any:
        return True
    if kind is int:
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        # NaN and infinity are allowed: a loss can have them.
        return isinstance(value, dict) and all(
            _fits(item, arguments[1])
            or (arguments[1] is float and type(item) is float and not math.isfinite(item))
            for item in value.values()
        )
    return type(value) is kind


def write_json(path: str, value: Mapping[str, Any], *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace a file in one step: readers see the old or the new, never a mixture."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with Closing(create(temporary, mode)) as fd:
        write_all(fd, json.dumps(value, separators=(",", ":")).encode())
        if durable:
            os.fsync(fd)
    os.replace(temporary, path)
    if durable:
        sync_directory(os.path.dirname(path))


def create(path: str, mode: int, dir_fd: Optional[int] = None) -> int:
    """Create a file in place of anything of that name. Links are not followed and pipes are not opened."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode, dir_fd=dir_fd)
    except FileExistsError:
        os.unlink(path, dir_fd=dir_fd)
        return os.open(path, flags, mode, dir_fd=dir_fd)


def append_line(fd: int, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one JSON line to a file opened with O_APPEND, in one write, so that lines of several writers do not mix."""
    write_all(fd, json.dumps(value, separators=(",", ":")).encode() + b"\n")
    if durable:
        os.fsync(fd)


def split_lines(data: bytes, keep: bool = False) -> Tuple[List[bytes], int]:
    """Complete lines in `data` (`keep`: with their line ends) and the number of their bytes. An unfinished last line is
    left for the next call."""
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(keep), end


def parse_lines(lines: List[bytes]) -> Iterator[Dict[str, Any]]:
    """The JSON objects among `lines`; anything else (a line torn by a power cut) is skipped."""
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def sync_directory(path: str) -> None:
    with Closing(os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def write_all(fd: int, data: Union[bytes, memoryview]) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
