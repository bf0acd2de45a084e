"""What is inside the files of a task directory, and how they are written.

Readers ignore keys they do not know, so that an older launcher and a newer server understand each other;
a missing optional key means its default. Times are wall-clock seconds since the epoch and only for people;
nothing is decided by comparing them.
"""

from __future__ import annotations

import json
import math
import os
import typing
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Type, TypeVar, Union

FORMAT = 1
"""Raised when an older reader could no longer do the right thing."""
SHORTEST_SECRET = 6
"""Shorter values are not looked for in logs, names and events: blanking out every `1` would leave nothing to read."""

T = TypeVar("T", bound="Record")


@dataclass
class Record:
    """A JSON object with a known shape."""

    @classmethod
    def from_json(cls: Type[T], raw: Mapping[str, Any]) -> T:
        """TypeError when a key is missing or a value is not of its kind: user code can write these files."""
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
    """task.json: who this task is and what it may use. Never changes."""

    run: str
    attempt: int
    task: str
    """`worker-0`: role and index."""
    role: str = "worker"
    index: int = 0
    incarnation: int = 1
    """Which body in this task's place: raised when a lost task is replaced."""
    cpu: Optional[float] = None
    memory: Optional[int] = None
    """Bytes; None: no limit."""
    pids: Optional[int] = None
    gpus: Optional[List[str]] = field(default_factory=list)
    """UUIDs (or indexes) of the GPUs this task owns. None: not ours to say, the container's runtime gives them
    and CUDA_VISIBLE_DEVICES is left as it is."""
    cgroup: Optional[Dict[str, Any]] = None
    """{"version": 1|2, "procs": [files the body writes its pid to], "memory": dir, "cpu": dir, "pids": dir,
    "freezer": dir}; None: the launcher limits by affinity, rlimits and a watchdog."""
    pid_namespace: bool = False
    """The launcher is init of its own PID namespace: the kernel ends everything with it."""
    log_budget: int = 1 << 30
    log_segment: int = 8 << 20
    sample_every: float = 5.0
    secrets_dir: Optional[str] = None
    """A directory with one file per secret, named by it; None: they are in secrets.json."""
    setups: Optional[str] = None
    """The directory in which setups are made, whatever the order says: KEY beneath it."""
    workdir: Optional[str] = None
    """Where the body runs when no code was brought; a relative path counts from where the launcher was started
    (`.`: the image's own WORKDIR). None: always in `code/`."""
    home: Optional[str] = None
    """HOME for a body whose environment has none, or one that cannot be written."""
    command: List[str] = field(default_factory=list)
    """What runs when an order names no command: the image's own."""
    container: Optional[Dict[str, Any]] = None
    """Of the local engine: the container the task is in, {"runtime": podman|docker, "image": ...}. With
    `launcher: none` the launcher is outside and starts it: "name", "run" (the command up to the image) and "client"
    (the environment of that command) beside these."""
    lease: Optional[float] = None
    """Seconds without contact (see launcher/lease.py) after which the launcher ends the body and itself; None:
    it never does."""
    near: bool = False
    """The server takes checkpoints out of this very directory, and hashes them then: what is large is not hashed before."""
    exclusive: bool = False
    """Whoever is silent longer than its lease may have been replaced: no moment beyond it."""
    format: int = FORMAT


@dataclass
class Order(Record):
    """order.json: what the launcher shall do now. Only the newest counts; `seq` only grows."""

    seq: int
    generation: int
    verb: str
    """run | stop | release | die (a drill: the launcher ends as if killed). `run` starts the body at most once per seq. `stop` ends the body: SIGTERM, grace,
    SIGKILL of the whole tree. `release` lets the launcher exit; what is in the directory has been carried."""
    argv: List[str] = field(default_factory=list)
    env: Dict[str, str] = field(default_factory=dict)
    """The whole environment of the body but for secrets and what only the launcher knows."""
    inherit: bool = False
    """The environment begins with the launcher's own (in a container: the image's), and `env` goes on top."""
    grace: float = 60.0
    timeout: Optional[float] = None
    """Seconds the body may run; the launcher counts them, so the limit holds while the server is away."""
    setup: Optional[Dict[str, Any]] = None
    """{"command": str, "directory": absolute path, "key": str}: run once under a lock, then use the directory."""
    processes: List[Dict[str, str]] = field(default_factory=list)
    """Several processes in this task: what each has in its environment on top of `env`. The task ends when all have
    ended; when one fails the others are stopped. Empty: one process."""
    warm: Optional[Dict[str, Any]] = None
    """{"python": words, "program": words, "modules": names}: `argv` is Python, and each main process leaves a copy of itself
    right after it has imported these, to be the next generation's. None: every generation is started from nothing."""
    hang_after: Optional[float] = None
    """Seconds without output, reports and GPU use after which the launcher keeps the stacks of all processes and
    journals `hang`, once."""
    scan_every: Optional[float] = None
    """Others write checkpoints together with this task: in the first minute of a body the status is written this often,
    in seconds, and then with every sample, so that it is known how many looks have been finished. None: it is not."""
    resume_from: Optional[str] = None
    """Name inside this generation's checkpoint directory."""
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
    """Which of several processes it was that failed first, by its local rank."""
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
    """What it used in all, as in the status: that is replaced after the journal and may be read before."""
    log_dropped: int = 0
    log_dropped_lines: int = 0
    """As in the status, for the same reason."""
    final: bool = False
    """Its launcher starts nothing any more: somebody told it to end, or its lease is over."""


