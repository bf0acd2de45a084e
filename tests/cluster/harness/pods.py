"""Small pods for tests, and waiting for their states."""

from __future__ import annotations

import json
from typing import Any, Protocol

from harness.api import until

__all__ = ["Kubectl", "address", "apply", "claim", "get", "pod", "running"]


class Kubectl(Protocol):
    def kubectl(self, *argv: str, input: str | None = None) -> str: ...


def pod(name: str, image: str, script: str, **spec: Any) -> dict[str, Any]:
    """A pod with one container `main` that runs a shell script."""
    labels, resources = spec.pop("labels", {}), spec.pop("resources", {})
    main = {"name": "main", "image": image, "command": ["sh", "-c", script], "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name, **labels}},
        "spec": {"terminationGracePeriodSeconds": 0, "restartPolicy": "Never", "containers": [main], **spec},
    }


def claim(name: str, storage_class: str, mode: str = "ReadWriteOnce") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": storage_class,
            "accessModes": [mode],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def apply(cluster: Kubectl, namespace: str, *objects: dict[str, Any]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(listed))


def get(cluster: Kubectl, namespace: str, kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cluster.kubectl("-n", namespace, "get", kind, name, "-o", "json"))
    return found


def running(cluster: Kubectl, namespace: str, *names: str) -> None:
    """Wait until all the pods are ready."""
    wanted = [f"pod/{name}" for name in names]
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "--timeout=120s", *wanted)


def phase(cluster: Kubectl, namespace: str, name: str, wanted: str) -> None:
    def met() -> bool:
        return bool(get(cluster, namespace, "pod", name)["status"].get("phase") == wanted)

    until(
        met,
        f"pod {name} to be {wanted}",
        evidence=lambda: cluster.kubectl("-n", namespace, "describe", "pod", name),
    )


def address(cluster: Kubectl, namespace: str, name: str) -> str:
    return str(get(cluster, namespace, "pod", name)["status"]["podIP"])
