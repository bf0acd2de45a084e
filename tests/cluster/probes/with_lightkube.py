from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from lightkube import AsyncClient, KubeConfig
from lightkube.generic_resource import create_global_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

PACKAGE = "lightkube"
Review = create_global_resource("authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews")


async def connect(kubeconfig: str | None) -> Any:
    config = KubeConfig.from_service_account() if kubeconfig is None else KubeConfig.from_file(kubeconfig)
    return AsyncClient(config=config)


async def whoami(client: Any) -> str:
    review = await client.create(Review(metadata=ObjectMeta()))
    return str(review.status["userInfo"]["username"])


async def watch(client: Any, version: str) -> AsyncIterator[str]:
    async for _, item in client.watch(ConfigMap, namespace="default", resource_version=version):
        yield item.metadata.name


async def close(client: Any) -> None:
    await client.close()
