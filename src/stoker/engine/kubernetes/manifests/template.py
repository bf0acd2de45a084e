"""Checks and merges additions to a pod, written by an admin or in a job. Pure.

Harmless fields are allowed (node selectors, tolerations, annotations, claims, environment). Fields that reach beyond the
pod (the host, its network, privileges, secrets of others) have to be granted by name in the cluster's `allow`. A job may
set less than an admin: nothing that gives it more resources than were counted, or a higher priority. Fields that Stoker
itself relies on can never be changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAIN = "main"
"""The container that the training runs in; the only one that a template may change."""

GRANTS: dict[str, tuple[str, ...]] = {
    "hostNetwork": ("spec.hostNetwork",),
    "hostPID": ("spec.hostPID",),
    "hostIPC": ("spec.hostIPC",),
    "hostPath": ("spec.volumes.hostPath",),
    "hostPort": ("spec.containers.ports",),
    "privileged": (
        "spec.containers.securityContext.privileged",
        "spec.containers.securityContext.allowPrivilegeEscalation",
    ),
    "capabilities": ("spec.containers.securityContext.capabilities",),
    "serviceAccount": ("spec.serviceAccountName", "spec.automountServiceAccountToken"),
    "secrets": (
        "spec.volumes.secret",
        "spec.volumes.projected",
        "spec.containers.env.valueFrom",
        "spec.containers.envFrom",
    ),
}
"""Words for `allow`, and the paths that each grants. A path itself may be allowed as well."""

SAFE: tuple[str, ...] = (
    "metadata.annotations",
    "metadata.labels",
    "spec.affinity",
    "spec.containers.env.name",
    "spec.containers.env.value",
    "spec.containers.env.valueFrom.fieldRef",
    "spec.containers.env.valueFrom.resourceFieldRef",
    "spec.containers.name",
    "spec.containers.resources",
    "spec.containers.volumeMounts",
    "spec.dnsConfig",
    "spec.dnsPolicy",
    "spec.hostAliases",
    "spec.imagePullSecrets",
    "spec.nodeSelector",
    "spec.priorityClassName",
    "spec.runtimeClassName",
    "spec.schedulerName",
    "spec.schedulingGates",
    "spec.tolerations",
    "spec.topologySpreadConstraints",
    "spec.volumes.configMap",
    "spec.volumes.csi",
    "spec.volumes.downwardAPI",
    "spec.volumes.emptyDir",
    "spec.volumes.ephemeral",
    "spec.volumes.name",
    "spec.volumes.nfs",
    "spec.volumes.persistentVolumeClaim",
)
SAFE_IN_JOBS: tuple[str, ...] = (
    "metadata.annotations",
    "metadata.labels",
    "spec.affinity",
    "spec.containers.env.name",
    "spec.containers.env.value",
    "spec.containers.env.valueFrom.configMapKeyRef",
    "spec.containers.env.valueFrom.fieldRef",
    "spec.containers.env.valueFrom.resourceFieldRef",
    "spec.containers.envFrom.configMapRef",
    "spec.containers.envFrom.prefix",
    "spec.containers.name",
    "spec.containers.volumeMounts",
    "spec.dnsConfig",
    "spec.dnsPolicy",
    "spec.hostAliases",
    "spec.imagePullSecrets",
    "spec.nodeSelector",
    "spec.tolerations",
    "spec.topologySpreadConstraints",
    "spec.volumes.configMap",
    "spec.volumes.downwardAPI",
    "spec.volumes.emptyDir",
    "spec.volumes.ephemeral",
    "spec.volumes.name",
    "spec.volumes.persistentVolumeClaim",
)
"""What a job may add without a grant. An admin may also set: resources beyond what was counted, a priority class,
another scheduler or runtime, volumes on any server."""
NOT_IN_JOBS = tuple(
    f"metadata.annotations.{name}"
    for name in (
        "container.apparmor.security.beta.kubernetes.io",
        "seccomp.security.alpha.kubernetes.io",
        "k8s.v1.cni.cncf.io",
    )
)
"""Annotations that give privileges or networks."""
OUR_MOUNTS = ("/stoker", "/dev/shm", "/tmp")
OUR_VOLUMES = frozenset(
    {"task", "bin", "setup", "home", "tmp", "shm", "key", "order", "secrets", "bundle", "checkpoints"}
)
OUR_VARIABLES = ("HOME", "NVIDIA_VISIBLE_DEVICES")
"""NVIDIA_VISIBLE_DEVICES decides which GPUs a container sees: those assigned to it."""
OUR_LABELS = "stoker.dev/"
_BY_KEY = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}
"""Lists whose items are identified by one of their keys; items of other lists are appended."""


def mistakes(
    template: Mapping[str, Any], allow: Sequence[str], safe: Sequence[str] = SAFE
) -> Iterator[tuple[str, str, str | None]]:
    """The fields of a template that are refused: (path, what is wrong with it, hint)."""
    granted = [path for word in allow for path in GRANTS.get(word, (word,))]
    for path, _ in _leaves(template, ""):
        if (
            safe is not SAFE
            and path.startswith(NOT_IN_JOBS)
            and not any(_under(path, one) for one in granted)
        ) or (path and not any(_under(path, one) for one in (*safe, *granted))):
            yield path, "is not allowed in a pod here", _grant_hint(path)
    yield from _ours(template)


def merge(pod: dict[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """The pod with the template's additions. The template takes precedence: it is the admin's decision, and changes to
    Stoker's own fields were refused before."""
    found: dict[str, Any] = _merged(pod, template, "")
    return found


