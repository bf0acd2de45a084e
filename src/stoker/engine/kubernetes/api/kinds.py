"""The kinds of objects that Stoker uses."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class Kind:
    api: str
    """apiVersion: `v1`, `batch/v1`"""
    name: str
    """`Pod`"""
    plural: str
    """`pods`, as in URLs"""
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of one object, or of all of them (in a namespace, or everywhere)."""
        root = f"/api/{self.api}" if "/" not in self.api else f"/apis/{self.api}"
        parts = [root]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)

    def __str__(self) -> str:
        return self.plural


PODS = Kind("v1", "Pod", "pods")
NODES = Kind("v1", "Node", "nodes", namespaced=False)
SECRETS = Kind("v1", "Secret", "secrets")
CONFIGMAPS = Kind("v1", "ConfigMap", "configmaps")
EVENTS = Kind("v1", "Event", "events")
NAMESPACES = Kind("v1", "Namespace", "namespaces", namespaced=False)
CLAIMS = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
PRIORITY_CLASSES = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False)
ACCESS_REVIEWS = Kind(
    "authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def counted(method: str, path: str) -> tuple[str, str]:
    """How a raw request is counted: `/api/v1/namespaces/x/pods/y/proxy/z` is ("proxy", "pods")."""
    parts = path.partition("?")[0].strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else parts
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    subresource = parts[2] if len(parts) > 2 else ""
    return subresource or _VERBS.get(method, method.lower()), parts[0] if parts else ""
