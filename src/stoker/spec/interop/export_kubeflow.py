"""Jobs as the kinds of Kubeflow."""

from __future__ import annotations

from typing import Any

from stoker.errors import Refused
from stoker.spec.interop.export import Object, Source, amounts, command, metadata, seconds, template
from stoker.spec.interop.trainer import RUNTIMES
from stoker.spec.job import Job
from stoker.spec.roles import FIRST, WORKER, RoleTasks, parts

V1 = "kubeflow.org/v1"


def pytorchjob(source: Source) -> Object:
    job = source.job
    _framework(job, "pytorchjob", "torch")
    groups = {part.role: part for part in parts(job)}
    master = next((groups[name] for name in FIRST if name in groups), None)
    _only(groups, "pytorchjob", (*FIRST, WORKER))
    specs: Object = {}
    if master is not None:
        specs["Master"] = _replica(master, source, "pytorch")
    if WORKER in groups:
        specs["Worker"] = _replica(groups[WORKER], source, "pytorch")
    spec: Object = {"runPolicy": _policy(job)}
    if job.processes is not None:
        spec["nprocPerNode"] = str(job.processes)
    if job.workers.elastic:
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": job.workers.min,
            "maxReplicas": job.workers.max,
            "maxRestarts": job.retries,
        }
    return _object(V1, "PyTorchJob", source, {**spec, "pytorchReplicaSpecs": specs})


def tfjob(source: Source) -> Object:
    job = source.job
    _framework(job, "tfjob", "tensorflow")
    names = {"chief": "Chief", "master": "Master", WORKER: "Worker", "ps": "PS", "evaluator": "Evaluator"}
    groups = {part.role: part for part in parts(job)}
    _only(groups, "tfjob", tuple(names))
    specs = {names[role]: _replica(part, source, "tensorflow") for role, part in groups.items()}
    spec: Object = {"runPolicy": _policy(job)}
    if not any(name in groups for name in FIRST):
        spec["successPolicy"] = "AllWorkers"
    return _object(V1, "TFJob", source, {**spec, "tfReplicaSpecs": specs})


def mpijob(source: Source) -> Object:
    job = source.job
    _framework(job, "mpijob", "mpi", "horovod")
    groups = {part.role: part for part in parts(job)}
    _only(groups, "mpijob", ("launcher", WORKER))
    if WORKER not in groups:
        raise Refused("an MPIJob has workers, and this run has none", hint="Set `workers`.")
    worker = groups[WORKER]
    launcher = _replica(groups.get("launcher", worker), source, "mpi")
    launcher["replicas"] = 1
    waiting = _replica(worker, source, "mpi")
    for key in ("command", "args"):  # the image's own command: the sshd through which the launcher reaches it
        waiting["template"]["spec"]["containers"][0].pop(key, None)
    spec = {
        "slotsPerWorker": job.processes or max(1, job.resources.gpu),
        "runPolicy": _policy(job),
        "mpiReplicaSpecs": {"Launcher": launcher, "Worker": waiting},
    }
    return _object("kubeflow.org/v2beta1", "MPIJob", source, spec)


def trainjob(source: Source) -> Object:
    job = source.job
    if job.roles:
        raise Refused(
            f"a TrainJob has equal nodes, and this run has roles {', '.join(job.roles)}",
            hint="Export it as pytorchjob, tfjob or mpijob.",
            details={"key": "roles"},
        )
    runtime = next(
        (name for name, one in RUNTIMES.items() if one.framework == (job.framework or "torch")), None
    )
    if runtime is None:
        raise Refused(
            f"there is no standard runtime for framework {job.framework}", details={"key": "framework"}
        )
    (part,) = parts(job)
    whole = template(part, source, "node", {})
    container = whole["spec"].pop("containers")[0]
    trainer: Object = {"image": container["image"], "numNodes": part.count, **command(job)}
    if job.processes is not None:
        trainer["numProcPerNode"] = job.processes
    if "env" in container:
        trainer["env"] = container["env"]
    if asked := amounts(job.resources):
        trainer["resourcesPerNode"] = {"limits": asked, "requests": dict(asked)}
    spec: Object = {"runtimeRef": {"name": runtime}, "trainer": trainer}
    if job.timeout is not None:
        spec["activeDeadlineSeconds"] = seconds(job.timeout)
    override = _override(whole, container)
    if override:
        spec["podTemplateOverrides"] = [{"targetJobs": [{"name": "node"}], **override}]
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", source, spec)


def _override(whole: Object, container: Object) -> Object:
    spec = {key: value for key, value in whole["spec"].items() if key != "terminationGracePeriodSeconds"}
    if "volumeMounts" in container:
        spec["containers"] = [{"name": "node", "volumeMounts": container["volumeMounts"]}]
    found: Object = {"metadata": whole["metadata"]} if "metadata" in whole else {}
    return {**found, "spec": spec} if spec else found


def _replica(part: RoleTasks, source: Source, container: str) -> Object:
    return {
        "replicas": part.count,
        "restartPolicy": "OnFailure" if source.job.retries else "Never",
        "template": template(part, source, container, {}),
    }


def _policy(job: Job) -> Object:
    found: Object = {"cleanPodPolicy": "Running"}
    if job.retries:
        found["backoffLimit"] = job.retries
    if job.timeout is not None:
        found["activeDeadlineSeconds"] = seconds(job.timeout)
    if job.start_within != Job(run="x", name="x").start_within:
        found["schedulingPolicy"] = {"scheduleTimeoutSeconds": seconds(job.start_within)}
    return found


def _object(version: str, kind: str, source: Source, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": metadata(source), "spec": spec}


def _framework(job: Job, kind: str, *fits: str) -> None:
    if job.framework not in (None, *fits):
        raise Refused(
            f"a {kind} is for framework {' or '.join(fits)}, and this run has {job.framework}",
            hint="Export it as another kind.",
            details={"key": "framework"},
        )


def _only(groups: dict[str, Any], kind: str, names: tuple[str, ...]) -> None:
    if others := [role for role in groups if role not in names]:
        raise Refused(
            f"a {kind} has no replicas of the kind {', '.join(others)}",
            hint=f"It has: {', '.join(names)}.",
            details={"key": f"roles.{others[0]}"},
        )
