from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import kr8s.asyncio

PACKAGE = "kr8s"


async def connect(kubeconfig: str | None) -> Any:
    return await kr8s.asyncio.api(kubeconfig=kubeconfig or "/nonexistent")


async def whoami(client: Any) -> str:
    body = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
    async with client.call_api(
        "POST", version="authentication.k8s.io/v1", url="selfsubjectreviews", content=body
    ) as answer:
        return str(answer.json()["status"]["userInfo"]["username"])


async def watch(client: Any, version: str) -> AsyncIterator[str]:
    async for _, item in client.watch("configmaps", namespace="default", since=version):
        yield item.name


async def close(client: Any) -> None:
    if client._session is not None:  # there is no public way
        await client._session.aclose()
