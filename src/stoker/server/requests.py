"""The bodies of requests. Unknown keys are refused: an `id` or `owner` in a body is a mistake or an attack."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

Key = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,200}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
SecretValue = Annotated[str, StringConstraints(max_length=65536)]
Secrets = Annotated[dict[SecretName, SecretValue], Field(max_length=100)]


def _variable(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    try:
        encoded = name.encode("utf-8", "surrogateescape"), value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return bool(name) and "=" not in name and not any(b"\0" in part for part in encoded)


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Submission(RequestBody):
    key: Key
    job: dict[str, Any]
    code: Digest | None = None
    secrets: Secrets = Field(default_factory=dict)
    record: dict[str, Any] = Field(default_factory=dict)
    links: Annotated[dict[str, str], Field(max_length=1000)] = Field(default_factory=dict)
    """Links that lead out of the working folder. Not in `record`: a server that cannot make them has to refuse them."""

    def recorded(self) -> dict[str, Any]:
        """What is recorded of the submission."""
        return {**self.record, "links": self.links} if self.links else self.record

    @field_validator("record")
    @classmethod
    def _environment(cls, record: dict[str, Any]) -> dict[str, Any]:
        """Refuses what cannot become the environment of a process."""
        environment = record.get("environment")
        if environment is not None and not (
            isinstance(environment, dict) and all(_variable(*item) for item in environment.items())
        ):
            raise ValueError("`environment` must map names of variables to text")
        names = record.get("secrets")
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names) and len(names) <= 100
        ):
            raise ValueError("`secrets` must be a list of names of variables")
        return record


Changes = Annotated[
    list[Annotated[str, StringConstraints(max_length=4096)]], Field(alias="set", max_length=100)
]


class Cluster(RequestBody):
    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    config: dict[str, Any] = Field(default_factory=dict)
    changes: Changes = []


class ClusterChange(RequestBody):
    changes: Changes


class Stop(RequestBody):
    kill: bool = False


class Resize(RequestBody):
    cpu: float | str | None = None
    memory: int | str | None = None


class Resume(RequestBody):
    key: Key
    secrets: Secrets = Field(default_factory=dict)
    changes: Changes = []


TaskName = Annotated[str, StringConstraints(max_length=80)]


class Drill(RequestBody):
    how: Annotated[str, StringConstraints(max_length=40)] = "process"
    task: TaskName | None = None


class Shell(RequestBody):
    task: TaskName | None = None


class Scale(RequestBody):
    workers: Annotated[int, Field(ge=1, le=100_000)]


class Digests(RequestBody):
    digests: Annotated[list[Digest], Field(max_length=20_000)]


class Backup(RequestBody):
    path: Annotated[str, StringConstraints(min_length=1, max_length=4000)] | None = None


class Forget(RequestBody):
    runs: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=200)]], Field(max_length=10_000)
    ] = []


class Sizes(RequestBody):
    runs: Annotated[list[Annotated[str, StringConstraints(max_length=200)]], Field(max_length=10_000)]
    metric: Annotated[str, StringConstraints(max_length=4096)] | None = None


class Nothing(RequestBody):
    """A request without a body of its own."""
