"""What a pod asks of nodes: resources, and which nodes may have it. Pure."""

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
_PATIENT = [
    {"key": f"node.kubernetes.io/{word}", "operator": "Exists", "effect": "NoExecute"}
    for word in ("not-ready", "unreachable")
]
"""A node that does not answer is no reason for the cluster to end the pod: whether it is lost is the server's to say,
and a task that comes back goes on."""


def needs(job: Job, config: ClusterConfig, cluster: str) -> Needs:
    """What one task takes of a node, the courier included."""
    resources = job.resources
    plain = job.launcher == "none"
    cpu = config.default_cpu if resources.cpu is None else resources.cpu
    memory = resources.memory or 0
    return Needs(
        cpu=cpu if plain else cpu + config.sidecar.cpu,
        memory=memory if plain else memory + config.sidecar.memory,
        gpu=resources.gpu or 0,
        among=frozenset(tags(cluster, job.pool, gpu=bool(resources.gpu))),
    )


def tags(cluster: str, pool: str | None, *, gpu: bool) -> list[str]:
    """Which nodes will do: see `capacity`."""
    base = f"{cluster}:pool:{pool}" if pool else cluster
    return [base, f"{base}:gpu"] if gpu else [base]


def gpu_resource(config: ClusterConfig, pool: str | None) -> str:
    """What a GPU is called there: whole ones, or the pool's kind of slices."""
    known = config.pools.get(pool) if pool else None
    profile = known.gpu_profile if known is not None else None
    return config.gpu_profiles[profile] if profile else config.gpu_resource


def gpus(plan: TaskPlan, job: Job) -> int:
    return len(plan.gpus) or job.resources.gpu


def rdma(plan: TaskPlan, job: Job, config: ClusterConfig, tasks: int) -> bool:
    """Only for GPU tasks that work together: there are few such devices."""
    return config.rdma is not None and tasks > 1 and gpus(plan, job) > 0


def resources(
    plan: TaskPlan, job: Job, config: ClusterConfig, *, with_devices: bool = True, together: bool = False
) -> Object:
    """Memory and disk are reserved and limited alike; CPU is limited only where the job says how much it wants."""
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
    """Quantities as Kubernetes writes them."""
    found = {}
    if cpu is not None:
        milli = max(1, round(cpu * 1000))
        found["cpu"] = str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
    if memory is not None:
        found["memory"] = amount(memory)
    return found


def amount(size: int) -> str:
    """Bytes as Kubernetes writes them."""
    return f"{size >> 20}Mi" if size % (1 << 20) == 0 else str(size)


def spec(attempt: Attempt, plan: TaskPlan, job: Job, config: ClusterConfig) -> Object:
    """Where it may go, where it had better go, and before whom."""
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
    found["tolerations"] = [*{str(one): one for one in tolerations}.values(), *_PATIENT]
    if affinity := _affinity(attempt, plan):
        found["affinity"] = affinity
    return found


def gpu_taint(config: ClusterConfig) -> str:
    """Nodes with GPUs are usually kept for those who need them by a taint named like the resource."""
    return config.gpu_resource


def _priority_class(job: Job, config: ClusterConfig) -> str:
    classes = config.priority_classes
    return classes.low if job.priority < 0 else classes.high if job.priority > 0 else classes.normal


def _affinity(attempt: Attempt, plan: TaskPlan) -> Object:
    """Wishes only. The queue has a node in mind, which may be one that is still to be made."""
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
