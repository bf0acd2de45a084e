"""The clusters runs can go to."""

from __future__ import annotations

from fastapi import APIRouter, Request

from stoker.server.requests import Cluster, ClusterChange, Nothing
from stoker.server.responses import JsonAnswer
from stoker.server.routes import services_of

router = APIRouter(prefix="/api/v1/clusters")


@router.get("")
def clusters(request: Request) -> JsonAnswer:
    return JsonAnswer({"clusters": services_of(request).controller.clusters.every()})


@router.post("")
def add(request: Request, body: Cluster) -> JsonAnswer:
    found = services_of(request).controller.clusters.add(body.name, body.config, body.changes)
    return JsonAnswer(found, 201)


@router.put("/{cluster}")
def change(request: Request, cluster: str, body: ClusterChange) -> JsonAnswer:
    return JsonAnswer(services_of(request).controller.clusters.change(cluster, body.changes))


@router.delete("/{cluster}")
def remove(request: Request, cluster: str) -> JsonAnswer:
    services_of(request).controller.clusters.remove(cluster)
    return JsonAnswer({"removed": cluster})


@router.post("/{cluster}/check")
def check(request: Request, cluster: str, body: Nothing) -> JsonAnswer:
    return JsonAnswer({"checks": services_of(request).controller.clusters.check(cluster)})
