"""The settings of a cluster, checked and normalised.

Values are plain (cores, bytes, seconds). The model is frozen and does no I/O. `from_json` and `changed` raise one
SpecError that names every mistake. `allow` lists what training pods may request beyond the safe fields; everything
else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from stoker.engine.kubernetes.manifests import template
from stoker.errors import SpecError
from stoker.spec import names, quantities, yaml12
from stoker.spec.load import put
from stoker.spec.problems import Problem, combine, nearest, place, show, without_nulls
from stoker.spec.quantities import Bad

__all__ = ["Autoscale", "ClusterConfig", "Pool", "Rdma", "Sidecar", "Size", "Toleration", "changed"]

T = TypeVar("T")

IN_CLUSTER = "in-cluster"
_DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DNS_NAME = rf"(?=.{{1,253}}$){_DNS_LABEL}(?:\.{_DNS_LABEL})*"
_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = rf"(?:{_DNS_NAME[len('(?=.{1,253}$)') :]}/)?{_LABEL_NAME}"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def _matching(pattern: str, noun: str, example: str, *, empty: bool = False) -> PlainValidator:
    compiled = re.compile(pattern)

    def check(value: Any) -> str:
        found = names.text(value)
        if (empty and not found) or compiled.fullmatch(found):
            return found
        raise Bad(f"{show(found)} is not {noun}", hint=f"Write it as in `{example}`.")

    return PlainValidator(check)


def _image(value: Any) -> str:
    return "" if value == "" else names.image(value)


def _one_of(*choices: str) -> PlainValidator:
    return PlainValidator(partial(quantities.choice, choices=choices))


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Bad(f"{show(value)} is not true or false", choices=("true", "false"))


def _unique(items: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def _user(value: Any) -> int | str:
    if isinstance(value, str) and value in ("image", "platform"):
        return value
    try:
        return quantities.count(value, most=(1 << 31) - 1)
    except Bad:
        raise Bad(
            f"{show(value)} is not a user",
            hint="Write `image` (the image's, where it is a number), `platform` (the cluster assigns one) or a number.",
        ) from None


def _path(value: Any) -> str:
    found = names.line(value, longest=255, noun="path")
    if found not in template.GRANTS and not found.startswith(("spec.", "metadata.")):
        near = nearest(found, tuple(template.GRANTS))
        hint = (
            f"Did you mean `{near}`?"
            if near
            else f"Choices: {', '.join(template.GRANTS)}, or a path in the pod."
        )
        raise Bad(f"{show(found)} is not a path in a pod", hint=hint, choices=tuple(template.GRANTS))
    return found


Switch = Annotated[bool, PlainValidator(_switch)]
Cpu = Annotated[float, PlainValidator(quantities.cpu)]
Memory = Annotated[int, PlainValidator(quantities.memory)]
Duration = Annotated[float, PlainValidator(quantities.duration)]
Grace = Annotated[float, PlainValidator(partial(quantities.duration, zero=True))]
Count = Annotated[int, PlainValidator(partial(quantities.count, most=100_000))]
Image = Annotated[str, PlainValidator(_image)]
Label = Annotated[str, _matching(rf"(?:{_LABEL_NAME})?", "a label's value", "gpu-a100")]
LabelKey = Annotated[str, _matching(_LABEL_KEY, "a label's name", "example.com/team")]
Text = Annotated[str, PlainValidator(names.text)]
Namespace = Annotated[str, _matching(_DNS_LABEL, "a namespace", "training", empty=True)]
ObjectName = Annotated[str, _matching(_DNS_NAME, "an object's name", "regcred")]
MaybeObject = Annotated[str, _matching(_DNS_NAME, "an object's name", "checkpoints", empty=True)]
Resource = Annotated[
    str, _matching(rf"{_DNS_NAME[len('(?=.{1,253}$)') :]}/{_LABEL_NAME}", "a resource", "nvidia.com/gpu")
]
Slug = Annotated[str, PlainValidator(names.place)]
Line = Annotated[str, PlainValidator(lambda value: "" if value == "" else names.line(value, longest=4096))]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Size(_Part):
    cpu: Cpu
    memory: Memory
    gpu: Count = 0


class Autoscale(Size):
    """Nodes that the cluster's autoscaler adds to a pool when pods wait for them."""

    max_nodes: Count
    """In total, including existing nodes."""


