"""Jobs as manifests, to run the same without Stoker. Keys that a manifest has no field for are listed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import Refused
from stoker.spec.interop.expansion import escaped
from stoker.spec.job import Job, Resources
from stoker.spec.quantities import show_size
from stoker.spec.roles import RoleTasks, parts

Object = dict[str, Any]
KINDS = ("job", "pytorchjob", "trainjob", "mpijob", "tfjob")
_GPU = "nvidia.com/gpu"
_DEFAULTS = Job(run="x", name="x")


@dataclass(frozen=True)
class Exported:
    """A manifest, and the keys of the job that it leaves out."""

    manifest: Object
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The job to export."""

    job: Job
    image: str
    """For tasks that name none."""
    namespace: str = ""


def export(source: Source, kind: str) -> Exported:
    """Raises Refused where this kind cannot express the job."""
    from stoker.spec.interop import export_kubeflow as kubeflow  # lazy: these two modules import each other

    makers: Mapping[str, Callable[[Source], Object]] = {
        "job": _job,
        "pytorchjob": kubeflow.pytorchjob,
        "trainjob": kubeflow.trainjob,
        "mpijob": kubeflow.mpijob,
        "tfjob": kubeflow.tfjob,
    }
    if source.job.framework == "none":
        source = replace(source, job=source.job.model_copy(update={"framework": None}))
    expressed = {
        "retries",
        "timeout",
        "name",
        "image",
        "run",
        "args",
        "env",
        "resources",
        "workers",
        "mounts",
    }
    expressed |= {"grace", "secrets", "tags", "pod"} | (
        set() if kind == "job" else {"roles", "framework", "processes"}
    )
    if kind in ("job",):
        expressed.add("on_loss")
    if kind in ("pytorchjob", "tfjob", "mpijob"):
        expressed.add("start_within")
    if source.job.inputs:
        hint = "Mount what the training reads: `mounts`, with a `pvc://CLAIM`."
        raise Refused(
            "`inputs` are fetched by Stoker and cannot be exported", hint=hint, details={"key": "inputs"}
        )
    return Exported(makers[kind](source), tuple(_left_out(source.job, expressed)))


def _left_out(job: Job, expressed: set[str]) -> list[str]:
    """Keys that were set and are not in the manifest. Keys about Stoker's own scheduling mean nothing elsewhere."""
    nowhere = {
        "project",
        "cluster",
        "workdir",
        "priority",
        "lost_after",
        "lease",
        "exclusive",
        "launcher",
        "warm",
    }
    mine, usual = job.to_json(), _DEFAULTS.to_json()
    return [key for key in mine if key not in expressed | nowhere and mine[key] != usual.get(key)]


def _job(source: Source) -> Object:
    """An Indexed Job where there are several tasks. Kubernetes assigns no ranks and addresses."""
    job = source.job
    if job.roles or job.framework:
        what = f"framework {job.framework}" if job.framework else f"roles {', '.join(job.roles)}"
        raise Refused(
            f"a Job has equal tasks that do not know each other, and this run has {what}",
            hint=f"Export it as one of {', '.join(one for one in KINDS if one != 'job')}.",
            details={"key": "framework" if job.framework else "roles"},
        )
    (part,) = parts(job)
    spec: Object = {"backoffLimit": job.retries}
    if part.count > 1:
        spec |= {"completions": part.count, "parallelism": part.count, "completionMode": "Indexed"}
    if job.timeout is not None:
        spec["activeDeadlineSeconds"] = seconds(job.timeout)
    spec["template"] = template(part, source, "main", {"restartPolicy": "Never"})
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(source), "spec": spec}


def metadata(source: Source) -> Object:
    found: Object = {"name": source.job.name}
    if source.namespace:
        found["namespace"] = source.namespace
    labels = {}
    for tag in source.job.tags:
        key, _, value = tag.partition("=")
        labels[key] = value
    return {**found, "labels": labels} if labels else found


def template(part: RoleTasks, source: Source, container: str, more: Mapping[str, Any]) -> Object:
    """The pod template of one group of tasks."""
    job = part.job
    main: Object = {"name": container, "image": job.image or source.image, **command(job)}
    added = _pod(job)
    env: list[Object] = [{"name": name, "value": escaped(value)} for name, value in job.env.items()]
    env += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{source.job.name}-secrets", "key": name}}}
        for name in job.secrets
    ]
    if env:
        main["env"] = env
    if asked := amounts(job.resources):
        main["resources"] = {"limits": asked, "requests": dict(asked)}
    volumes, mounts = _volumes(job)
    ours: list[Object] = added.get("spec", {}).pop("containers", [])
    for key, value in (ours[0] if ours else {}).items():
        if key == "volumeMounts":
            mounts += value
        elif key == "env":
            main["env"] = [*main.get("env", []), *value]
        elif key != "name":
            main[key] = value
    volumes += added.get("spec", {}).pop("volumes", [])
    if mounts:
        main["volumeMounts"] = mounts
    spec: Object = {**more, **added.get("spec", {}), "containers": [main]}
    spec["terminationGracePeriodSeconds"] = seconds(job.grace)
    if volumes:
        spec["volumes"] = volumes
    found: Object = {"spec": spec}
    return {"metadata": added["metadata"], **found} if added.get("metadata") else found


def command(job: Job) -> Object:
    if job.run is not None:
        return {"command": [escaped(word) for word in job.argv()]}
    return {"args": [escaped(word) for word in job.args]} if job.args else {}


def amounts(resources: Resources) -> dict[str, str]:
    found: dict[str, str] = {}
    if resources.cpu is not None:
        milli = max(1, round(resources.cpu * 1000))
        found["cpu"] = str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
    if resources.memory is not None:
        found["memory"] = show_size(resources.memory)
    if resources.disk is not None:
        found["ephemeral-storage"] = show_size(resources.disk)
    if resources.gpu:
        found[_GPU] = str(resources.gpu)
    return found


def seconds(value: float) -> int:
    """Kubernetes counts whole seconds; rounded up, so that no deadline becomes shorter."""
    return -int(-value // 1)


def _pod(job: Job) -> Object:
    """Additions to pods, as a copy that may be changed."""
    return copy.deepcopy(dict(job.pod or {}))


def _volumes(job: Job) -> tuple[list[Object], list[Object]]:
    volumes: list[Object] = []
    mounts: list[Object] = []
    if job.resources.shm is not None:
        limit = show_size(job.resources.shm)
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": limit}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    claims: dict[str, str] = {}
    for path, source in job.mounts.items():
        if source.startswith("/"):
            raise Refused(
                f"{source} is a folder of one machine, and is mounted at {path}",
                hint="Put it on a volume and mount its claim.",
                details={"key": f"mounts.{path}"},
            )
        mount: Object = {"mountPath": path}
        if source == "empty":
            name = f"scratch-{len(volumes)}"
            volumes.append({"name": name, "emptyDir": {}})
        else:
            claim, _, part = source.removeprefix("pvc://").removesuffix(":ro").partition("/")
            if claim not in claims:
                claims[claim] = f"claim-{len(volumes)}"
                volumes.append({"name": claims[claim], "persistentVolumeClaim": {"claimName": claim}})
            name = claims[claim]
            if part.strip("/"):
                mount["subPath"] = part.strip("/")
            if source.endswith(":ro"):
                mount["readOnly"] = True
        mounts.append({"name": name, **mount})
    return volumes, mounts
