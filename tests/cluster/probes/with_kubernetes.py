"""The official client blocks, so each call has a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kubernetes import client as k
from kubernetes import config
from kubernetes import watch as w

PACKAGE = "kubernetes"


async def connect(kubeconfig: str | None) -> Any:
    configuration = k.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=configuration)
    else:
        config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    return k.ApiClient(configuration)


async def whoami(client: Any) -> str:
    api = k.AuthenticationV1Api(client)
    review = await asyncio.to_thread(api.create_self_subject_review, k.V1SelfSubjectReview())
    return str(review.status.user_info.username)


async def watch(client: Any, version: str) -> AsyncIterator[str]:
    stream, api, end = w.Watch(), k.CoreV1Api(client), object()
    events = iter(stream.stream(api.list_namespaced_config_map, "default", resource_version=version))
    try:
        while (event := await asyncio.to_thread(next, events, end)) is not end:
            yield event["object"].metadata.name
    finally:
        stream.stop()


async def close(client: Any) -> None:
    client.rest_client.pool_manager.clear()