@dataclass
class Status(Record):
    """status.json: how things stand. Small, replaced on every change of phase and every sample."""

    phase: str
    """ready (holding, no body) | setup | running | stopping | ended (holding until released)"""
    seq: int = 0
    """The newest order acted on."""
    generation: int = 0
    pid: Optional[int] = None
    """The body, as the launcher sees it."""
    started_at: Optional[float] = None
    ending: Optional[Dict[str, Any]] = None
    usage: Dict[str, float] = field(default_factory=dict)
    """cpu_seconds, cpu (cores, lately), cpu_peak, memory, memory_peak, pids_peak, gpu (percent, lately, the mean of its
    GPUs), gpu_peak, gpu_memory_peak"""
    scans: int = 0
    """How many looks at the checkpoint directory have been finished."""
    pending: List[str] = field(default_factory=list)
    """Names of checkpoints that are being written: seen by the last look, not committed yet. At most 64."""
    log_segment: int = 0
    """Number of the newest log segment."""
    log_bytes: int = 0
    """Framed bytes written in all, dropped ones included."""
    log_dropped: int = 0
    """Framed bytes dropped to stay within the budget, or for want of room."""
    log_dropped_lines: int = 0
    """How many lines they were: each has FRAME bytes that nobody printed."""
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
    """Empty: it has not been read through yet (see `TaskInfo.near`)."""
    mode: int = 0o644


@dataclass
class StagedCheckpoint(Record):
    """A journal entry of kind `checkpoint`: committed, copied to `staged/`, verified."""

    number: int
    """Names the directory under staged/; unique in this task directory, only grows."""
    generation: int
    name: str
    """The file, directory or stem it is known by: `last.pt`, `step-100`, `ckpt-3`."""
    how: str
    """sdk | rename | quiet | verified"""
    files: List[Dict[str, Any]] = field(default_factory=list)
    step: Optional[int] = None
    metrics: Dict[str, float] = field(default_factory=dict)
    at: float = 0.0
    written_at: float = 0.0
    """Newest modification time of its files: orders checkpoints of one generation."""


FRAME = len(b"o 1700000000000 ")
"""Bytes that frame a log line: stream, milliseconds."""


@dataclass
class LogLine:
    """One framed line: `o 1731650000123 text`. `o` stdout, `e` stderr, `s` Stoker itself; the capital letter
    says that the line goes on in the next record of the same stream (a prompt, a very long line)."""

    stream: str
    ms: int
    text: bytes
    partial: bool = False

    def encode(self) -> bytes:
        letter = self.stream.upper() if self.partial else self.stream
        return b"%s %d %s\n" % (letter.encode(), self.ms, self.text.replace(b"\n", b"\\n"))

    @classmethod
    def decode(cls, raw: bytes) -> "LogLine":
        """Never fails: what is not framed (a torn line after a power cut) is shown as it is, from Stoker."""
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
    """Whether a JSON value is of the kind a field declares. Numbers must be such that a database can hold them."""
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
        # Not a number is a number here: a loss may well be one.
        return isinstance(value, dict) and all(
            _fits(item, arguments[1])
            or (arguments[1] is float and type(item) is float and not math.isfinite(item))
            for item in value.values()
        )
    return type(value) is kind


def write_json(path: str, value: Mapping[str, Any], *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace a file in one step: readers see the old or the new, never a mixture."""
    temporary = f"{path}.{os.getpid()}.tmp"
    fd = create(temporary, mode)
    try:
        write_all(fd, json.dumps(value, separators=(",", ":")).encode())
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    if durable:
        sync_directory(os.path.dirname(path))


def create(path: str, mode: int, dir_fd: Optional[int] = None) -> int:
    """A new file in place of whatever has that name: a link is not followed, a pipe not waited for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode, dir_fd=dir_fd)
    except FileExistsError:
        os.unlink(path, dir_fd=dir_fd)
        return os.open(path, flags, mode, dir_fd=dir_fd)


def append_line(fd: int, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one JSON line to a file opened with O_APPEND. One write: lines of several writers do not mix."""
    write_all(fd, json.dumps(value, separators=(",", ":")).encode() + b"\n")
    if durable:
        os.fsync(fd)


def split_lines(data: bytes, keep: bool = False) -> Tuple[List[bytes], int]:
    """Complete lines in `data` (`keep`: with their ends) and how many bytes they take; an unfinished last line is left
    for next time."""
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(keep), end


def parse_lines(lines: List[bytes]) -> Iterator[Dict[str, Any]]:
    """JSON objects among `lines`; anything else (a line torn by a power cut) is passed over."""
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def sync_directory(path: str) -> None:
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
