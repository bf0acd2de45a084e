"""The capacity of a cluster's nodes for tasks of this server. Pure.

A node offers its allocatable resources less the requests of other pods on it. Its tags say which tasks may use it:

    C               a task of cluster C that names no pool
    C:gpu           only a task that requests GPUs: the node is tainted for them
    C:pool:P        a task that names the pool P;  C:pool:P:gpu  the same with GPUs

A node that is cordoned, or with a taint that no task here tolerates, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.engine.base import Gpu, Node
from stoker.engine.kubernetes.config import ClusterConfig, Pool, Toleration
from stoker.engine.kubernetes.manifests import scheduling
from stoker.engine.kubernetes.quantity import cores, number, size
from stoker.engine.kubernetes.status.unschedulable import PodRequest, requests_of

Object = Mapping[str, Any]

ISOLATION = {"memory": "container", "cpu": "container", "processes": "pid namespace", "files": "container"}
UNBOUNDED_CPU = 50_000.0
UNBOUNDED_MEMORY = 1 << 55
UNBOUNDED_GPUS = 4096
"""Assumed for a cluster whose nodes may not be listed and that has no `capacity` setting."""
_PRODUCT = "nvidia.com/gpu.product"
_GPU_MEMORY = "nvidia.com/gpu.memory"


def nodes(
    cluster: str, config: ClusterConfig, listed: Sequence[Object] | None, others: Iterable[Object]
) -> list[Node]:
    """`listed` None: nodes may not be listed; one node then stands for the whole cluster."""
    if listed is None:
        return [_whole_cluster_node(cluster, config)]
    taken = _requests_by_node(others)
    found = []
    for node in listed:
        if (known := _node(cluster, config, node, taken.get(node["metadata"]["name"], []))) is not None:
            found.append(known)
    return found + _autoscaled_nodes(cluster, config, listed)


def ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def pools_of(node: Object, config: ClusterConfig) -> list[str]:
    labels = (node["metadata"].get("labels") or {}).items()
    return [name for name, pool in config.pools.items() if pool.selector.items() <= labels]


def _node(cluster: str, config: ClusterConfig, node: Object, taken: list[PodRequest]) -> Node | None:
    name, status = node["metadata"]["name"], node.get("status") or {}
    tags = _tags(cluster, config, node)
    if not tags or (node.get("spec") or {}).get("unschedulable"):
        return None
    has = status.get("allocatable") or {}
    resource = _gpu_resource(node, config)
    gone = sum(dict(one.devices).get(resource, 0) for one in taken)
    labels = node["metadata"].get("labels") or {}
    return Node(
        name=name,
        cpu=max(0.0, round(cores(has.get("cpu", 0)) - sum(one.cpu for one in taken), 3)),
        memory=max(0, size(has.get("memory", 0)) - sum(one.memory for one in taken)),
        gpus=_gpus(name, max(0, int(number(has.get(resource, 0))) - gone), labels),
        ready=ready(node),
        labels=dict(labels),
        isolation=ISOLATION,
        boot_id=str((status.get("nodeInfo") or {}).get("bootID", "")),
        tags=frozenset(tags),
    )


def _gpu_resource(node: Object, config: ClusterConfig) -> str:
    """A node of a pool with a GPU profile offers slices, and no whole GPUs."""
    pool = next((one for one in pools_of(node, config) if config.pools[one].gpu_profile), None)
    return scheduling.gpu_resource(config, pool)


def _tags(cluster: str, config: ClusterConfig, node: Object) -> list[str]:
    taints = [
        taint
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not _is_readiness_taint(taint)
    ]
    pools = pools_of(node, config)
    found = (
        []
        if any(config.pools[one].gpu_profile for one in pools)
        else _tags_if_tolerated(cluster, None, config, taints)
    )
    for name in pools:
        found += _tags_if_tolerated(f"{cluster}:pool:{name}", config.pools[name], config, taints)
    return found


def _tags_if_tolerated(
    tag: str, pool: Pool | None, config: ClusterConfig, taints: Sequence[Object]
) -> list[str]:
    tolerated = pool.tolerations if pool is not None else ()
    left = [taint for taint in taints if not any(_tolerates(one, taint) for one in tolerated)]
    if not left:
        return [tag]
    names = {config.gpu_resource, *config.gpu_profiles.values()}
    return [f"{tag}:gpu"] if all(taint.get("key") in names for taint in left) else []


def _is_readiness_taint(taint: Object) -> bool:
    """Whether the node controller set the taint for a node that does not respond: this says that it is not ready."""
    return taint.get("key") in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def _tolerates(toleration: Toleration, taint: Object) -> bool:
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    if toleration.key and toleration.key != taint.get("key"):
        return False
    return toleration.operator == "Exists" or toleration.value == (taint.get("value") or "")


def _requests_by_node(others: Iterable[Object]) -> dict[str, list[PodRequest]]:
    found: dict[str, list[PodRequest]] = {}
    for pod in others:
        status, on = pod.get("status") or {}, (pod.get("spec") or {}).get("nodeName")
        if on and status.get("phase") not in ("Succeeded", "Failed"):
            found.setdefault(str(on), []).append(requests_of(pod))
    return found


def _gpus(node: str, count: int, labels: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs have no ids before a pod gets them; these are made up."""
    model = str(labels.get(_PRODUCT, "GPU"))
    memory = int(number(labels.get(_GPU_MEMORY, 0))) << 20
    return tuple(Gpu(f"{node}:gpu-{index}", index, model, memory) for index in range(count))


def _autoscaled_nodes(cluster: str, config: ClusterConfig, listed: Sequence[Object]) -> list[Node]:
    """The nodes that the cluster's autoscaler could add. Their names cannot be names of real nodes."""
    found = []
    for name, pool in config.pools.items():
        if pool.autoscale is None:
            continue
        there = sum(name in pools_of(node, config) for node in listed)
        found += [
            _virtual(f"new:{name}:{number_}", cluster, name, pool)
            for number_ in range(there, pool.autoscale.max_nodes)
        ]
    return found


def _virtual(node: str, cluster: str, name: str, pool: Pool) -> Node:
    assert pool.autoscale is not None
    tag = f"{cluster}:pool:{name}"
    return Node(
        name=node,
        cpu=pool.autoscale.cpu,
        memory=pool.autoscale.memory,
        gpus=_gpus(node, pool.autoscale.gpu, {}),
        labels=dict(pool.selector),
        isolation=ISOLATION,
        tags=frozenset({tag, f"{tag}:gpu"}),
    )


def _whole_cluster_node(cluster: str, config: ClusterConfig) -> Node:
    bound = config.capacity
    tags = [cluster, *(f"{cluster}:pool:{name}" for name in config.pools)]
    return Node(
        name="anywhere:",
        cpu=bound.cpu if bound else UNBOUNDED_CPU,
        memory=bound.memory if bound else UNBOUNDED_MEMORY,
        gpus=_gpus("anywhere", bound.gpu if bound else UNBOUNDED_GPUS, {}),
        isolation=ISOLATION,
        tags=frozenset({*tags, *(f"{tag}:gpu" for tag in tags)}),
    )
