"""Every key of a job file and its meaning, in one table for the schema, the flags and the reference.

Free of pydantic, so that the command line can build its options without importing it. A test compares the table with
the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.spec import names, quantities

CHOICES: dict[str, tuple[str, ...]] = {
    "framework": ("torch", "tensorflow", "jax", "mpi", "horovod", "dask", "none"),
    "checkpoint.best.mode": ("max", "min"),
    "checkpoint.world_size": ("any", "same"),
    "idle.then": ("suspend", "stop"),
    "launcher": ("auto", "none"),
    "on_loss": ("world", "task", "ignore"),
    "roles.*.on_loss": ("world", "task", "ignore"),
    "hang.then": ("report", "restart"),
}
SYNONYMS: dict[str, dict[str, str]] = {
    "framework": {
        "pytorch": "torch",
        "lightning": "torch",
        "ddp": "torch",
        "fsdp": "torch",
        "torchrun": "torch",
        "accelerate": "torch",
        "deepspeed": "torch",
        "tf": "tensorflow",
        "keras": "tensorflow",
        "flax": "jax",
        "openmpi": "mpi",
        "mpich": "mpi",
        "mpirun": "mpi",
        "mpi4py": "mpi",
    },
    "on_loss": {
        "restart": "world",
        "all": "world",
        "replace": "task",
        "retry": "task",
        "nothing": "ignore",
        "none": "ignore",
    },
    "checkpoint.best.mode": {
        "maximum": "max",
        "maximize": "max",
        "maximise": "max",
        "minimum": "min",
        "minimize": "min",
        "minimise": "min",
    },
    "idle.then": {"pause": "suspend", "kill": "stop", "cancel": "stop"},
}
WRONG_KEYS: dict[str, str] = {
    "command": "run",
    "cmd": "run",
    "script": "run",
    "entrypoint": "run",
    "environment": "env",
    "variables": "env",
    "mem": "resources.memory",
    "ram": "resources.memory",
    "cpus": "resources.cpu",
    "cores": "resources.cpu",
    "gpus": "resources.gpu",
    "storage": "resources.disk",
    "shm_size": "resources.shm",
    "replicas": "workers",
    "nodes": "workers",
    "nproc_per_node": "processes",
    "data": "inputs",
    "datasets": "inputs",
    "time_limit": "timeout",
    "walltime": "timeout",
    "max_retries": "retries",
    "restarts": "retries",
    "queue": "pool",
    "partition": "pool",
    "labels": "tags",
    "cwd": "workdir",
    "working_dir": "workdir",
    "docker": "image",
    "container": "image",
    "namespace": "project",
}
"""Keys of other tools, and the key here."""
ROLE_KEYS: dict[str, str] = {
    "replicas": "count",
    "workers": "count",
    "number": "count",
    "size": "count",
    "restart": "on_loss",
    "restartpolicy": "on_loss",
    "optional": "may_fail",
}
"""The same for a role."""


@dataclass(frozen=True)
class Kind:
    """A kind of value: its name in the reference, and what an editor may check."""

    words: str
    schema: dict[str, Any]
    metavar: str
    how: str = "value"
    """How its flag is given: value | switch | list (repeated) | map (repeated NAME=VALUE) | yaml."""
    text: bool = False
    """A scalar is kept as written: `1.10` stays 1.10."""


def _written(pattern: str, **number: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", **number}, {"type": "string", "pattern": pattern}]}


_SCALAR: dict[str, Any] = {"type": ["string", "number", "boolean"]}
KINDS: dict[str, Kind] = {
    "command": Kind(
        "text (run by the shell) or list of arguments",
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": _SCALAR, "minItems": 1}]},
        "COMMAND",
    ),
    "shell": Kind("text (run by the shell)", {"type": "string", "minLength": 1}, "COMMAND"),
    "setup": Kind("text or mapping", {}, "COMMAND"),
    "text": Kind("text", {"type": "string", "minLength": 1}, "TEXT", text=True),
    "name": Kind("name", {"type": ["string", "integer"], "pattern": names.SLUG_PATTERN}, "NAME", text=True),
    "place": Kind("name", {"type": "string", "pattern": names.PLACE_PATTERN}, "NAME", text=True),
    "path": Kind("path", {"type": "string", "minLength": 1}, "PATH", text=True),
    "image": Kind("image reference", {"type": "string", "pattern": names.IMAGE_PATTERN}, "IMAGE", text=True),
    "variables": Kind(
        "mapping of names to values",
        {
            "type": "object",
            "propertyNames": {"pattern": names.VARIABLE_PATTERN, "not": {"pattern": "^STOKER_"}},
            "additionalProperties": _SCALAR,
        },
        "NAME=VALUE",
        "map",
        text=True,
    ),
    "mapping": Kind("mapping", {"type": "object"}, "YAML", "yaml"),
    "cpu": Kind(
        "cores", _written(quantities.CPU_PATTERN, exclusiveMinimum=0, maximum=quantities.MAX_CPU), "CORES"
    ),
    "size": Kind(
        "size", _written(quantities.SIZE_PATTERN, minimum=1 << 20, maximum=quantities.MAX_SIZE), "SIZE"
    ),
    "duration": Kind(
        "duration",
        _written(quantities.DURATION_PATTERN, minimum=0, maximum=quantities.MAX_DURATION),
        "DURATION",
    ),
    "percent": Kind("percentage", _written(quantities.PERCENT_PATTERN, minimum=0, maximum=100), "PERCENT"),
    "gpus": Kind("whole number", {"type": "integer", "minimum": 0, "maximum": quantities.MAX_GPU}, "N"),
    "count": Kind("whole number", {"type": "integer", "minimum": 1, "maximum": quantities.MAX_WORKERS}, "N"),
    "processes": Kind(
        "whole number", {"type": "integer", "minimum": 1, "maximum": quantities.MAX_PROCESSES}, "N"
    ),
    "keep": Kind("whole number", {"type": "integer", "minimum": 1, "maximum": 10_000}, "N"),
    "retries": Kind("whole number", {"type": "integer", "minimum": 0, "maximum": 1000}, "N"),
    "workers": Kind(
        "whole number or range `A..B`",
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": quantities.WORKERS_PATTERN},
            ]
        },
        "N|A..B",
    ),
    "priority": Kind(
        "`low`, `normal`, `high` or a whole number",
        {
            "anyOf": [
                {"enum": list(quantities.PRIORITIES)},
                {"type": "integer", "minimum": -1000, "maximum": 1000},
            ]
        },
        "PRIORITY",
    ),
    "choice": Kind("choice", {"type": "string"}, "CHOICE"),
    "switch": Kind("true or false", {"type": "boolean"}, "", "switch"),
    "globs": Kind(
        "list of patterns", {"type": "array", "items": {"type": "string"}}, "PATTERN", "list", text=True
    ),
    "kept": Kind(
        "`none`, size, pattern, or list of patterns",
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
            ]
        },
        "PATTERN",
        "list",
        text=True,
    ),
    "secrets": Kind(
        "list of names",
        {"type": "array", "items": {"type": "string", "pattern": names.VARIABLE_PATTERN}},
        "NAME",
        "list",
        text=True,
    ),
    "tags": Kind(
        "list of tags",
        {"type": "array", "items": {"type": ["string", "number"], "pattern": names.TAG_PATTERN}},
        "TAG",
        "list",
        text=True,
    ),
    "sources": Kind(
        "mapping of names to sources",
        {
            "type": "object",
            "propertyNames": {"pattern": names.INPUT_PATTERN},
            "additionalProperties": {"type": "string", "pattern": "^(?:data|s3|pvc|file)://"},
        },
        "NAME=SOURCE",
        "map",
        text=True,
    ),
    "arguments": Kind(
        "list of arguments", {"type": "array", "items": _SCALAR}, "ARGUMENT", "list", text=True
    ),
    "mounts": Kind(
        "mapping of paths to sources",
        {
            "type": "object",
            "propertyNames": {"pattern": "^/."},
            "additionalProperties": {"type": "string", "pattern": "^(?:pvc://.+|/.+|empty(?::ro)?)$"},
        },
        "PATH=SOURCE",
        "map",
        text=True,
    ),
    "template": Kind("pod template", {"type": "object"}, "YAML", "yaml"),
    "roles": Kind("mapping of role names to roles", {"type": "object"}, "YAML", "yaml"),
}


@dataclass(frozen=True)
class Key:
    """One key. `path` is dotted; `*` stands for a name chosen by the user."""

    path: str
    kind: str
    meaning: str
    example: Any
    default: Any = None
    """As written in a job file; None: no default."""
    flag: str | None = None
    """Its flag of `stoker run`, if it has one."""
    note: str = ""
    """Describes a default that is not a plain value."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("."))

    @property
    def choices(self) -> tuple[str, ...]:
        return CHOICES.get(self.path, ())


