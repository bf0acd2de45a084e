"""Which way to a courier is taken, and what happens when it fails."""

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


class Road:
    """A way whose answers are given."""

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
    knocks: list[str] = []

    async def knock(self: routes.Routes, address: str) -> bool:
        knocks.append(address)
        return open_

    monkeypatch.setattr(routes.Routes, "reachable", knock)
    monkeypatch.setattr(routes._CurrentRoute, "_make", lambda self, name, address: Road(name, told, answers))
    return routes.Routes(found).to("pod", "certificate"), told, knocks


def call(transport: Any, times: int) -> None:
    async def work() -> None:
        for _ in range(times):
            try:
                await transport.call("/v1/sync", {}, b"", 1.0)
            except (OSError, EngineUnavailable):
                continue

    asyncio.run(work())


@pytest.mark.parametrize("reach", ["direct", "proxy", "forward"])
def test_an_admins_word_is_kept(monkeypatch: pytest.MonkeyPatch, reach: str) -> None:
    transport, told, knocks = chosen(monkeypatch, cluster(reach), {reach: OSError("x")}, open_=False)
    call(transport, 3)
    assert told == [reach] * 3 and knocks == []


def test_the_pods_own_address_where_it_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, told, knocks = chosen(monkeypatch, cluster("auto"), {"direct": SIGNED}, open_=True)
    call(transport, 5)
    assert told == ["direct"] * 5 and knocks == ["10.0.0.1"], "knocked at once"


def test_the_proxy_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, told, _ = chosen(monkeypatch, cluster("auto"), {"proxy": SIGNED}, open_=False)
    call(transport, 3)
    assert told == ["proxy"] * 3


def test_a_tunnel_where_proxying_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server's own answer is nobody's signature."""
    answers = {"proxy": {}, "forward": SIGNED}
    transport, told, _ = chosen(monkeypatch, cluster("auto"), answers, open_=False)
    call(transport, 4)
    assert told == ["proxy", "forward", "forward", "forward"]


def test_what_worked_gets_another_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"direct": SIGNED, "proxy": SIGNED}
    transport, told, _ = chosen(monkeypatch, cluster("auto"), answers, open_=True)
    call(transport, 1)
    answers["direct"] = TimeoutError()
    call(transport, 3)
    assert told == ["direct", "direct", "direct", "proxy"]


def test_a_courier_that_is_not_up_yet_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"direct": ConnectionRefusedError(), "proxy": SIGNED}
    transport, told, _ = chosen(monkeypatch, cluster("auto"), answers, open_=True)
    call(transport, routes._REFUSALS + 2)
    assert told == ["direct"] * routes._REFUSALS + ["proxy"] * 2


def test_an_api_server_that_is_away_does_not_close_the_direct_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster("auto")
    transport, told, _ = chosen(monkeypatch, found, {"direct": SIGNED}, open_=True)
    call(transport, 1)

    def away(name: str) -> None:
        raise EngineUnavailable("the API server is away")

    found.pod = away
    call(transport, 2)
    assert told == ["direct"] * 3


def test_a_pod_without_an_address_is_reached_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, told, _ = chosen(monkeypatch, cluster("auto", ""), {"proxy": SIGNED}, open_=True)
    call(transport, 1)
    assert told == ["proxy"]


def test_knocking_is_remembered_for_all_pods() -> None:
    async def work() -> None:
        found = routes.Routes(cluster("auto"))
        assert await found.reachable("127.0.0.1"), "the port is closed, but the host answers"
        found._unreachable_until = float("inf")
        assert not await found.reachable("127.0.0.1")

    asyncio.run(work())
