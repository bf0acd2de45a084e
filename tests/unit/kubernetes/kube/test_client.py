"""Requests to the API server: objects, errors, retries, timeouts, connections."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme
from aiohttp import web

from stoker import __version__
from stoker.engine.kubernetes.api import kinds, session
from stoker.engine.kubernetes.api.client import Kube
from stoker.engine.kubernetes.api.errors import KubeError, KubeUnavailable
from stoker.engine.kubernetes.api.kinds import Kind
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from stoker.errors import EngineError, EngineUnavailable, TooLarge
from support.kubernetes.kubeapi import Api, kubeconfig, status, talking
from support.waiting import wait_async


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config"


def test_objects_are_created_read_changed_and_deleted(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            made = await kube.create(kinds.PODS, {"metadata": {"name": "a"}, "spec": {"x": 1}})
            assert (made["metadata"]["namespace"], made["spec"]) == ("default", {"x": 1})
            with pytest.raises(KubeError) as taken:
                await kube.create(kinds.PODS, {"metadata": {"name": "a"}})
            assert taken.value.exists and not taken.value.conflict
            assert (await kube.get(kinds.PODS, "a"))["spec"] == {"x": 1}
            await kube.patch(kinds.PODS, "a", {"spec": {"x": 2}})
            assert [pod["spec"]["x"] for pod in (await kube.snapshot(kinds.PODS))[0]] == [2]
            assert not await kube.delete(kinds.PODS, "a", uid="another")
            assert await kube.delete(kinds.PODS, "a", grace=0)
            assert not await kube.delete(kinds.PODS, "a")
            with pytest.raises(KubeError, match="not found") as absent:
                await kube.get(kinds.PODS, "a")
            assert absent.value.absent and absent.value.reason == "NotFound"
            assert isinstance(absent.value, EngineError) and not isinstance(absent.value, EngineUnavailable)
            assert {seen.headers["User-Agent"] for seen in api.seen} == {f"stoker/{__version__}"}

    asyncio.run(story())


def test_calls_are_counted_by_verb_and_kind_and_share_connections(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.page = 2
            for number in range(5):
                await kube.create(kinds.PODS, {"metadata": {"name": f"p{number}"}})
            assert len((await kube.snapshot(kinds.PODS))[0]) == 5
            await kube.get(kinds.PODS, "p0")
            await kube.request("POST", "/api/v1/namespaces/default/pods/https:p0:1/proxy/v1/sync", body=b"x")
            assert await kube.version() == "v1.37.0"
            assert dict(kube.calls) == {
                ("create", "pods"): 5,
                ("list", "pods"): 3,
                ("get", "pods"): 1,
                ("proxy", "pods"): 1,
                ("get", "version"): 1,
            }
            assert sum(kube.calls.values()) == len(api.seen)
            assert api.connections == 1

    asyncio.run(story())


def test_a_list_with_an_expired_page_token_begins_again(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.page = 2
            for number in range(5):
                api.put("pods", f"p{number}")

            def compact(request: web.Request) -> None:
                if "continue" in request.query:
                    api.compact()

            api.scripts.append(compact)
            found, version = await kube.snapshot(kinds.PODS)
            assert [pod["metadata"]["name"] for pod in found] == [f"p{number}" for number in range(5)]
            assert int(version) >= api.compacted
            assert {(pod["apiVersion"], pod["kind"]) for pod in found} == {("v1", "Pod")}

    asyncio.run(story())


def test_paths_of_kinds() -> None:
    assert kinds.PODS.path("ns", "a", "log") == "/api/v1/namespaces/ns/pods/a/log"
    assert kinds.PODS.path() == "/api/v1/pods"
    assert kinds.NODES.path("ns", "n") == "/api/v1/nodes/n"
    assert Kind("batch/v1", "Job", "jobs").path("ns") == "/apis/batch/v1/namespaces/ns/jobs"
    assert Kind("a.b/v1", "C", "cs").path("x/../y", "../z") == "/apis/a.b/v1/namespaces/x%2F..%2Fy/cs/..%2Fz"


@pytest.mark.parametrize(
    ("method", "path", "counted"),
    [
        ("GET", "/api/v1/namespaces/a/pods/b/proxy/c/d", ("proxy", "pods")),
        ("GET", "/api/v1/namespaces/a", ("get", "namespaces")),
        ("PUT", "/api/v1/nodes/n/status", ("status", "nodes")),
        ("GET", "/apis/batch/v1/namespaces/a/jobs/b?x=/y/z/", ("get", "jobs")),
        ("GET", "/healthz", ("get", "healthz")),
    ],
)
def test_what_raw_requests_count_as(method: str, path: str, counted: tuple[str, str]) -> None:
    assert kinds.counted(method, path) == counted


def answers(*statuses: int, **headers: str) -> list[Any]:
    return [
        lambda _request, code=code: status(code, "Trouble", f"trouble {code}", **headers) for code in statuses
    ]


def test_reads_are_retried_while_the_server_has_errors(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.put("pods", "a")
            api.scripts += answers(503, 500)
            await kube.get(kinds.PODS, "a")
            assert len(api.seen) == 3
            api.seen.clear()
            api.scripts += answers(*[503] * 20)
            with pytest.raises(KubeUnavailable, match="answered 503: trouble 503") as failed:
                await kube.get(kinds.PODS, "a")
            assert failed.value.status == 503
            assert 2 <= len(api.seen) <= 6

    asyncio.run(story())


def test_a_write_is_sent_again_only_when_the_server_asks_for_it(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.scripts += answers(500)
            with pytest.raises(KubeUnavailable):
                await kube.create(kinds.PODS, {"metadata": {"name": "a"}})
            assert len(api.seen) == 1
            api.scripts += answers(429, 503, **{"Retry-After": "0"})
            await kube.create(kinds.PODS, {"metadata": {"name": "a"}})
            assert len(api.seen) == 4
            api.scripts += answers(429, **{"Retry-After": "3600"})
            with pytest.raises(KubeUnavailable, match="429"):
                await kube.create(kinds.PODS, {"metadata": {"name": "b"}})
            assert len(api.seen) == 5

    asyncio.run(story())


def test_a_write_whose_connection_breaks_is_not_sent_again(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            await kube.version()

            def cut(request: web.Request) -> web.Response:
                request.transport.abort()
                return web.Response()

            api.seen.clear()
            api.scripts.append(cut)
            with pytest.raises(KubeUnavailable, match="was lost"):
                await kube.create(kinds.PODS, {"metadata": {"name": "a"}})
            assert len(api.seen) == 1
            api.scripts.append(cut)
            assert (await kube.snapshot(kinds.PODS))[0] == []

    asyncio.run(story())


def test_redirects_are_not_followed(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.scripts.append(lambda _: web.Response(status=302, headers={"Location": "/version"}))
            answer = await kube.request("GET", "/x")
            assert (answer.status, answer.headers["location"], len(api.seen)) == (302, "/version", 1)

    asyncio.run(story())


def test_no_answer_is_unavailable_after_the_timeout_and_cancelling_is_prompt(
    path: Path, ca: trustme.CA
) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.silent = True
            with pytest.raises(KubeUnavailable, match=r"no answer from https://.* within 0\.2 s"):
                await kube.get(kinds.PODS, "a", timeout=0.2)
            with pytest.raises(KubeUnavailable, match=r"within 0\.2 s"):
                await kube.request("GET", "/x", timeout=0.2)
            waiting = asyncio.create_task(kube.get(kinds.PODS, "a", timeout=3600))
            await wait_async(lambda: len(api.seen) >= 3)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(story())


def test_no_server_is_unavailable_with_its_address(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            await api.stop()
            with pytest.raises(KubeUnavailable, match=f"no connection to {api.url}") as failed:
                await kube.get(kinds.PODS, "a")
            assert failed.value.hint and "VPN" in failed.value.hint

    asyncio.run(story())


def test_an_answer_without_json_is_unavailable(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.scripts.append(lambda _: web.Response(text='{"items": [{"metadata": {"na'))
            with pytest.raises(KubeUnavailable, match="not JSON"):
                (await kube.snapshot(kinds.PODS))[0]
            api.scripts.append(lambda _: web.Response(status=502, text="<html>Bad\nGateway"))
            with pytest.raises(KubeUnavailable, match="502: <html>Bad Gateway"):
                await kube.create(kinds.PODS, {"metadata": {"name": "a"}})

    asyncio.run(story())


def test_bodies_go_through_unchanged_up_to_a_limit(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (_api, kube):
            body = bytes(range(256)) * 32768
            proxy = "/api/v1/namespaces/default/pods/https:a:1/proxy/v1/blob"
            answer = await kube.request("POST", proxy, body=body, headers={"X": "y"})
            assert (answer.body == body, answer.headers["echo"]) == (True, "POST")
            with pytest.raises(TooLarge):
                await kube.request("POST", proxy, body=body, max_bytes=1 << 20)

    asyncio.run(story())


def test_requests_under_way_are_limited_but_not_those_that_last(
    path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CONCURRENCY", 3)

    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.silent = True
            short = [asyncio.create_task(kube.get(kinds.PODS, "a")) for _ in range(10)]
            long = [asyncio.create_task(kube.request("GET", "/x")) for _ in range(10)]
            await wait_async(lambda: len(api.seen) == 13)
            await asyncio.sleep(0.2)
            assert len(api.seen) == 13
            for task in short + long:
                task.cancel()
            await asyncio.gather(*short, *long, return_exceptions=True)

    asyncio.run(story())


def test_watching(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.put("pods", "a", metadata={"labels": {"x": "1"}})
            begin = str(api.version)
            api.put("pods", "b", metadata={"labels": {"x": "2"}})
            api.put("pods", "a", metadata={"labels": {"x": "1"}}, spec={"blob": "y" * 300_000})
            api.remove("pods", "a")
            found = []
            async for name, obj in kube.watch(kinds.PODS, resource_version=begin, labels="x=1", timeout=1):
                found.append((name, obj["metadata"]["name"]))
            assert found == [("MODIFIED", "a"), ("DELETED", "a")]

    asyncio.run(story())


def test_a_watch_of_compacted_history_has_expired_at_once_or_later(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            begin = str(api.version)
            api.compact()
            with pytest.raises(KubeError) as at_once:
                await anext(kube.watch(kinds.PODS, resource_version=begin))
            watch = kube.watch(kinds.PODS, resource_version=str(api.version))
            api.put("pods", "a")
            await anext(watch)
            api.compact()
            api.put("nodes", "n", "")
            with pytest.raises(KubeError) as later:
                await anext(watch)
            assert at_once.value.expired and later.value.expired

    asyncio.run(story())


def test_a_silent_watch_and_a_broken_event_are_unavailable(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            api.deaf = True
            with pytest.raises(KubeUnavailable, match="sends nothing"):
                await anext(kube.watch(kinds.PODS, timeout=0.4))
            api.scripts.append(lambda _: web.Response(text='{"type": "ADDED", "object": {"meta'))
            with pytest.raises(KubeUnavailable, match="only a part"):
                await anext(kube.watch(kinds.PODS))

    asyncio.run(story())


def test_a_closed_or_cancelled_watch_leaves_nothing(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            watch = kube.watch(kinds.PODS, resource_version=str(api.version))
            api.put("pods", "a")
            await anext(watch)
            assert api.watching == 1
            await watch.aclose()
            await wait_async(lambda: api.watching == 0)
            watch = kube.watch(kinds.PODS, resource_version=str(api.version))
            waiting = asyncio.ensure_future(anext(watch))
            await wait_async(lambda: api.watching == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await wait_async(lambda: api.watching == 0)

    asyncio.run(story())


class Relay:
    """A relay between client and server, which stops with all connections open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._moving = asyncio.Event()
        self._moving.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def freeze(self) -> None:
        self._moving.clear()

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._tasks |= {
            asyncio.create_task(self._pump(reader, back)),
            asyncio.create_task(self._pump(there, writer)),
        }

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._moving.wait()
                writer.write(data)
            await self._moving.wait()