KEYS: tuple[Key, ...] = (
    Key("name", "name", "The run's name; its id is made from it.", "digits", None, "--name", "from the script or the directory"),
    Key("run", "command", "The command that trains. Text is run by `/bin/sh -c`, a list is started as it is.", "python train.py --epochs 20", None, None, "required, except for an `image` with its own command"),
    Key("args", "arguments", "Arguments for the image's own command (its ENTRYPOINT), instead of its own; not together with `run`.", ["--epochs", "5"], None, "--arg", "the image's"),
    Key("setup", "setup", "Prepares the environment before the command; run once per content of its inputs and cached.", "pip install -r requirements.txt", None, "--setup"),
    Key("setup.run", "shell", "The command of a setup written as a mapping.", "pip install -r requirements.txt", None, None, "required in a mapping"),
    Key("setup.inputs", "globs", "Files whose content decides whether the setup runs again, relative to `workdir`.", ["requirements.txt", "vendor/**"], None, "--setup-input", "the usual requirement files and what the command names"),
    Key("image", "image", "Container image to run in.", "registry.example.com/team/torch:2.9", None, "--image", "this Python environment; on a cluster, the cluster's default"),
    Key("workdir", "path", "Directory that is shipped and worked in, relative to the job file. `.gitignore` and `.stokerignore` are honoured.", "training", ".", "--workdir"),
    Key("env", "variables", "Environment variables, kept as written.", {"OMP_NUM_THREADS": 1}, None, "--env", "none"),
    Key("resources", "mapping", "What each task gets.", {"cpu": 4, "memory": "8Gi", "gpu": 1}, None, None, "no limits"),
    Key("resources.cpu", "cpu", "Cores.", 4, None, "--cpu", "no limit"),
    Key("resources.memory", "size", "Memory; going over it ends the run as `oom`.", "8Gi", None, "--memory", "no limit"),
    Key("resources.gpu", "gpus", "Whole GPUs, owned by the task alone.", 1, 0, "--gpu"),
    Key("resources.shm", "size", "Shared memory (/dev/shm), for data loaders with many workers.", "2Gi", None, "--shm", "the machine's"),
    Key("resources.disk", "size", "Scratch disk.", "50Gi", None, "--disk", "no limit"),
    Key("workers", "workers", "How many workers; a range is elastic.", "2..8", 1, "--workers"),
    Key("processes", "processes", "Training processes per worker, at most 1024.", 1, None, "--processes", "1, or its GPUs for torch scripts that do not launch themselves"),
    Key("framework", "choice", "Sets up the world for a distributed framework; `none`: ranks and peers only.", "torch", None, "--framework", "seen in the script's imports where there are several processes; else none"),
    Key("roles", "roles", "Groups of tasks beside the workers: parameter servers, a chief, evaluators.", {"ps": {"count": 2, "run": "python ps.py", "on_loss": "task"}}, None, "--roles", "none"),
    Key("roles.*.count", "count", "How many tasks the role has.", 2, 1),
    Key("roles.*.run", "command", "The role's command.", "python ps.py", None, None, "the job's"),
    Key("roles.*.resources", "mapping", "What each task of the role gets; keys as in `resources`.", {"cpu": 2, "memory": "4Gi"}, None, None, "no limits"),
    Key("roles.*.env", "variables", "Variables of the role, over the job's.", {"PS_PORT": 2222}, None, None, "none"),
    Key("roles.*.image", "image", "The role's own image.", "registry.example.com/team/ps:1", None, None, "the job's"),
    Key("roles.*.args", "arguments", "Arguments for the command of the role's image.", ["--port", "2222"], None, None, "the image's"),
    Key("roles.*.pod", "template", "Additions to the role's pods, instead of the job's.", {"spec": {"nodeSelector": {"disk": "ssd"}}}, None, None, "the job's"),
    Key("roles.*.on_loss", "choice", "What happens when a task of the role is lost: the world starts again, only the task comes back, or nothing.", "task", None, None, "`world`; `task` for ps, evaluator, scheduler and dask workers"),
    Key("roles.*.ends", "switch", "The run is over when all tasks of this role are.", True, None, None, "a launcher, a client or TensorFlow's chief where there is one; else all that train"),
    Key("roles.*.may_fail", "switch", "Tasks of this role may fail without failing the run.", True, False),
    Key("on_loss", "choice", "What happens when a worker is lost: the world starts again from the newest checkpoint, only that worker comes back, or nothing.", "task", "world", "--on-loss"),
    Key("start_within", "duration", "How long the last task of a run may take to come up after the first; then all of them are released and the run queues again.", "10m", "10m", "--start-within"),
    Key("warm", "switch", "Keep a copy of each process of several workers right after it has imported torch, so that a restart of the world need not import it again. Not done for code that sets variables that torch reads.", False, True, "--warm"),
    Key("hang", "mapping", "When a run that prints nothing, reports nothing and uses no GPU counts as hung.", {"after": "30m", "then": "restart"}, None, None, "never"),
    Key("hang.after", "duration", "For how long.", "30m", "30m", "--hang-after"),
    Key("hang.then", "choice", "What happens then: `report` keeps the stacks of every process, `restart` starts again from the newest checkpoint too.", "restart", "report", "--hang-then"),
    Key("inputs", "sources", "Datasets to read: `data://NAME@VERSION`, `s3://BUCKET/PATH`, `pvc://CLAIM`, or `file:///PATH` for what is on this machine. `STOKER_INPUT_NAME` says where each one is.", {"digits": "data://digits@3"}, None, "--input", "none"),
    Key("mounts", "mounts", "Writable mounts: `pvc://CLAIM/PATH` on a cluster, a folder of this machine here, `empty` for scratch; `:ro` at the end is read-only.", {"/data": "pvc://datasets/mnist:ro"}, None, "--mount", "none"),
    Key("checkpoint", "mapping", "How checkpoints are kept.", {"keep": 3, "best": {"metric": "val_acc", "mode": "max"}}, None, None, "the newest three"),
    Key("checkpoint.keep", "keep", "How many of the newest stored checkpoints are kept.", 3, 3, "--checkpoint-keep"),
    Key("checkpoint.best", "mapping", "Keep the best one too.", {"metric": "val_acc", "mode": "max"}, None, None, "none"),
    Key("checkpoint.best.metric", "text", "The metric that decides which is best.", "val_acc", None, "--checkpoint-best-metric", "required in `best`"),
    Key("checkpoint.best.mode", "choice", "Whether a higher or a lower value is better.", "max", None, "--checkpoint-best-mode", "required in `best`"),
    Key("checkpoint.world_size", "choice", "Whether another number of workers may resume a checkpoint.", "same", "any", "--checkpoint-world-size"),
    Key("retries", "retries", "How often a run that failed by its own fault is tried again. Losses that are not its fault cost nothing.", 2, 0, "--retries"),
    Key("timeout", "duration", "How long one attempt may train.", "12h", None, "--timeout", "no limit"),
    Key("priority", "priority", "Position in the queue, higher first: low is -10, normal 0, high 10.", "high", "normal", "--priority"),
    Key("idle", "mapping", "What to do with a run that leaves its GPUs idle.", {"gpu_below": "5%", "for": "30m", "then": "suspend"}, None, None, "nothing"),
    Key("idle.gpu_below", "percent", "GPU use that counts as idle.", "5%", "5%", "--idle-gpu-below"),
    Key("idle.for", "duration", "For how long.", "30m", "30m", "--idle-for"),
    Key("idle.then", "choice", "What happens then.", "suspend", "suspend", "--idle-then"),
    Key("secrets", "secrets", "Names of variables whose values are read at submit, from the environment or a file, and never shown.", ["HF_TOKEN"], None, "--secret", "none"),
    Key("grace", "duration", "Time between SIGTERM and SIGKILL.", "60s", "60s", "--grace"),
    Key("keep_files", "kept", "What is kept of the files that the run writes into its working folder: patterns as in `.gitignore` (`!` before what is not kept), `none`, or a size that limits it.", ["runs/", "*.pt", "20Gi"], None, "--keep-files", "everything but caches and what `.stokerignore` names, up to a tenth of the free disk"),
    Key("keep_on_failure", "duration", "How long a task that failed for good keeps its place and files, for inspection with `stoker shell`.", "30m", "0s", "--keep-on-failure"),
    Key("lost_after", "duration", "How long a task on a node that is not ready may be silent before it is replaced. No effect on one machine, where a loss is always proven.", "2m", "2m", "--lost-after"),
    Key("lease", "duration", "How long a task in a cluster goes on without its server. No effect on one machine, where a task goes on for as long as its directory is there.", "24h", "24h", "--lease"),
    Key("exclusive", "switch", "Wait for the lease instead of replacing a silent task.", True, False, "--exclusive"),
    Key("launcher", "choice", "`none` runs the image as it is; then Stoker knows only its logs and exit codes.", "none", "auto", "--launcher"),
    Key("python", "path", "Python that runs the launcher inside an image without a shell.", "/usr/bin/python3", None, "--python", "the first on PATH"),
    Key("pool", "place", "A cluster's named node pool.", "a100", None, "--pool", "any node"),
    Key("pod", "template", "Additions to the pods on a cluster, in Kubernetes' words: node selectors, tolerations, volumes. The cluster's admin must allow what could reach beyond the pod.", {"spec": {"nodeSelector": {"disk": "ssd"}}}, None, "--pod", "none"),
    Key("tags", "tags", "Words to find the run by.", ["baseline"], None, "--tag", "none"),
    Key("project", "name", "The project the run belongs to.", "vision", "default", "--project"),
    Key("cluster", "place", "Where to run: a cluster's name, `local`, or `any` for wherever it fits first.", "gpu-prod", None, "--cluster", "this machine"),
)  # fmt: skip
BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}


