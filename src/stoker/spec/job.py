"""The job: what a user asks for, checked and normalised.

Values are plain: seconds, bytes, cores, percents. Models are frozen and read no files. `load` reads files, with lines
and nearest matches in its errors. `keys` describes each key for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    field_validator,
    model_validator,
)
from pydantic_core.core_schema import ValidationInfo

from stoker.spec import kept_files, names, quantities
from stoker.spec.keys import CHOICES, SYNONYMS
from stoker.spec.quantities import Bad, Workers

T = TypeVar("T")


def _command(value: Any) -> str | tuple[str, ...]:
    """One line for the shell, or a list of arguments that is started as it is."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise Bad("is an empty list", hint="Write a command, as in `python train.py`.")
        for number, item in enumerate(value, 1):
            if item is None or isinstance(item, (list, tuple, dict)):
                raise Bad(f"argument {number} is {quantities.show(item)}, not text", hint="Put it in quotes.")
        words = tuple(names.text(item) for item in value)
        if not words[0].strip():
            raise Bad("begins with an empty argument", hint="Write the program first.")
        return words
    if not isinstance(value, str):
        raise Bad(
            f"{quantities.show(value)} is not a command", hint="Write it as in `python train.py --epochs 20`."
        )
    if not value.strip():
        raise Bad(f"{quantities.show(value)} is empty", hint="Write a command, as in `python train.py`.")
    return names.text(value)


def _shell(value: Any) -> str:
    found = _command(value)
    if not isinstance(found, str):
        raise Bad(
            "a list is not a shell command",
            hint="Write it on one line, as in `pip install -r requirements.txt`.",
        )
    return found


def _one_of(key: str) -> PlainValidator:
    return PlainValidator(partial(quantities.choice, choices=CHOICES[key], synonyms=SYNONYMS.get(key)))


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("yes", "on", "y"):
        raise Bad(f"{quantities.show(value)} is text in YAML 1.2", hint="Write `true`.")
    if isinstance(value, str) and value.lower() in ("no", "off", "n"):
        raise Bad(f"{quantities.show(value)} is text in YAML 1.2", hint="Write `false`.")
    raise Bad(
        f"{quantities.show(value)} is not true or false",
        hint="Write `true` or `false`.",
        choices=("true", "false"),
    )


