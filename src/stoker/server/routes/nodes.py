"""The nodes and what runs on them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from stoker.server.responses import JsonAnswer
from stoker.server.routes import services_of

router = APIRouter(prefix="/api/v1/nodes")


@router.get("")
def nodes(request: Request) -> JsonAnswer:
    return JsonAnswer({"nodes": services_of(request).controller.nodes()})