def find(path: tuple[str | int, ...]) -> Key | None:
    """The key that a value at `path` belongs to. List items and named entries belong to their list or mapping."""
    parts = [str(part) for part in path]
    if len(parts) >= 3 and parts[0] == "roles" and parts[2] == "resources":
        parts = parts[2:]
    while parts:
        if (key := BY_PATH.get(".".join(parts))) is not None:
            return key
        if (
            parts[0] == "roles"
            and len(parts) >= 3
            and (key := BY_PATH.get(f"roles.*.{parts[2]}")) is not None
        ):
            return key
        parts.pop()
    return None


def children(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys allowed in the mapping at `path`, in the table's order; empty where the user chooses the names."""
    parts = tuple(str(part) for part in path)
    if len(parts) >= 2 and parts[0] == "roles":
        parts = parts[2:] if len(parts) >= 3 and parts[2] == "resources" else ("roles", "*", *parts[2:])
    size = len(parts)
    return tuple(
        k.parts[size]
        for k in KEYS
        if len(k.parts) == size + 1 and k.parts[:size] == parts and k.parts[size] != "*"
    )


def holds_command(path: tuple[str | int, ...]) -> bool:
    """Whether the value at `path` is a command: its text is not parsed as YAML."""
    key = find(path)
    return key is not None and key.kind in ("command", "shell", "setup")


def keeps_text(path: tuple[str | int, ...]) -> bool:
    """Whether a scalar at `path` is kept as written."""
    key = find(path)
    if key is None:
        return False
    if key.kind == "command":
        return isinstance(path[-1], int)
    return KINDS[key.kind].text
