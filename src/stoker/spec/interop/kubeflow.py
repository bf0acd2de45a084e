"""Kubeflow's jobs with replicas: TFJob, PyTorchJob, JAXJob."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from stoker.spec import quantities
from stoker.spec.interop.assemble import Draft, Group, restarts
from stoker.spec.interop.ledger import Level, View
from stoker.spec.interop.pods import Target, piece
from stoker.spec.job import Job
from stoker.spec.problems import nearest, show
from stoker.spec.quantities import MAX_WORKERS, Workers

count_of = partial(quantities.count, most=MAX_WORKERS)


def tfjob(document: View, draft: Draft, target: Target) -> Job | None:
    spec = document.child("spec", "tfjob")
    groups = replicas(
        spec, "tfReplicaSpecs", ("Chief", "Master", "Worker", "PS", "Evaluator"), "tensorflow", target
    )
    old_policy(spec)
    policy = run_policy(spec, draft, groups, usual="Never")
    draft.deadline(policy, int(draft.keys.get("retries", 0)))
    draft.keys["framework"] = "tensorflow"
    success, chief = spec.text("successPolicy"), next((n for n in ("Chief", "Master") if n in groups), None)
    if success not in (None, "", "AllWorkers"):
        spec.mistake("successPolicy", f"{show(success)} is none", "Write `AllWorkers`, or leave it out.")
    if chief is None and success != "AllWorkers" and "Worker" in groups and groups["Worker"].count > 1:
        why = "done when all workers are done; in Kubeflow, when the first one is"
        draft.ledger.note(spec.path("tfReplicaSpecs"), "Worker", why, Level.SAID)
    roles = {name.lower(): group for name, group in groups.items() if name != "Worker"}
    return draft.job(groups.get("Worker"), roles) if groups else None


def pytorchjob(document: View, draft: Draft, target: Target) -> Job | None:
    spec = document.child("spec", "pytorchjob")
    groups = replicas(spec, "pytorchReplicaSpecs", ("Master", "Worker"), "pytorch", target)
    sizes = _elastic(spec, draft, groups)
    policy = run_policy(spec, draft, groups, usual="OnFailure")
    draft.keys["framework"] = "torch"
    _processes(spec, "nprocPerNode", draft)
    draft.deadline(policy, int(draft.keys.get("retries", 0)))
    master = groups.get("Master")
    if master is not None and master.count > 1:
        spec.ledger.mistake(
            (*master.piece.at[:-1], "replicas"), "there is one master", "Write `replicas: 1`."
        )
    if "Worker" not in groups:
        return draft.job(master, {}) if master else None
    if master is None:
        return draft.job(groups["Worker"], {}, sizes)
    return draft.job(groups["Worker"], {"master": master}, sizes)


def jaxjob(document: View, draft: Draft, target: Target) -> Job | None:
    spec = document.child("spec", "jaxjob")
    groups = replicas(spec, "jaxReplicaSpecs", ("Worker",), "jax", target)
    policy = run_policy(spec, draft, groups, usual="OnFailure")
    draft.deadline(policy, int(draft.keys.get("retries", 0)))
    draft.keys["framework"] = "jax"
    return draft.job(groups["Worker"], {}) if groups else None


def replicas(
    spec: View, key: str, kinds: Sequence[str], container: str, target: Target, wait: str = ""
) -> dict[str, Group]:
    """The groups by kind, in the order of `kinds`, without empty ones. `wait`: a kind that runs no command of its
    own."""
    value = spec.take(key)
    if not isinstance(value, dict) or not value:
        spec.mistake(
            key, "is missing" if value is None else f"is {show(value)}", f"Choices: {', '.join(kinds)}."
        )
        return {}
    found: dict[str, Group] = {}
    for name, one in value.items():
        # Kubernetes ignores the case of these names.
        known = next((kind for kind in kinds if kind.lower() == str(name).lower()), None)
        if known is None:
            near = nearest(str(name), kinds)
            hint = f"Did you mean `{near}`?" if near else f"Choices: {', '.join(kinds)}."
            spec.ledger.mistake((*spec.at, key, name), f"{show(name)} is not a kind of replica", hint)
            continue
        view = spec.ledger.view(one, (*spec.at, key, name), "replica")
        number = view.number("replicas", count_of)
        if number == 0:
            view.whole()
            view.ledger.note(view.at, name, "there are none of them", Level.SAID)
            continue
        template = view.child("template", "template")
        group = Group(
            piece(template, target, named=container, runs=known != wait), 1 if number is None else number
        )
        group.piece.restart = view.text("restartPolicy")
        found[known] = group
    if not found and not spec.ledger.mistakes:
        spec.mistake(key, "leaves nothing to run", "Write how many replicas there are.")
    return {kind: found[kind] for kind in kinds if kind in found}


def run_policy(spec: View, draft: Draft, groups: dict[str, Group], *, usual: str) -> View:
    """Reads retries, deadlines, and whether all tasks start together. Returns the policy, for the deadline."""
    policy = spec.child("runPolicy", "policy")
    draft.suspended(policy)
    if groups:
        restarts(list(groups.values()), draft, policy, "backoffLimit", usual=usual)
    scheduling = policy.child("schedulingPolicy", "scheduling")
    within = scheduling.number("scheduleTimeoutSeconds", quantities.duration)
    if within is not None:
        draft.keys["start_within"] = within
    least = scheduling.number("minAvailable", count_of)
    total = sum(group.count for group in groups.values())
    if least is not None and least < total:
        why = f"all {total} start together, or none"
        scheduling.note("minAvailable", why, Level.SAID)
    return policy


def old_policy(spec: View) -> None:
    """Older files have the keys of the run policy beside it."""
    for key in ("cleanPodPolicy", "ttlSecondsAfterFinished", "backoffLimit", "activeDeadlineSeconds"):
        if spec.take(key) is not None and key in ("backoffLimit", "activeDeadlineSeconds"):
            spec.note(key, f"belongs into `runPolicy`: `runPolicy: {{{key}: ...}}`")


def _elastic(spec: View, draft: Draft, groups: dict[str, Group]) -> Workers | None:
    if "elasticPolicy" not in spec:
        spec.take("elasticPolicy")
        return None
    policy = spec.child("elasticPolicy", "elastic")
    least, most = policy.number("minReplicas", count_of), policy.number("maxReplicas", count_of)
    _processes(policy, "nProcPerNode", draft)
    again = policy.number("maxRestarts", count_of)
    if again is not None:
        draft.keys["retries"] = min(again, 1000)
    worker = groups.get("Worker")
    if worker is None:
        return None
    low, high = least or worker.count, most or worker.count
    if low > high:
        policy.mistake("minReplicas", f"{low} is more than the most ({high})", "Swap them.")
        return None
    return Workers(low, high)


def _processes(view: View, key: str, draft: Draft) -> None:
    """A number, or a word by which torch finds it. Stoker's default is one process per GPU."""
    value = view.take(key)
    if value is None or value in ("auto", "gpu"):
        return
    if value == "cpu":
        view.note(key, "as many processes as there are GPUs, else one; write a number", Level.IGNORED)
        return
    number = view.number(key, partial(quantities.count, least=1, most=MAX_WORKERS))
    if number is not None:
        draft.keys["processes"] = number
