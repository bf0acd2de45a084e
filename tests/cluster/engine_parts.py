"""What tests of the engine on a real cluster share: images, engines, waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from harness import Cluster
from harness.foreign import ForeignCluster

from stoker.engine.base import Attempt, Handle, Observation, TaskPlan
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.settings import Home, Settings
from stoker.spec import Job
from stoker.task.access import TaskDir
from stoker.task.formats import Order, Status

AnyCluster = Cluster | ForeignCluster
T = TypeVar("T")
WAIT = 180.0
"""Generous: a limit for what is broken, not a measure of what is good."""


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


async def until(probe: Callable[[], Awaitable[T | None]], what: str, seconds: float = WAIT) -> T:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = await probe()
        if found is not None:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


async def seen(
    engine: KubernetesEngine, wanted: Callable[[Observation], bool], what: str, run: str = "digits-7f3k"
) -> Observation:
    """The first observation of the run's task that is wanted."""
    last: list[Observation] = []

    async def look() -> Observation | None:
        last[:] = [found for found in await engine.observe() if found.run == run]
        return next((found for found in last if wanted(found)), None)

    try:
        return await until(look, what)
    except AssertionError as exc:
        raise AssertionError(f"{exc}; last seen: {last}") from None


async def phase(directory: TaskDir, *phases: str) -> Status:
    async def look() -> Status | None:
        status = directory.status()
        return status if directory.exists() and status is not None and status.phase in phases else None

    return await until(look, f"a task that is {' or '.join(phases)}")


async def started(engine: KubernetesEngine, attempt: Attempt, argv: list[str]) -> tuple[Handle, TaskDir]:
    """A task with its body under way."""
    handle = await engine.submit(attempt)
    directory = await engine.reach(handle, attempt.tasks[0].name)
    await phase(directory, "ready")
    order = Order(seq=1, generation=1, verb="run", argv=argv, inherit=True, grace=5.0)
    await asyncio.to_thread(directory.write_order, order)
    return handle, directory


def log_of(directory: TaskDir) -> bytes:
    return b"".join(directory.read(f"log/{name}") for name in directory.list("log"))


def evidence(found: Observation) -> Mapping[str, Any]:
    return found.evidence