class Toleration(_Part):
    """Written in full, or in kubectl's short form: `key=value:NoSchedule`, `key:NoSchedule`, `key`."""

    key: Annotated[str, _matching(_LABEL_KEY, "a taint's name", "nvidia.com/gpu", empty=True)] = ""
    operator: Annotated[Literal["Equal", "Exists"], _one_of("Equal", "Exists")] = "Exists"
    value: Label = ""
    effect: Annotated[str, _one_of("", *_EFFECTS)] = ""

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("value") and "operator" not in value:
            return {**value, "operator": "Equal"}
        if not isinstance(value, str):
            return value
        rest, _, effect = value.partition(":")
        key, equals, wanted = rest.partition("=")
        return {"key": key, "operator": "Equal" if equals else "Exists", "value": wanted, "effect": effect}

    def to_manifest(self) -> dict[str, str]:
        found = {"key": self.key, "operator": self.operator, "value": self.value, "effect": self.effect}
        return {name: text for name, text in found.items() if text}


class Pool(_Part):
    """A named part of the cluster's nodes; jobs ask for it by `pool:`."""

    selector: Mapping[LabelKey, Label] = {}
    tolerations: tuple[Toleration, ...] = ()
    gpu_profile: Slug | None = None
    """Which of `gpu_profiles` the GPUs of its nodes have; None: whole GPUs."""
    autoscale: Autoscale | None = None


class Sidecar(_Part):
    """Resources of the courier beside each task. They count wherever the task counts."""

    cpu: Cpu = 0.05
    """Reserved. It uses more only if CPU is idle, at its start and while it transfers files; else it sleeps."""
    cpu_limit: Cpu | None = None
    """For namespaces where every container must have one. At 0.05 cores a courier takes seconds to start."""
    memory: Memory = 96 << 20
    """Reserved, and its limit."""


class Rdma(_Part):
    """RDMA devices for GPU tasks that work together."""

    resource: Resource
    count: Count = 1
    capability: Switch = False
    """Add IPC_LOCK, which most systems require to register memory. Neither `baseline` nor `restricted` pod security
    admits it: the namespace has to be `privileged`."""


class PriorityClasses(_Part):
    """Kubernetes priority classes for runs below `normal`, at `normal` and above. Empty: the cluster's default."""

    low: MaybeObject = ""
    normal: MaybeObject = ""
    high: MaybeObject = ""


