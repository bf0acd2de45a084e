"""Shared by the tests of the engine on a real cluster: images, engines, waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from harness import Cluster
from harness.foreign import ForeignCluster

from stoker.engine.base import Attempt, Handle, Observation, TaskPlan
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.errors import EngineError
from stoker.settings import Home, Settings
from stoker.spec import Job
from stoker.task.directory import RemoteAccess, TaskDir
from stoker.task.formats import Order, Status
from support.waiting import is_there, wait_async

AnyCluster = Cluster | ForeignCluster
T = TypeVar("T")
WAIT = 180.0
"""Generous: only a broken cluster reaches it."""


def image(cluster: AnyCluster, name: str) -> str:
    return cluster.images[name]


def settings_of(cluster: AnyCluster, namespace: str, **more: Any) -> ClusterConfig:
    base = {"kubeconfig": str(cluster.kubeconfig), "namespace": namespace}
    return ClusterConfig.from_json({**base, **more})


def engine_of(home: Home, config: ClusterConfig, name: str = "test") -> KubernetesEngine:
    home.root.mkdir(parents=True, exist_ok=True)
    return KubernetesEngine(name, config, Settings(home))


def job_of(image: str, **more: Any) -> Job:
    return Job.from_json({"name": "digits", "run": "true", "image": image, "grace": "5s", **more})


def attempt_of(job: Job, run: str = "digits-7f3k", number: int = 1, **more: Any) -> Attempt:
    resources = job.resources
    plan = TaskPlan("worker-0", cpu=resources.cpu, memory=resources.memory, **more)
    return Attempt(run, number, (plan,), job=job)


async def seen(
    engine: KubernetesEngine, wanted: Callable[[Observation], bool], what: str, run: str = "digits-7f3k"
) -> Observation:
    """The first observation of the run's task that satisfies the condition."""
    last: list[Observation] = []

    async def look() -> Observation | None:
        last[:] = [found for found in await engine.observe() if found.run == run]
        return next((found for found in last if wanted(found)), None)

    try:
        return await wait_async(look, what=what, good=is_there)
    except AssertionError as exc:
        raise AssertionError(f"{exc}; last seen: {last}") from None


async def phase(directory: TaskDir, *phases: str) -> Status:
    async def look() -> Status | None:
        status = directory.status()
        return status if directory.exists() and status is not None and status.phase in phases else None

    status = await wait_async(look, what=f"a task that is {' or '.join(phases)}", good=is_there)
    if status.phase == "ended" and isinstance(directory, RemoteAccess):
        # The journal's record may arrive later than the other files.
        await asyncio.to_thread(directory.catch_up, 60.0)
    return status


async def started(engine: KubernetesEngine, attempt: Attempt, argv: list[str]) -> tuple[Handle, TaskDir]:
    """A task with a running body."""
    handle = await engine.submit(attempt)
    directory = await engine.reach(handle, attempt.tasks[0].name)
    await phase(directory, "ready")
    order = Order(seq=1, generation=1, verb="run", argv=argv, inherit=True, grace=5.0)
    await asyncio.to_thread(directory.write_order, order)
    return handle, directory


def log_of(directory: TaskDir) -> bytes:
    return b"".join(directory.read(f"log/{name}") for name in directory.list("log"))


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT * 2):
            await story()

    asyncio.run(limited())


class Stage:
    """A cluster, a namespace and a home, with engines on them."""

    def __init__(self, cluster: AnyCluster, namespace: str, tmp_path: Path) -> None:
        self.cluster, self.namespace, self.home = cluster, namespace, Home(tmp_path / "home")

    def image(self, name: str = "nonroot") -> str:
        return image(self.cluster, name)

    def job(self, name: str = "nonroot", **more: Any) -> Job:
        return job_of(self.image(name), **more)

    def kubectl(self, *argv: str, input: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *argv, input=input)

    @contextlib.asynccontextmanager
    async def engine(self, **settings: Any) -> AsyncIterator[KubernetesEngine]:
        config = settings_of(self.cluster, self.namespace, **{"default_cpu": 0.05, **settings})
        engine = engine_of(self.home, config)
        try:
            yield engine
            for found in await engine.observe():
                with contextlib.suppress(EngineError):  # pods on a lost node remain
                    await engine.stop(found.handle, grace=timedelta(0))
                    await engine.remove(found.handle)
        finally:
            await engine.close()

    async def keep(self, engine: KubernetesEngine, name: str) -> None:
        """Record what the cluster shows, or last showed, of the run's pod."""
        if not (directory := os.environ.get("STOKER_RECORD_PODS")):
            return
        cluster = (await engine._ready()).cluster
        there = [*cluster.pods(), *engine._deleted_pods.values()]
        pod = next(one for one in there if one["metadata"]["name"].startswith("digits-7f3k"))
        nodes = [_part(node, _NODE) for node in cluster.nodes() or ()]
        shown = {
            "pod": _part(pod, _POD),
            "events": [_part(one, _EVENT) for one in cluster.events(pod)],
            "nodes": nodes,
        }
        text = json.dumps(shown, indent=1, sort_keys=True)
        text = text.replace(self.cluster.registry, "registry.example.com:5000")
        (Path(directory) / f"{name}.json").write_text(text + "\n")


_CONTAINER = {"name": None, "image": None, "resources": None, "restartPolicy": None}
_STATUS = dict.fromkeys(("name", "state", "lastState", "restartCount", "started", "ready", "image"))
_POD = {
    "metadata": dict.fromkeys(("name", "namespace", "uid", "labels", "annotations", "deletionTimestamp")),
    "spec": {
        "nodeName": None,
        "restartPolicy": None,
        "containers": _CONTAINER,
        "initContainers": _CONTAINER,
    },
    "status": {
        "phase": None,
        "reason": None,
        "message": None,
        "conditions": None,
        "containerStatuses": _STATUS,
        "initContainerStatuses": _STATUS,
    },
}
_EVENT = dict.fromkeys(("reason", "message", "type", "lastTimestamp", "eventTime"))
_NODE = {"metadata": {"name": None}, "status": {"allocatable": None}}


def _part(value: Any, wanted: Any) -> Any:
    """The parts of an object that are worth recording."""
    if wanted is None:
        return value
    if isinstance(value, list):
        return [_part(one, wanted) for one in value]
    return {key: _part(value[key], inner) for key, inner in wanted.items() if key in value}
