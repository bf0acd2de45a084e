"""What a pod requests: resources, and the nodes that may run it. Pure."""

from __future__ import annotations

import re
from typing import Any

from stoker.engine.base import Attempt, Needs, TaskPlan
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.spec import Job

Object = dict[str, Any]

_NODE = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
ZONE = "topology.kubernetes.io/zone"
_TOLERATE_UNREADY = [
    {"key": f"node.kubernetes.io/{word}", "operator": "Exists", "effect": "NoExecute"}
    for word in ("not-ready", "unreachable")
]
"""The cluster must not end pods of a node that does not respond: the server decides whether a task is lost, and a task
that comes back continues."""


def needs(job: Job, config: ClusterConfig, cluster: str) -> Needs:
    """What one task takes of a node, including the courier."""
    resources = job.resources
    launcherless = job.launcher == "none"
    cpu = config.default_cpu if resources.cpu is None else resources.cpu
    memory = resources.memory or 0
    return Needs(
        cpu=cpu if launcherless else cpu + config.sidecar.cpu,
        memory=memory if launcherless else memory + config.sidecar.memory,
        gpu=resources.gpu or 0,
        among=frozenset(tags(cluster, job.pool, gpu=bool(resources.gpu))),
    )


def tags(cluster: str, pool: str | None, *, gpu: bool) -> list[str]:
    """Tags of the nodes that can take the task: see `capacity`."""
    base = f"{cluster}:pool:{pool}" if pool else cluster
    return [base, f"{base}:gpu"] if gpu else [base]


def gpu_resource(config: ClusterConfig, pool: str | None) -> str:
    """The name of the GPU resource: whole GPUs, or the pool's kind of slices."""
    known = config.pools.get(pool) if pool else None
    profile = known.gpu_profile if known is not None else None
    return config.gpu_profiles[profile] if profile else config.gpu_resource


def gpus(plan: TaskPlan, job: Job) -> int:
    return len(plan.gpus) or job.resources.gpu


def rdma(plan: TaskPlan, job: Job, config: ClusterConfig, tasks: int) -> bool:
    """Only for GPU tasks that work together: such devices are few."""
    return config.rdma is not None and tasks > 1 and gpus(plan, job) > 0


def resources(
    plan: TaskPlan, job: Job, config: ClusterConfig, *, with_devices: bool = True, together: bool = False
) -> Object:
    """Memory and disk have equal requests and limits; CPU has a limit only if the job requests an amount."""
    cpu = config.default_cpu if plan.cpu is None else plan.cpu
    requests, limits = amounts(cpu, plan.memory), amounts(plan.cpu, plan.memory)
    if job.resources.disk is not None:
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = amount(job.resources.disk)
    if with_devices and gpus(plan, job):
        limits[gpu_resource(config, job.pool)] = str(gpus(plan, job))
        if config.rdma is not None and rdma(plan, job, config, 2 if together else 1):
            limits[config.rdma.resource] = str(config.rdma.count)
    found = {"requests": requests}
    if limits:
        found["limits"] = limits
    return found


def amounts(cpu: float | None, memory: int | None) -> dict[str, str]:
    """Quantities in Kubernetes' notation."""
    found = {}
    if cpu is not None:
        milli = max(1, round(cpu * 1000))
        found["cpu"] = str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
    if memory is not None:
        found["memory"] = amount(memory)
    return found


def amount(size: int) -> str:
    """Bytes in Kubernetes' notation."""
    return f"{size >> 20}Mi" if size % (1 << 20) == 0 else str(size)


def spec(attempt: Attempt, plan: TaskPlan, job: Job, config: ClusterConfig) -> Object:
    """Node selector, tolerations, preferred nodes and priority class."""
    pool = config.pools.get(job.pool) if job.pool else None
    found: Object = {}
    if name := _priority_class(job, config):
        found["priorityClassName"] = name
    if pool is not None and pool.selector:
        found["nodeSelector"] = dict(pool.selector)
    tolerations: list[Object] = [one.to_manifest() for one in pool.tolerations] if pool is not None else []
    if gpus(plan, job):
        ours = {"key": gpu_resource(config, job.pool), "operator": "Exists", "effect": "NoSchedule"}
        if gpu_taint(config) != ours["key"]:
            tolerations.append({**ours, "key": gpu_taint(config)})
        tolerations.append(ours)
    found["tolerations"] = [*{str(one): one for one in tolerations}.values(), *_TOLERATE_UNREADY]
    if affinity := _affinity(attempt, plan):
        found["affinity"] = affinity
    return found


def gpu_taint(config: ClusterConfig) -> str:
    """By convention, nodes with GPUs are reserved for pods that need them by a taint named like the resource."""
    return config.gpu_resource


def _priority_class(job: Job, config: ClusterConfig) -> str:
    classes = config.priority_classes
    return classes.low if job.priority < 0 else classes.high if job.priority > 0 else classes.normal


def _affinity(attempt: Attempt, plan: TaskPlan) -> Object:
    """Preferences only: the scheduler's choice may be a node that the autoscaler has not created yet."""
    found: Object = {}
    if _NODE.fullmatch(plan.node) and plan.node != "local":
        field = {"key": "metadata.name", "operator": "In", "values": [plan.node]}
        found["nodeAffinity"] = _preferred({"preference": {"matchFields": [field]}})
    if len(attempt.tasks) > 1:
        same = {"matchLabels": {names.RUN: attempt.run, names.ATTEMPT: str(attempt.number)}}
        found["podAffinity"] = _preferred({"podAffinityTerm": {"labelSelector": same, "topologyKey": ZONE}})
    return found


def _preferred(term: Object) -> Object:
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, **term}]}
