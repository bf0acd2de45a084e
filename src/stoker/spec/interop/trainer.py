"""Kubeflow Trainer's TrainJob. Its standard runtimes have a built-in meaning and need no installation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from stoker.spec import quantities
from stoker.spec.interop import amounts
from stoker.spec.interop.assemble import Draft, Group
from stoker.spec.interop.ledger import Level, View
from stoker.spec.interop.pods import Piece, Target, command, piece, without_image
from stoker.spec.job import Job
from stoker.spec.problems import nearest, show
from stoker.spec.quantities import MAX_WORKERS


@dataclass(frozen=True)
class Runtime:
    """The meaning of a standard runtime."""

    framework: str | None
    image: str
    """For a TrainJob that names none."""
    launcher: bool = False
    """The command is mpirun's, and one more task runs it."""


RUNTIMES: dict[str, Runtime] = {
    "torch-distributed": Runtime("torch", "pytorch/pytorch:2.7.1-cuda12.8-cudnn9-runtime"),
    "deepspeed-distributed": Runtime("mpi", "ghcr.io/kubeflow/trainer/deepspeed-runtime", launcher=True),
    "mpi-distributed": Runtime("mpi", "ghcr.io/kubeflow/trainer/deepspeed-runtime", launcher=True),
    "mlx-distributed": Runtime("mpi", "ghcr.io/kubeflow/trainer/mlx-runtime", launcher=True),
    "jax-distributed": Runtime("jax", "nvcr.io/nvidia/jax:25.10-py3"),
    "tensorflow-distributed": Runtime("tensorflow", "tensorflow/tensorflow:2.18.0"),
}


def trainjob(document: View, draft: Draft, target: Target) -> Job | None:
    spec = document.child("spec", "trainjob")
    runtime = _runtime(spec)
    draft.suspended(spec)
    draft.keys["retries"] = 0
    draft.deadline(spec, 0)
    found = Piece(spec.at)
    for key in ("podTemplateOverrides", "podSpecOverrides"):
        _overrides(spec, key, found, target)
    trainer = spec.child("trainer", "trainer")
    command(trainer, found, target)
    found.image = trainer.text("image")
    found.lines[("image",)] = trainer.path("image")
    asked = trainer.take("resourcesPerNode")
    where = trainer.path("resourcesPerNode")
    found.resources |= amounts.resources(asked, where, draft.ledger, cluster=target.cluster)
    nodes = trainer.number("numNodes", partial(quantities.count, least=1, most=MAX_WORKERS)) or 1
    each = trainer.take("numProcPerNode")
    if each not in (None, "auto", "gpu"):
        draft.keys["processes"] = trainer.number(
            "numProcPerNode", partial(quantities.count, least=1, most=MAX_WORKERS)
        )
    if runtime is None:
        return None
    if not target.images:
        without_image(trainer, found)
        if found.words is None:
            draft.ledger.mistake(trainer.path("command"), "is missing", "Write what the nodes run.")
    elif found.image is None:
        found.image = runtime.image
        draft.ledger.note(trainer.at, runtime.image, "the image of the runtime", Level.SAID)
    if runtime.framework:
        draft.keys["framework"] = runtime.framework
    if runtime.launcher and found.words is None:
        hint = "Write it, as in `command: [mpirun, python, train.py]`."
        draft.ledger.mistake(trainer.path("command"), "is missing", hint)
    return draft.job(Group(found, nodes), {})


def _runtime(spec: View) -> Runtime | None:
    view = spec.child("runtimeRef", "runtime")
    name, kind, group = view.text("name"), view.text("kind"), view.text("apiGroup")
    if not name:
        view.mistake("name", "is missing", f"Choices: {', '.join(RUNTIMES)}.")
        return None
    if kind not in (None, "ClusterTrainingRuntime"):
        view.note("kind", "only the standard runtimes of clusters have a meaning here")
    if group not in (None, "trainer.kubeflow.org"):
        view.note("apiGroup", "only `trainer.kubeflow.org` is known")
    if name in RUNTIMES:
        return RUNTIMES[name]
    near = nearest(name, tuple(RUNTIMES))
    hint = f"Did you mean `{near}`? " if near else ""
    view.mistake(
        "name",
        f"{show(name)} is not a runtime with a built-in meaning",
        f"{hint}Choices: {', '.join(RUNTIMES)}; for another, give the Job or PyTorchJob that it would make.",
    )
    return None


def _overrides(spec: View, key: str, found: Piece, target: Target) -> None:
    """Adds the overrides; later ones replace earlier ones."""
    for view in spec.items(key, "override"):
        names = [one.text("name") or "" for one in view.items("targetJobs", "target")]
        others = [name for name in names if name not in ("node", "launcher", "trainer")]
        if others:
            why = f"there is no {', '.join(others)}: only the training is run"
            if len(others) == len(names):
                view.whole()
                view.ledger.note(view.at, view.value, why)
                continue
            view.note("targetJobs", why)
        overlaid = piece(view, target, whole=False)
        if overlaid.words is not None or overlaid.args or overlaid.image or overlaid.restart:
            why = "command, image and restarts belong into `trainer`; an override only adds to its pods"
            view.ledger.note(view.path("spec"), view.value.get("spec"), why)
        found.grace = found.grace if overlaid.grace is None else overlaid.grace
        found.timeout = found.timeout if overlaid.timeout is None else overlaid.timeout
        found.env |= overlaid.env
        found.variables.known |= overlaid.variables.known
        found.variables.later |= overlaid.variables.later
        found.secrets += overlaid.secrets
        found.mounts |= overlaid.mounts
        found.lines |= overlaid.lines
        found.resources |= overlaid.resources
        found.pod = _over(found.pod, overlaid.pod)


def _over(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in more.items():
        here = merged.get(key)
        merged[key] = _over(here, value) if isinstance(here, dict) and isinstance(value, dict) else value
    return merged