class ClusterConfig(_Part):
    """One cluster. Equal configurations have equal `to_json()`."""

    kubeconfig: Line = ""
    """A path; empty: $KUBECONFIG or ~/.kube/config; `in-cluster`: this process's own service account."""
    context: Line = ""
    namespace: Namespace = ""
    """Empty: the context's, else `default`."""
    reach: Annotated[
        Literal["auto", "direct", "proxy", "forward"], _one_of("auto", "direct", "proxy", "forward")
    ] = "auto"
    stoker_image: Image = ""
    """Empty: Stoker's image is in no registry; the launcher travels in a ConfigMap."""
    default_image: Image = ""
    pull_secrets: Annotated[tuple[ObjectName, ...], AfterValidator(_unique)] = ()
    gpu_resource: Resource = "nvidia.com/gpu"
    gpu_profiles: Mapping[Slug, Resource] = {}
    pools: Mapping[Slug, Pool] = {}
    security: Annotated[Literal["restricted", "baseline"], _one_of("restricted", "baseline")] = "restricted"
    user: Annotated[int | str, PlainValidator(_user)] = "image"
    read_only_root: Switch = False
    priority_classes: PriorityClasses = PriorityClasses()
    rdma: Rdma | None = None
    allow: Annotated[tuple[Annotated[str, PlainValidator(_path)], ...], AfterValidator(_unique)] = ()
    pod: Mapping[str, Any] = {}
    labels: Mapping[LabelKey, Label] = {}
    annotations: Mapping[LabelKey, Text] = {}
    checkpoints: MaybeObject = ""
    """A claim that every node can mount (ReadWriteMany). Checkpoint directories on it outlive their node."""
    start_deadline: Duration = 600.0
    """Seconds that a task may stay unable to start for a reason that does not pass by itself."""
    carry: Grace = 30.0
    """Seconds after the grace for the transfer of the last lines and files when something else deletes a pod."""
    silent_after: Duration = 20.0
    """Seconds without a response from a courier before its task counts as silent."""
    sidecar: Sidecar = Sidecar()
    default_cpu: Cpu = 1.0
    """Cores reserved, not limited, for a task that requests none."""
    capacity: Size | None = None
    """How much of the cluster to count on where its nodes may not be listed; None: no bound."""

    @field_validator("allow", mode="before")
    @classmethod
    def _allow_in_short(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("pull_secrets", mode="before")
    @classmethod
    def _one_pull_secret(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _whole(self) -> ClusterConfig:
        for name, pool in self.pools.items():
            if pool.gpu_profile is not None and pool.gpu_profile not in self.gpu_profiles:
                known = ", ".join(self.gpu_profiles) or "none"
                raise _At(
                    ("pools", name, "gpu_profile"),
                    Bad(f"{show(pool.gpu_profile)} is not one of gpu_profiles", hint=f"There are: {known}."),
                )
        for path, message, hint in template.mistakes(self.pod, self.allow):
            raise _At(("pod",), Bad(f"{path} {message}", hint=hint))
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, normalised, without values that are the default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def from_json(cls, raw: Any, *, source: str | None = None) -> ClusterConfig:
        """Read the output of `to_json`, or the same keys written by a user. Raises SpecError."""
        return _read(raw, source, {}, [])


class _At(ValueError):
    """A mistake found by a check of the whole model that belongs to one key."""

    def __init__(self, path: tuple[str, ...], bad: Bad) -> None:
        super().__init__(bad.message)
        self.path, self.bad = path, bad


def changed(config: ClusterConfig, settings: Sequence[str]) -> ClusterConfig:
    """A copy with some values changed: `key=value` or `key.beneath=value`, the value YAML; `null` removes."""
    tree = config.to_json()
    given: dict[tuple[str | int, ...], str] = {}
    mistakes: list[Problem] = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            hint = "Write it as `namespace=training`."
            mistakes.append(Problem((), f"{show(setting)} is not KEY=VALUE", hint, call=setting, named=True))
            continue
        try:
            refused = put(tree, path, _value(text))
        except yaml12.YamlError as exc:
            refused = exc.message
        if refused:
            mistakes.append(Problem(path, refused, call=setting))
        else:
            given[path] = setting
    return _read(tree, None, given, mistakes)


def _value(text: str) -> Any:
    """YAML, except that text that YAML would not read as such (`registry:5000/x`, `a=b:NoSchedule`) needs no quotes."""
    if not text.strip():
        return ""
    node = yaml12.compose(text)
    return None if node is None else yaml12.plain(node, {}, lambda path: False)


def _read(
    raw: Any,
    source: str | None,
    given: Mapping[tuple[str | int, ...], str],
    found: Sequence[Problem],
) -> ClusterConfig:
    if not isinstance(raw, Mapping):
        raise SpecError(f"a cluster's settings must be a mapping of keys, not {show(raw)}")
    tree, mistakes = without_nulls(raw)
    mistakes = [*found, *mistakes]
    config = None
    try:
        config = ClusterConfig.model_validate(tree)
    except ValidationError as exc:
        mistakes += [_explain(dict(error)) for error in exc.errors(include_url=False)]
    if mistakes or config is None:
        placed = [place(problem, source, {}, given) for problem in mistakes]
        raise combine(placed, source or "the cluster's settings")
    return config


def _explain(error: dict[str, Any]) -> Problem:
    path: tuple[str | int, ...] = tuple(part for part in error["loc"] if part != "[key]")
    cause = (error.get("ctx") or {}).get("error")
    if isinstance(cause, _At):
        return Problem(cause.path, cause.bad.message, cause.bad.hint)
    if isinstance(cause, Bad):
        return Problem(path, cause.message, cause.hint, error.get("input"), cause.choices)
    if error["type"] == "extra_forbidden":
        return _unknown_key(path)
    if error["type"] == "missing":
        return Problem(path, "is missing")
    shown = show(error.get("input"))
    if error["type"] in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return Problem(path, f"{shown} is not a mapping of keys")
    if error["type"] in ("tuple_type", "list_type"):
        return Problem(path, f"{shown} is not a list", f"Write it as `{path[-1]}=[a, b]`.")
    return Problem(path, f"{shown}: {str(error['msg'])[:1].lower()}{str(error['msg'])[1:]}")


def _unknown_key(path: tuple[str | int, ...]) -> Problem:
    choices = _choices(path[:-1])
    near = nearest(str(path[-1]), choices)
    hint = f"Did you mean `{near}`?" if near else f"Keys: {', '.join(choices)}."
    return Problem(path, "no such key", hint, None, choices)


def _choices(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys of the part at `path`."""
    models: dict[str, type[BaseModel]] = {
        "autoscale": Autoscale,
        "capacity": Size,
        "sidecar": Sidecar,
        "rdma": Rdma,
        "priority_classes": PriorityClasses,
        "tolerations": Toleration,
    }
    words = [part for part in path if isinstance(part, str)]
    model: type[BaseModel] = ClusterConfig
    if words:
        model = models.get(words[-1], Pool if words[0] == "pools" else ClusterConfig)
    return tuple(model.model_fields)