def _unique(items: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


Cpu = Annotated[float | None, PlainValidator(quantities.cpu)]
Memory = Annotated[int | None, PlainValidator(quantities.memory)]
Duration = Annotated[float, PlainValidator(quantities.duration)]
Count = Annotated[int, PlainValidator(partial(quantities.count, least=1, most=quantities.MAX_WORKERS))]
Gpus = Annotated[
    int, PlainValidator(partial(quantities.count, most=quantities.MAX_GPU, noun="whole number of GPUs"))
]
Percent = Annotated[float, PlainValidator(quantities.percent), PlainSerializer(quantities.show_percent)]
Command = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(_command),
    PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value, return_type=Any),
]
Shell = Annotated[str, PlainValidator(_shell)]
Slug = Annotated[str, PlainValidator(names.slug)]
Line = Annotated[str, PlainValidator(names.line)]
Variable = Annotated[str, PlainValidator(names.variable)]
Text = Annotated[str, PlainValidator(names.text)]
Tag = Annotated[str, PlainValidator(names.tag)]
Secret = Annotated[str, PlainValidator(names.secret)]
Glob = Annotated[str, PlainValidator(names.glob)]
Place = Annotated[str | None, PlainValidator(names.place)]
WorkerCount = Annotated[Workers, PlainValidator(quantities.workers), PlainSerializer(Workers.to_json)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Resources(_Part):
    """Resources of each task. None: not limited, and nothing reserved."""

    cpu: Cpu = None
    memory: Memory = None
    gpu: Gpus = 0
    shm: Memory = None
    disk: Memory = None


class Setup(_Part):
    """A command that prepares the environment, run once per content of its inputs."""

    run: Shell
    inputs: tuple[Glob, ...] = ()
    """Empty: see `stoker.spec.setup.select`."""


class Best(_Part):
    metric: Line
    mode: Annotated[Literal["max", "min"], _one_of("checkpoint.best.mode")]


class Checkpoint(_Part):
    keep: Annotated[int, PlainValidator(partial(quantities.count, least=1, most=10_000))] = 3
    best: Best | None = None
    world_size: Annotated[Literal["any", "same"], _one_of("checkpoint.world_size")] = "any"


class Idle(_Part):
    gpu_below: Percent = 5.0
    for_: Duration = Field(default=1800.0, alias="for")
    then: Annotated[Literal["suspend", "stop"], _one_of("idle.then")] = "suspend"


OnLoss = Annotated[Literal["world", "task", "ignore"], _one_of("on_loss")]


class Hang(_Part):
    """When a run without output or activity counts as hung."""

    after: Duration = 1800.0
    then: Annotated[Literal["report", "restart"], _one_of("hang.then")] = "report"


def _arguments(value: Any) -> tuple[str, ...]:
    """Arguments of the image's own command. An empty list is valid."""
    if not isinstance(value, (list, tuple)):
        raise Bad(
            f"{quantities.show(value)} is not a list of arguments", hint='Write it as in `["--epochs", "5"]`.'
        )
    return tuple(_command(value)) if value else ()


def _template(value: Any) -> Mapping[str, Any]:
    """Additions to a pod, in Kubernetes' form. The cluster decides which of them it accepts."""
    if not isinstance(value, Mapping) or not set(value) <= {"metadata", "spec"}:
        raise Bad(
            f"{quantities.show(value)} is not a pod template",
            hint="Write `metadata` and `spec` as in a pod, as in `{spec: {nodeSelector: {disk: ssd}}}`.",
            choices=("metadata", "spec"),
        )
    for key, part in value.items():
        if not isinstance(part, Mapping):
            raise Bad(f"`{key}` is {quantities.show(part)}, not a mapping")
    return value


Arguments = Annotated[
    tuple[str, ...], PlainValidator(_arguments), PlainSerializer(lambda value: list(value), return_type=Any)
]
Mounts = Mapping[
    Annotated[str, PlainValidator(names.mount_path)], Annotated[str, PlainValidator(names.mount_source)]
]
PodTemplate = Annotated[Mapping[str, Any], PlainValidator(_template)]


class Role(_Part):
    """A group of equal tasks beside the workers. Missing keys are taken from the job."""

    count: Count = 1
    run: Command = None
    resources: Resources = Resources()
    env: Mapping[Variable, Text] = {}
    image: Annotated[str | None, PlainValidator(names.image)] = None
    args: Arguments = ()
    pod: PodTemplate | None = None
    on_loss: OnLoss | None = None
    """None: decided by the role's name, see `stoker.spec.roles`."""
    ends: Annotated[bool | None, PlainValidator(_switch)] = None
    """Whether the run is over when all tasks of this role are done. None: decided by the role's name."""
    may_fail: Annotated[bool, PlainValidator(_switch)] = False

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if self.args and self.run is not None:
            raise Bad(
                "args: is for the image's own command, and `run` replaces that", hint="Add them to `run`."
            )
        return self

    def argv(self) -> list[str]:
        return _argv(self.run)


def _role_name(value: Any) -> str:
    found = names.slug(value, noun="role's name")
    if found in ("worker", "workers"):
        raise Bad(
            f'"{found}" is the role of the job itself',
            hint="Set `workers`, `run` and `resources` of the job instead.",
        )
    return found


def _distinct_inputs(inputs: Mapping[str, str]) -> Mapping[str, str]:
    seen: dict[str, str] = {}
    for name in inputs:
        variable = name.upper().replace("-", "_")
        if variable in seen:
            raise Bad(
                f'"{seen[variable]}" and "{name}" would both be STOKER_INPUT_{variable}',
                hint="Rename one of them.",
            )
        seen[variable] = name
    return inputs


RoleName = Annotated[str, PlainValidator(_role_name)]
InputName = Annotated[str, PlainValidator(names.input_name)]
InputUri = Annotated[str, PlainValidator(names.input_uri)]


class Job(_Part):
    """One job file. Immutable and without I/O; equal jobs have equal `to_json()`.

    Make it with `from_json`, `parse_job`, `load_job` or `job_from_flags`, which raise SpecError. The constructor
    raises pydantic's ValidationError.
    """

    name: Slug = ""
    """Never empty: derived from the command where it is not given."""
    run: Command = None
    """None only with an image: then the image's own command runs."""
    args: Arguments = ()
    """Replace the arguments of the image's own command; only without `run`."""
    setup: Setup | None = None
    image: Annotated[str | None, PlainValidator(names.image)] = None
    workdir: Annotated[str, PlainValidator(partial(names.line, longest=4096, noun="path"))] = "."
    """Relative to the job file, or to the directory of `stoker run`."""
    env: Mapping[Variable, Text] = {}
    resources: Resources = Resources()
    workers: WorkerCount = Workers()
    processes: Count | None = None
    """None: decided by the framework; 1 without one."""
    framework: Annotated[
        Literal["torch", "tensorflow", "jax", "mpi", "horovod", "dask", "none"] | None, _one_of("framework")
    ] = None
    roles: Mapping[RoleName, Role] = {}
    on_loss: OnLoss = "world"
    """For the workers."""
    start_within: Duration = 600.0
    """Seconds for the last task of a gang, counted from the first task that is up."""
    warm: Annotated[bool, PlainValidator(_switch)] = True
    hang: Hang | None = None
    inputs: Annotated[Mapping[InputName, InputUri], AfterValidator(_distinct_inputs)] = {}
    mounts: Mounts = {}
    """Path in the task -> the writable source mounted there."""
    checkpoint: Checkpoint = Checkpoint()
    retries: Annotated[int, PlainValidator(partial(quantities.count, most=1000))] = 0
    timeout: Duration | None = None
    priority: Annotated[int, PlainValidator(quantities.priority)] = 0
    idle: Idle | None = None
    secrets: Annotated[tuple[Secret, ...], AfterValidator(_unique)] = ()
    grace: Annotated[float, PlainValidator(partial(quantities.duration, zero=True))] = 60.0
    keep_files: Annotated[tuple[str, ...], BeforeValidator(kept_files.keep_files)] = ()
    """Patterns, `none`, or a size; see `stoker.spec.kept_files`. Empty: everything but caches, within the default budget."""
    keep_on_failure: Annotated[float, PlainValidator(partial(quantities.duration, zero=True))] = 0.0
    lost_after: Duration = 120.0
    lease: Duration = 86400.0
    exclusive: Annotated[bool, PlainValidator(_switch)] = False
    launcher: Annotated[Literal["auto", "none"], _one_of("launcher")] = "auto"
    python: Annotated[str | None, PlainValidator(partial(names.line, longest=4096, noun="path"))] = None
    pool: Place = None
    pod: PodTemplate | None = None
    """Additions to its pods on a cluster, as far as the cluster's admin allows them."""
    tags: Annotated[tuple[Tag, ...], AfterValidator(_unique)] = ()
    project: Slug = "default"
    cluster: Place = None

    @field_validator("setup", mode="before")
    @classmethod
    def _setup_in_short(cls, value: Any) -> Any:
        return {"run": value} if isinstance(value, (str, list, tuple)) else value

    @field_validator("secrets", mode="before")
    @classmethod
    def _secrets_are_names(cls, value: Any) -> Any:
        return names.secret(value) if isinstance(value, dict) else value

    @field_validator("secrets", mode="after")
    @classmethod
    def _secret_or_plain(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        both = [name for name in value if name in info.data.get("env", {})]
        if both:
            raise Bad(
                f'"{both[0]}" is both a secret and a variable in `env`', hint="Remove it from one of them."
            )
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.workers.max == 0 and not self.roles:
            raise Bad("workers: 0 leaves nothing to run", hint="Write how many, or leave it out for one.")
        if self.run is None and self.image is None and self._own_command():
            if self.workers.max == 0:
                bare = next(
                    name for name, role in self.roles.items() if role.run is None and role.image is None
                )
                raise Bad(
                    f"roles.{bare}: has no command", hint="Give it a `run`, or the job one for all of them."
                )
            raise Bad("run: is missing", hint="Add a line like `run: python train.py`.")
        if self.args and self.run is not None:
            raise Bad(
                "args: is for the image's own command, and `run` replaces that", hint="Add them to `run`."
            )
        if not self.name:
            commands = [self.argv(), *(role.argv() for role in self.roles.values())]
            first = next((argv for argv in commands if argv), [self.image or ""])
            object.__setattr__(self, "name", names.derive_name(first))
        return self

    def _own_command(self) -> bool:
        """Whether some task runs the job's own command."""
        return self.workers.max > 0 or any(
            role.run is None and role.image is None for role in self.roles.values()
        )

    def argv(self) -> list[str]:
        """The command as a list of arguments; empty where the image's own command runs."""
        return _argv(self.run)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, normalised: numbers for quantities, defaults included, keys without a value left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def from_json(cls, raw: Any) -> Job:
        """Reads the output of `to_json`, or a job in the form of a job file. Raises SpecError."""
        from stoker.spec.load import job_from_tree  # lazy: `load` imports this module

        return job_from_tree(raw)


def _argv(command: str | tuple[str, ...] | None) -> list[str]:
    if command is None:
        return []
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