def test_connections_to_a_dead_server_are_gone_after_closing(path: Path, ca: trustme.CA) -> None:
    def left() -> int:
        return len(
            [
                each
                for each in psutil.Process().net_connections()
                if each.raddr and each.raddr.port == relay.port
            ]
        )

    relay: Any = None

    async def story() -> None:
        nonlocal relay
        api = Api(ca)
        await api.start()
        relay = Relay(api.port)
        await relay.start()
        kube = Kube.from_config(KubeConfig.load(kubeconfig(path, f"https://127.0.0.1:{relay.port}", ca)))
        watch = kube.watch(kinds.PODS, resource_version=str(api.version), timeout=1)
        api.put("pods", "a")
        await anext(watch)
        await asyncio.gather(*(kube.version() for _ in range(3)))
        relay.freeze()
        with pytest.raises(KubeUnavailable):
            await kube.get(kinds.PODS, "a", timeout=0.3)
        with pytest.raises(KubeUnavailable, match="sends nothing"):
            await anext(watch)
        lasting = asyncio.create_task(kube.request("GET", "/version", timeout=3600))
        await asyncio.sleep(0.1)
        lasting.cancel()
        await asyncio.gather(lasting, return_exceptions=True)
        await kube.close()
        assert left() == 0
        await relay.stop()
        await api.stop()

    asyncio.run(story())


