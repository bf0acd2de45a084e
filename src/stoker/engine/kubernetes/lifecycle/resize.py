"""Changes the resources of a running pod, where the cluster and the node can do it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.errors import KubeError
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.manifests import scheduling
from stoker.engine.kubernetes.manifests.template import MAIN
from stoker.engine.kubernetes.quantity import number

Object = Mapping[str, Any]

_WAIT = 20.0
"""Seconds that a node may take for it, before it counts as postponed."""
_CHECK_SECONDS = 0.25


async def resize(cluster: Cluster, pod: Object, *, cpu: float | None, memory: int | None) -> str | None:
    """None: it is done. Otherwise why not; the pod then keeps its old size."""
    name, before = pod["metadata"]["name"], _resources(pod)
    wanted = scheduling.amounts(cpu, memory)
    after = {
        kind: {**(before.get(kind) or {}), **_part(kind, before, wanted)} for kind in ("requests", "limits")
    }
    try:
        await _patch(cluster, name, after)
    except KubeError as exc:
        if exc.absent:
            return "the cluster is too old to change a pod in place"
        _, short, rest = exc.message.partition("enough allocatable resources: ")
        if short:
            return f"its node has not enough room: {rest}"
        return f"the cluster cannot change it in place: {exc.message}"
    problem = await _done(cluster, name, after)
    if problem is not None:
        try:
            await _patch(cluster, name, {kind: before.get(kind) or {} for kind in ("requests", "limits")})
        except KubeError as exc:
            return f"{problem} (and the old size cannot be restored: {exc.message})"
    return problem


def _part(kind: str, before: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, str]:
    """CPU without a limit stays without: a limit would change the pod's QoS class, which is fixed."""
    limits = before.get("limits") or {}
    return {key: value for key, value in wanted.items() if kind == "requests" or key in limits}


async def _patch(cluster: Cluster, name: str, resources: Mapping[str, Any]) -> None:
    patch = {"spec": {"containers": [{"name": MAIN, "resources": dict(resources)}]}}
    await cluster.kube.patch(kinds.PODS, name, patch, how="strategic", subresource="resize")


async def _done(cluster: Cluster, name: str, wanted: Mapping[str, Any]) -> str | None:
    until = time.monotonic() + _WAIT
    while time.monotonic() < until:
        pod = cluster.pod(name)
        if pod is None:
            return "its pod is gone"
        if (problem := verdict(pod, wanted)) is not None:
            return problem or None
        await asyncio.sleep(_CHECK_SECONDS)
    return "its node has no room for the change yet"


def verdict(pod: Object, wanted: Mapping[str, Any]) -> str | None:
    """ "": done. None: not decided yet. Otherwise why it is impossible."""
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one.get("type") == "PodResizePending" and one.get("status") == "True":
            if one.get("reason") == "Infeasible":
                return f"its node has not enough room: {one.get('message') or 'infeasible'}"
            return None
        if one.get("type") == "PodResizeInProgress" and one.get("status") == "True":
            return f"its node could not do it: {one['message']}" if one.get("reason") == "Error" else None
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    main: Object = next((one for one in statuses if one.get("name") == MAIN), {})
    has = main.get("resources") or {}
    same = all(
        number((has.get(kind) or {}).get(key, 0)) == number(value)
        for kind in ("requests", "limits")
        for key, value in (wanted.get(kind) or {}).items()
        if key in ("cpu", "memory")
    )
    return "" if same else None


def _resources(pod: Object) -> Mapping[str, Any]:
    main = next(one for one in pod["spec"]["containers"] if one["name"] == MAIN)
    return main.get("resources") or {}
