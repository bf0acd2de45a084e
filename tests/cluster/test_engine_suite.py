"""The Kubernetes engine passes the suite with real pods, for all ways of delivery and connection."""

from __future__ import annotations

import asyncio

import pytest
from engine_parts import WAIT, AnyCluster, engine_of, image, settings_of

from stoker.engine.base import Attempt, Engine, Handle, TaskPlan
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.settings import Home
from stoker.spec import Job
from stoker.task import formats
from stoker.task.container_layout import TASK
from stoker.testing.engine_suite import EngineSuite

pytestmark = pytest.mark.timeout(600)


class TestKubernetesEngine(EngineSuite):
    """The bundle from a ConfigMap, in an image whose user is not root."""

    wait = WAIT
    image = "nonroot"
    settings: dict[str, object] = {}

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: AnyCluster, namespace: str, _home: None) -> None:
        self.cluster, self.namespace = cluster, namespace
        image(cluster, self.image)  # the first call builds it

    def make_engine(self, home: Home) -> Engine:
        return engine_of(home, settings_of(self.cluster, self.namespace, default_cpu=0.1, **self.settings))

    async def tick(self, engine: Engine) -> None:
        await asyncio.sleep(0.1)

    async def let_the_trap_be_set(self) -> None:
        await asyncio.sleep(3)

    def attempt(self, run: str, number: int, tasks: tuple[TaskPlan, ...]) -> Attempt:
        job = Job.from_json({"name": "suite", "run": "true", "image": image(self.cluster, self.image)})
        return Attempt(run, number, tasks, job=job)

    async def order(
        self, engine: Engine, handle: Handle, order: formats.Order, task: str = "worker-0"
    ) -> None:
        directory = await engine.reach(handle, task)

        async def there() -> bool | None:
            return True if directory.exists() and directory.status() is not None else None

        await self.until(engine, there, f"{task} to take orders")
        await asyncio.to_thread(directory.write_order, order)

    async def directories(self, engine: Engine, handle: Handle, task: str) -> set[str]:
        assert isinstance(engine, KubernetesEngine)
        await self.phase(engine, handle, task, "ready")
        pod = next(
            pod for pod in (await engine._ready()).cluster.pods() if pod["metadata"]["name"].endswith(task)
        )
        listed = self.cluster.kubectl("-n", self.namespace, "exec", pod["metadata"]["name"], "--", "ls", TASK)
        return set(listed.split())

    def proof(self, engine: Engine, handle: Handle, status: formats.Status) -> str:
        pod = f"pod {handle['run']}-{handle['attempt']}-worker-0"
        seen_dying = f"its launcher is gone: container main of {pod} ended with signal 9"
        return f"{seen_dying}|{pod} is gone: it or its node was deleted"


@pytest.mark.soak
class TestFromOurImage(TestKubernetesEngine):
    """The bundle from Stoker's own image, through the API server's proxy, in an image that runs as root.
    Only a soak runs the whole suite a second time: test_pods.py, test_scale.py and test_chart_rbac.py
    cover both ways as well."""

    image = "root"

    @property
    def settings(self) -> dict[str, object]:  # type: ignore[override]
        return {"stoker_image": image(self.cluster, "stoker"), "reach": "proxy"}