def test_logs_come_in_pieces_and_are_followed(path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            whole = b"".join([piece async for piece in kube.logs("default", "a", "main", tail=3)])
            assert whole == b"line 0\nline 1\nline 2\n"
            assert api.seen[-1].query == {"container": "main", "tailLines": "3"}
            got = b""
            with pytest.raises(KubeUnavailable, match="sends nothing"):
                async for piece in kube.logs("default", "a", "main", follow=True, idle=0.3):
                    got += piece
            assert got == whole

    asyncio.run(story())


def test_an_odd_event_stream(path: Path, ca: trustme.CA) -> None:
    """Lines are cut anywhere, and several arrive in one piece."""

    async def story() -> None:
        async with talking(path, Api(ca)) as (api, kube):
            lines = b"".join(
                b'{"type":"ADDED","object":{"metadata":{"name":"p%d","resourceVersion":"1"}}}\n' % number
                for number in range(50)
            )

            class Cut(web.StreamResponse):
                async def prepare(self, request: web.BaseRequest) -> Any:
                    writer = await super().prepare(request)
                    for start in range(0, len(lines), 7):
                        await self.write(lines[start : start + 7])
                    return writer

            api.scripts.append(lambda _: Cut())
            names = [obj["metadata"]["name"] async for _, obj in kube.watch(kinds.PODS)]
            assert names == [f"p{number}" for number in range(50)]

    asyncio.run(story())
