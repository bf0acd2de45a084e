"""The small API server of the client's tests, extended for the engine.

It has complete metadata, merge patches, access reviews, and pods that end when they are deleted.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.settings import Home, Settings
from stoker.spec import Job
from support.kubernetes.kubeapi import Api, Object, kubeconfig, status

__all__ = ["Server", "attempt", "engine", "status"]


class Server(Api):
    """`writes`: method and plural of every write, in order."""

    def __init__(self, ca: trustme.CA) -> None:
        super().__init__(ca)
        self.writes: list[tuple[str, str]] = []
        self.denied: set[str] = set()
        """Resources that may not be listed in the whole cluster."""
        self.fail_at: int | None = None
        """The write with this number, and all later ones, fail."""
        self.done_before_failing = False
        self.refuse_pods: tuple[int, str] | None = None

    def _object(
        self, request: web.Request, plural: str, namespace: str, name: str, sent: Any
    ) -> web.StreamResponse:
        if plural == "selfsubjectaccessreviews":
            resource = sent["spec"]["resourceAttributes"]["resource"]
            return web.json_response({**sent, "status": {"allowed": resource not in self.denied}}, status=201)
        if request.method == "GET":
            return super()._object(request, plural, namespace, name, sent)
        self.writes.append((request.method, plural))
        failing = self.fail_at is not None and len(self.writes) >= self.fail_at
        if failing and not self.done_before_failing:
            return status(500, "InternalError", "the API server is unwell")
        answer = self._write(request, plural, namespace, name, sent)
        return status(500, "InternalError", "the answer was lost") if failing else answer

    def _write(
        self, request: web.Request, plural: str, namespace: str, name: str, sent: Any
    ) -> web.StreamResponse:
        if request.method == "POST":
            name = sent["metadata"]["name"]
            if plural == "pods" and self.refuse_pods is not None:
                return status(*self.refuse_pods[:1], "Forbidden", self.refuse_pods[1])
            if (plural, namespace, name) in self.objects:
                return status(409, "AlreadyExists", f'{plural} "{name}" already exists')
            rest = {key: value for key, value in sent.items() if key != "metadata"}
            return web.json_response(
                self.put(plural, name, namespace, metadata=sent["metadata"], **rest), status=201
            )
        if request.method == "PATCH" and (plural, namespace, name) in self.objects:
            obj = merged(self.objects[plural, namespace, name], sent)
            rest = {key: value for key, value in obj.items() if key != "metadata"}
            kept = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}
            return web.json_response(self.put(plural, name, namespace, metadata=kept, **rest))
        return super()._object(request, plural, namespace, name, sent)

    def of(self, plural: str) -> dict[str, Object]:
        return {name: obj for (kind, _, name), obj in self.objects.items() if kind == plural}

    def change(self, name: str, **status: Any) -> None:
        """Set the status of a pod as a kubelet would; `nodeName` goes to the spec."""
        pod = copy.deepcopy(self.of("pods")[name])
        if node := status.pop("nodeName", None):
            pod["spec"]["nodeName"] = node
        rest = {key: value for key, value in pod.items() if key not in ("metadata", "status")}
        kept = {key: value for key, value in pod["metadata"].items() if key != "resourceVersion"}
        self.put("pods", name, metadata=kept, status={**pod.get("status", {}), **status}, **rest)


def merged(old: Any, patch: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    found = {key: value for key, value in old.items() if key not in patch or patch[key] is not None}
    return {
        **found,
        **{key: merged(old.get(key), value) for key, value in patch.items() if value is not None},
    }


def engine(server: Server, tmp_path: Path, **settings: Any) -> KubernetesEngine:
    """An engine on this home. A second call gives the engine of a restarted server."""
    path = kubeconfig(tmp_path / "kubeconfig", server.url, server.ca)
    home = Home(tmp_path / "home")
    home.root.mkdir(exist_ok=True)
    config = {"kubeconfig": str(path), "stoker_image": "stoker:1", **settings}
    return KubernetesEngine("test", ClusterConfig.from_json(config), Settings(home))


def attempt(
    run: str = "digits-7f3k", number: int = 1, tasks: int = 2, incarnation: int = 1, **job: Any
) -> Attempt:
    wanted = Job.from_json({"name": "digits", "run": "x", "image": "torch:2", **job})
    plans = tuple(TaskPlan(f"worker-{index}", index=index, incarnation=incarnation) for index in range(tasks))
    return Attempt(run, number, plans, job=wanted)
