"""Splits a file into documents: some become runs, some do not, and the others are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import SpecError
from stoker.spec import yaml12
from stoker.spec.interop.ledger import file_error
from stoker.spec.problems import nearest, show
from stoker.spec.yaml12 import Mark, YamlError

At = tuple[str | int, ...]

KINDS: dict[str, tuple[str, ...]] = {
    "Pod": ("v1",),
    "Job": ("batch/v1",),
    "TFJob": ("kubeflow.org/v1",),
    "PyTorchJob": ("kubeflow.org/v1",),
    "JAXJob": ("kubeflow.org/v1",),
    "MPIJob": ("kubeflow.org/v1", "kubeflow.org/v2beta1"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1",),
}
"""Kinds that become runs, with their versions."""
BESIDE = frozenset(
    [
        "ConfigMap",
        "Secret",
        "PersistentVolumeClaim",
        "PersistentVolume",
        "Service",
        "ServiceAccount",
        "Namespace",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        "ResourceQuota",
        "LimitRange",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "PriorityClass",
        "StorageClass",
        "ClusterTrainingRuntime",
        "TrainingRuntime",
        "ResourceFlavor",
        "ClusterQueue",
        "LocalQueue",
        "PodGroup",
    ]
)
"""Kinds that users keep in the same file as a job that needs them."""
_SERVES = "it keeps something running for ever, and a run has an end"
_OTHER: dict[str, str] = {
    "Deployment": f"A Deployment is not a training: {_SERVES}. Give the Job or Pod that trains.",
    "StatefulSet": f"A StatefulSet is not a training: {_SERVES}. Give the Job or Pod that trains.",
    "DaemonSet": f"A DaemonSet is not a training: {_SERVES}. Give the Job or Pod that trains.",
    "ReplicaSet": f"A ReplicaSet is not a training: {_SERVES}. Give the Job or Pod that trains.",
    "ReplicationController": f"It is not a training: {_SERVES}. Give the Job or Pod that trains.",
    "CronJob": "Give what it starts, its `spec.jobTemplate`, as a Job of its own; cron can call `stoker submit`.",
    "Kustomization": "Render it first: `kubectl kustomize . | stoker submit -`.",
    "Workflow": "Give one of its steps as a Job.",
    "PipelineRun": "Give one of its steps as a Job.",
    "Experiment": "A search is not read from a file yet. Give one of its trials as a Job.",
    "JobSet": "Give its replicated jobs as Jobs, or write roles in a job file (docs/job-file.md).",
    "RayJob": "Ray brings its own cluster. Give the script to `stoker run`.",
    "XGBoostJob": "Give its command to `stoker run --workers N`; Stoker does not start XGBoost's tracker.",
    "PaddleJob": "Give its command to `stoker run --workers N`.",
}
_TEMPLATED = re.compile(r"\{\{[-\s]*[.\w$\"(]")
_HEAD = re.compile(r"^[ \t\r\f\v{\[,]*[\"']?(?:apiVersion|kind)[\"']?\s*:", re.MULTILINE)
_TEXTS = ("command", "args", "labels", "annotations", "nodeSelector", "matchLabels")


@dataclass(frozen=True)
class Document:
    """One object of a file."""

    source: str
    tree: Mapping[str, Any]
    marks: Mapping[At, Mark]
    at: At = ()
    """Its path within its document; () except in a List."""

    @property
    def kind(self) -> str:
        return _word(self.tree.get("kind"))

    @property
    def version(self) -> str:
        return _word(self.tree.get("apiVersion"))

    @property
    def name(self) -> str:
        metadata = self.tree.get("metadata")
        found = metadata.get("name") or metadata.get("generateName") if isinstance(metadata, Mapping) else ""
        return found if isinstance(found, str) else ""

    @property
    def line(self) -> int:
        mark = self.marks.get((*self.at, "kind")) or self.marks.get(self.at)
        return mark.line if mark else 1


def is_foreign(data: bytes) -> bool:
    """Whether it is a Kubernetes file: no job file has a key `kind` or `apiVersion`."""
    text = _text(data) if len(data) <= yaml12.MAX_BYTES else None
    if text is None or not _HEAD.search(text):
        return False
    try:
        nodes = yaml12.compose_all(text)
    except YamlError:
        return True
    return any(_is_object(node) for node in nodes)


def documents(data: bytes, source: str) -> list[Document]:
    """The objects of the file, in order. Raises SpecError for a file that cannot be read."""
    if len(data) > yaml12.MAX_BYTES:
        raise file_error(source, None, "is larger than 1 MiB", "A manifest is short; keep data elsewhere.")
    text = _text(data)
    if text is None:
        raise file_error(source, None, "is not UTF-8 text", "Save the file as UTF-8.")
    try:
        nodes = yaml12.compose_all(text)
    except YamlError as exc:
        raise _broken(exc, text, source) from exc
    found = [one for node in nodes for one in _objects(node, source)]
    if not found:
        raise file_error(source, None, "is empty", "Give a file with a Job, a Pod or one of Kubeflow's jobs.")
    for one in found:
        _check_kind(one)
        _refuse_templated(one)
    if not any(one.kind in KINDS for one in found):
        names = ", ".join(dict.fromkeys(one.kind for one in found))
        raise file_error(
            source, found[0].line, f"has nothing to run: {names}", f"What is understood: {_known()}."
        )
    return found


def _objects(node: yaml12.YamlNode, source: str) -> Iterator[Document]:
    marks: dict[At, Mark] = {}
    tree = yaml12.plain(node, marks, _keeps_text)
    if isinstance(tree, list):
        hint = "Put `---` between the documents instead of `- ` before them."
        raise file_error(source, node.mark.line, "is a list, not an object", hint)
    if not isinstance(tree, Mapping):
        raise file_error(source, node.mark.line, f"{show(tree)} is not an object", _example())
    whole = Document(source, tree, marks)
    if whole.kind != "List" and not (whole.kind.endswith("List") and isinstance(tree.get("items"), list)):
        yield whole
        return
    for key in tree:
        if key not in ("apiVersion", "kind", "metadata", "items"):
            raise file_error(
                source, marks[(key,)].line, f"{show(key)} is not a key of a List", "It has `items`."
            )
    for number, item in enumerate(tree.get("items") or ()):
        at = ("items", number)
        if not isinstance(item, Mapping):
            raise file_error(source, marks[at].line, f"{show(item)} is not an object", _example())
        yield Document(source, item, marks, at)


def _check_kind(one: Document) -> None:
    if one.kind in BESIDE:
        return
    for key, value in (("kind", one.kind), ("apiVersion", one.version)):
        if not value:
            hint = f"What is understood: {_known()}."
            raise file_error(one.source, one.line, f"`{key}` is missing", hint)
    if one.kind not in KINDS:
        by_lower = {kind.lower(): kind for kind in KINDS}
        near = by_lower.get(nearest(one.kind, tuple(by_lower)) or "")
        hint = _OTHER.get(one.kind) or (f"Did you mean `{near}`? " if near else "")
        hint = hint if one.kind in _OTHER else f"{hint}What is understood: {_known()}."
        raise file_error(one.source, one.line, f"kind: {show(one.kind)} cannot be run", hint)
    if one.version not in KINDS[one.kind]:
        versions = " or ".join(f"`{version}`" for version in KINDS[one.kind])
        raise file_error(
            one.source,
            one.line,
            f"apiVersion: {show(one.version)} of {one.kind} is not understood",
            f"Write {versions}, in that version's words.",
        )


def _refuse_templated(one: Document) -> None:
    """Refuses templates that happen to be valid YAML, because their braces are in quotes."""
    for path, value in _scalars(one.tree, one.at):
        if (
            isinstance(value, str)
            and _TEMPLATED.search(value)
            and path[-2:-1] not in (("command",), ("args",))
        ):
            mark = next((one.marks[path[:n]] for n in range(len(path), 0, -1) if path[:n] in one.marks), None)
            raise _templated(one.source, mark.line if mark else None)


def _scalars(value: Any, path: At) -> Iterator[tuple[At, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _scalars(child, (*path, key))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from _scalars(child, (*path, number))
    else:
        yield path, value


def _broken(exc: YamlError, text: str, source: str) -> SpecError:
    mark = exc.mark
    found = _TEMPLATED.search(text)
    if found is not None:
        return _templated(source, text.count("\n", 0, found.start()) + 1)
    return file_error(source, mark.line if mark else None, exc.message, exc.hint)


def _templated(source: str, line: int | None) -> SpecError:
    return file_error(
        source,
        line,
        "is a template: `{{ ... }}` has still to be filled in",
        "Render it first: `helm template . | stoker submit -`.",
    )


def _text(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _is_object(node: yaml12.YamlNode) -> bool:
    inside = node.items if node.kind == "list" else [node]
    return any(one.kind == "mapping" and bool({"kind", "apiVersion"} & set(one.pairs)) for one in inside)


def _keeps_text(path: At) -> bool:
    """Values that Kubernetes reads as text whatever they look like, and file modes, which are octal."""
    key = path[-1] if not isinstance(path[-1], int) else path[-2] if len(path) > 1 else ""
    if key in ("value", "name", "image", "defaultMode", "mode", "kind", "apiVersion"):
        return True
    return any(part in _TEXTS for part in path[-2:])


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _known() -> str:
    return ", ".join(f"{kind} ({versions[-1]})" for kind, versions in KINDS.items())


def _example() -> str:
    return "Begin it with `apiVersion: batch/v1` and `kind: Job`."