def _merged(ours: Any, theirs: Any, key: str) -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        found = dict(ours)
        for name, value in theirs.items():
            found[name] = _merged(found[name], value, name) if name in found else value
        return found
    if isinstance(ours, list) and isinstance(theirs, list):
        return _merged_lists(ours, theirs, _BY_KEY.get(key))
    return theirs


def _merged_lists(ours: list[Any], theirs: list[Any], by: str | None) -> list[Any]:
    found = list(ours)
    for item in theirs:
        if by is None:
            if item not in found:
                found.append(item)
            continue
        at = next((n for n, mine in enumerate(found) if mine.get(by) == item.get(by)), None)
        if at is None:
            found.append(item)
        else:
            found[at] = _merged(found[at], item, "")
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping or a list, with its path; positions in lists are left out."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for child in value:
            yield from _leaves(child, path)
    else:
        yield path, value


def _under(path: str, allowed: str) -> bool:
    return path == allowed or path.startswith(f"{allowed}.")


def _grant_hint(path: str) -> str:
    word = next((word for word, paths in GRANTS.items() if any(_under(path, one) for one in paths)), path)
    return f"An admin of the cluster can allow it: add `{word}` to the cluster's `allow`."


def _ours(template: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """Fields that no grant can change, because Stoker relies on them."""
    metadata, spec = _mapping(template.get("metadata")), _mapping(template.get("spec"))
    for kind in ("labels", "annotations"):
        for name in _mapping(metadata.get(kind)):
            if str(name).startswith(OUR_LABELS):
                yield f"metadata.{kind}.{name}", "is Stoker's own", "Choose another name."
    for volume in _items(spec.get("volumes")):
        if _is_our_volume(volume):
            yield f"spec.volumes.{volume.get('name')}", "is Stoker's own", "Choose another name."
    for container in _items(spec.get("containers")):
        if container.get("name") != MAIN:
            other = container.get("name")
            yield "spec.containers", f"has {other!r}; only `{MAIN}` can be changed", f"Write `name: {MAIN}`."
        for mount in _items(container.get("volumeMounts")):
            where = str(mount.get("mountPath", ""))
            # The courier's key is in one, checkpoints of other runs may be in another.
            if _is_our_volume(mount):
                yield (
                    "spec.containers.volumeMounts",
                    f"mounts {mount['name']}, a volume of Stoker's own",
                    "Mount one that the template adds.",
                )
            if any(where == one or where.startswith(f"{one}/") for one in OUR_MOUNTS):
                yield (
                    "spec.containers.volumeMounts",
                    f"has {where}, which is Stoker's own",
                    "Mount it elsewhere.",
                )
        for variable in _items(container.get("env")):
            if str(variable.get("name", "")).startswith("STOKER_") or variable.get("name") in OUR_VARIABLES:
                yield "spec.containers.env", f"sets {variable['name']}, which Stoker sets", "Leave it out."


def _is_our_volume(named: Mapping[str, Any]) -> bool:
    name = str(named.get("name", ""))
    return name in OUR_VOLUMES or name.startswith(("input-", "mount-"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []
