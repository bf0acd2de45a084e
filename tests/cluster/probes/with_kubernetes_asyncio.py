from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kubernetes_asyncio import client as k
from kubernetes_asyncio import config
from kubernetes_asyncio import watch as w

PACKAGE = "kubernetes_asyncio"


async def connect(kubeconfig: str | None) -> Any:
    configuration = k.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    return k.ApiClient(configuration)


async def whoami(client: Any) -> str:
    review = await k.AuthenticationV1Api(client).create_self_subject_review(k.V1SelfSubjectReview())
    return str(review.status.user_info.username)


async def watch(client: Any, version: str) -> AsyncIterator[str]:
    async with w.Watch() as stream:
        api = k.CoreV1Api(client)
        async for event in stream.stream(api.list_namespaced_config_map, "default", resource_version=version):
            yield event["object"].metadata.name


async def close(client: Any) -> None:
    await client.close()
