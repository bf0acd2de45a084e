"""Which route to a courier is used, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.courier_client import routes
from stoker.errors import EngineUnavailable
from stoker.task import courier_protocol

SIGNED = {courier_protocol.SESSION.lower(): "1 x y"}
PROBED = ["10.0.0.1"]


class Route:
    """A route with scripted answers."""

    def __init__(self, name: str, told: list[str], answers: dict[str, Any]) -> None:
        self.name, self._told, self._answers = name, told, answers

    async def call(self, path: str, headers: Mapping[str, str], body: bytes, timeout: float) -> routes.Answer:
        self._told.append(self.name)
        answer = self._answers[self.name]
        if isinstance(answer, Exception):
            raise answer
        return 200, answer, b""


def cluster(reach: str, address: str = "10.0.0.1") -> Any:
    pod = {"status": {"podIP": address}}
    return SimpleNamespace(config=ClusterConfig.from_json({"reach": reach}), pod=lambda name: pod, kube=None)


def chosen(monkeypatch: pytest.MonkeyPatch, found: Any, answers: dict[str, Any], *, open_: bool) -> tuple[Any, list[str], list[str]]:  # fmt: skip
    told: list[str] = []
    probes: list[str] = []

    async def probe(self: routes.Routes, address: str) -> bool:
        probes.append(address)
        return open_

    monkeypatch.setattr(routes.Routes, "reachable", probe)
    monkeypatch.setattr(routes._CurrentRoute, "_make", lambda self, name, address: Route(name, told, answers))
    return routes.Routes(found).to("pod", "certificate"), told, probes


def call(transport: Any, times: int) -> None:
    async def work() -> None:
        for _ in range(times):
            try:
                await transport.call("/v1/sync", {}, b"", 1.0)
            except (OSError, EngineUnavailable):
                continue

    asyncio.run(work())


REFUSED = {"direct": ConnectionRefusedError(), "proxy": SIGNED}
ROUTES: dict[str, tuple[Any, bool, dict[str, Any], list[str], list[str]]] = {
    "direct is configured": (cluster("direct"), False, {"direct": OSError("x")}, ["direct"] * 3, []),
    "proxy is configured": (cluster("proxy"), False, {"proxy": OSError("x")}, ["proxy"] * 3, []),
    "forward is configured": (cluster("forward"), False, {"forward": OSError("x")}, ["forward"] * 3, []),
    "the pod can be reached": (cluster("auto"), True, {"direct": SIGNED}, ["direct"] * 5, PROBED),
    "the pod cannot be reached": (cluster("auto"), False, {"proxy": SIGNED}, ["proxy"] * 3, PROBED),
    "the proxy's answer has no signature":
        (cluster("auto"), False, {"proxy": {}, "forward": SIGNED}, ["proxy", *["forward"] * 3], PROBED),
    "a courier that is not up yet is waited for, but not forever":
        (cluster("auto"), True, REFUSED, ["direct"] * routes._REFUSALS + ["proxy"] * 2, PROBED),
    "the pod has no address": (cluster("auto", ""), True, {"proxy": SIGNED}, ["proxy"], []),
}  # fmt: skip


@pytest.mark.parametrize(("found", "open_", "answers", "told", "probes"), ROUTES.values(), ids=ROUTES.keys())
def test_routes(monkeypatch, found, open_, answers, told, probes):
    transport, taken, probed = chosen(monkeypatch, found, answers, open_=open_)
    call(transport, len(told))
    assert (taken, probed) == (told, probes)


def test_a_route_that_worked_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"direct": SIGNED, "proxy": SIGNED}
    transport, told, _ = chosen(monkeypatch, cluster("auto"), answers, open_=True)
    call(transport, 1)
    answers["direct"] = TimeoutError()
    call(transport, 3)
    assert told == ["direct", "direct", "direct", "proxy"]


def test_an_unreachable_api_server_does_not_close_the_direct_route(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster("auto")
    transport, told, _ = chosen(monkeypatch, found, {"direct": SIGNED}, open_=True)
    call(transport, 1)

    def away(name: str) -> None:
        raise EngineUnavailable("the API server is away")

    found.pod = away
    call(transport, 2)
    assert told == ["direct"] * 3


def test_reachability_is_remembered_for_all_pods() -> None:
    async def work() -> None:
        found = routes.Routes(cluster("auto"))
        assert await found.reachable("127.0.0.1"), "the port is closed, but the host answers"
        found._unreachable_until = float("inf")
        assert not await found.reachable("127.0.0.1")

    asyncio.run(work())
