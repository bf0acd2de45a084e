from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from stoker.engine.kubernetes.api import Kind, Kube, KubeConfig, kinds

PACKAGE = "stoker"
REVIEWS = Kind("authentication.k8s.io/v1", "SelfSubjectReview", "selfsubjectreviews", namespaced=False)


async def connect(kubeconfig: str | None) -> Any:
    return Kube.from_config(KubeConfig.load(kubeconfig or "in-cluster"))


async def whoami(client: Any) -> str:
    review = {"apiVersion": REVIEWS.api, "kind": REVIEWS.name, "metadata": {}}
    return str((await client.create(REVIEWS, review))["status"]["userInfo"]["username"])


async def watch(client: Any, version: str) -> AsyncIterator[str]:
    watching = client.watch(kinds.CONFIGMAPS, "default", resource_version=version, timeout=20)
    async for event, item in watching:
        if event != "BOOKMARK":
            yield item["metadata"]["name"]


async def close(client: Any) -> None:
    await client.close()
