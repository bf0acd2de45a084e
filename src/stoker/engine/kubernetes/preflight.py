"""`stoker cluster check`: which parts of a cluster are ready for Stoker, one line each, with hints for the others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stoker.engine.kubernetes import capacity
from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.errors import KubeError
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.errors import StokerError

OLDEST = (1, 29)
"""The first version that enables sidecars by default."""

_NEEDED = (
    ("create", "pods", "", True),
    ("delete", "pods", "", True),
    ("watch", "pods", "", True),
    ("create", "secrets", "", True),
    ("patch", "secrets", "", True),
    ("delete", "secrets", "", True),
    ("watch", "secrets", "", True),
    ("create", "configmaps", "", True),
    ("watch", "events", "", True),
    ("create", "pods", "proxy", False),
    ("create", "pods", "exec", False),
    ("patch", "pods", "resize", False),
)
"""verb, resource, subresource, and whether it is required for anything to work."""


async def check(
    name: str, config: ClusterConfig, connected: Callable[[], Awaitable[Cluster]]
) -> list[dict[str, Any]]:
    try:
        cluster = await connected()
        version = await cluster.kube.version()
    except StokerError as exc:
        return [_fact("reachable", False, exc.message, exc.hint or "Check the kubeconfig and the network.")]
    found = [_fact("reachable", True, f"{cluster.kube.namespace} of Kubernetes {version}")]
    found.append(_version(version))
    found += await _permissions(cluster)
    found += _nodes(name, config, cluster)
    found += await _namespace(config, cluster)
    found += await _objects(config, cluster)
    found.append(_code(config))
    return found


def _fact(name: str, ok: bool | None, text: str, hint: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "text": text, "hint": hint}


def _version(version: str) -> dict[str, Any]:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    new = found is not None and (int(found[1]), int(found[2])) >= OLDEST
    return _fact("version", new, version, "" if new else "Stoker needs Kubernetes 1.29 or newer (sidecars).")


async def _permissions(cluster: Cluster) -> list[dict[str, Any]]:
    answers = await asyncio.gather(*(cluster.may(*need[:3], namespace=cluster.namespace) for need in _NEEDED))
    missing = [
        (f"{verb} {resource}{f'/{sub}' if sub else ''}", needed)
        for (verb, resource, sub, needed), allowed in zip(_NEEDED, answers, strict=True)
        if not allowed
    ]
    if not missing:
        return [_fact("permissions", True, "all required ones are granted")]
    vital = [what for what, needed in missing if needed]
    rest = [what for what, needed in missing if not needed]
    found = []
    if vital:
        hint = "Ask an admin to grant them to this user in the namespace."
        found.append(_fact("permissions", False, f"missing: {', '.join(vital)}", hint))
    if rest:
        text = f"without {', '.join(rest)} some features do not work (proxying, drills, resizing)"
        found.append(_fact("permissions", None, text, "Nothing to do if you do not need them."))
    return found


def _nodes(name: str, config: ClusterConfig, cluster: Cluster) -> list[dict[str, Any]]:
    listed = cluster.nodes()
    if listed is None:
        hint = "Let this user list nodes, or set the cluster's `capacity`." if config.capacity is None else ""
        return [_fact("nodes", None, "this user may not list them: the cluster counts as one node", hint)]
    usable = capacity.nodes(name, config, listed, cluster.others())
    real = [node for node in usable if ":" not in node.name]
    gpus = sum(len(node.gpus) for node in real)
    text = f"{len(real)} of {len(listed)} can be used, {sum(node.ready for node in real)} ready, {gpus} GPUs"
    found = [_fact("nodes", bool(real) or None, text)]
    for pool in config.pools:
        there = sum(pool in capacity.pools_of(node, config) for node in listed)
        scaled = config.pools[pool].autoscale is not None
        if not there and not scaled:
            found.append(
                _fact(f"pool {pool}", None, "no node has its labels", "Check the pool's `selector`.")
            )
    return found


async def _namespace(config: ClusterConfig, cluster: Cluster) -> list[dict[str, Any]]:
    """Whether the namespace's pod security level admits Stoker's pods."""
    try:
        found = await cluster.kube.get(kinds.NAMESPACES, cluster.namespace)
    except KubeError as exc:
        if exc.absent:
            hint = f"`kubectl create namespace {cluster.namespace}` makes it."
            return [_fact("namespace", False, f"{cluster.namespace} does not exist", hint)]
        return []
    labels = found["metadata"].get("labels") or {}
    level = labels.get("pod-security.kubernetes.io/enforce", "privileged")
    if level == "restricted" and config.security != "restricted":
        hint = "Set the cluster's `security=restricted`, or relax the namespace."
        return [_fact("namespace", False, f"{cluster.namespace} admits only restricted pods", hint)]
    return [_fact("namespace", True, f"{cluster.namespace} (pod security: {level})")]


async def _objects(config: ClusterConfig, cluster: Cluster) -> list[dict[str, Any]]:
    """Whether the objects that the settings name exist."""
    wanted: Sequence[tuple[Any, str, str]] = [
        *((kinds.SECRETS, name, "pull_secrets") for name in config.pull_secrets),
        *(
            (kinds.PRIORITY_CLASSES, name, "priority_classes")
            for name in dict.fromkeys(config.priority_classes.model_dump().values())
            if name
        ),
        *([(kinds.CLAIMS, config.checkpoints, "checkpoints")] if config.checkpoints else []),
    ]
    found = []
    for kind, name, key in wanted:
        try:
            there = await cluster.kube.get(kind, name)
        except KubeError as exc:
            if exc.absent:
                found.append(
                    _fact(key, False, f"there is no {kind.name} {name}", f"Create it, or change `{key}`.")
                )
            continue
        if kind is kinds.CLAIMS and "ReadWriteMany" not in (there["spec"].get("accessModes") or ()):
            text = f"{name} is not ReadWriteMany: tasks on other nodes cannot mount it"
            found.append(_fact(key, None, text, "Use a claim that every node can mount."))
    return found


def _code(config: ClusterConfig) -> dict[str, Any]:
    if config.stoker_image:
        return _fact("launcher", True, f"from the image {config.stoker_image}")
    return _fact("launcher", True, "from a ConfigMap: images need Python 3.9 or newer")
