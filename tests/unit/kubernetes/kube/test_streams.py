"""Exec and port-forward."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme

from stoker.engine.kubernetes.api.errors import KubeError, KubeUnavailable
from stoker.errors import TooLarge
from support.kubernetes.kubeapi import Api, kubeconfig, status, talking
from support.waiting import wait_async

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Both event loops: the server uses uvloop."""
    if request.param == "asyncio":
        return asyncio.run
    uvloop = pytest.importorskip("uvloop")
    return uvloop.run  # type: ignore[no-any-return]


def test_a_command_runs_to_its_end(tmp_path: Path, ca: trustme.CA, run: Run) -> None:
    async def story() -> None:
        async with talking(tmp_path / "config", Api(ca, tokens={"t"}), {"token": "t"}) as (_, kube):
            ended = await kube.exec("ns", "pod", "main", ["sh", "-c", "echo out; echo err >&2; exit 7"])
            assert (ended.code, ended.stdout, ended.stderr) == (7, b"out\n", b"err\n")
            ended = await kube.exec("ns", "pod", "main", ["echo", "a b", "ü&c=d"])
            assert (ended.code, ended.stdout.decode()) == (0, "a b ü&c=d\n")
            body = bytes(range(256)) * 4096
            ended = await kube.exec("ns", "pod", "main", ["cat"], stdin=body)
            assert (ended.code, ended.stdout == body) == (0, True)
            with pytest.raises(KubeError, match="cannot start"):
                await kube.exec("ns", "pod", "main", ["no-such-program"])
            with pytest.raises(TooLarge):
                await kube.exec("ns", "pod", "main", ["head", "-c", "100000", "/dev/zero"], max_bytes=1000)
            with pytest.raises(KubeUnavailable, match=r"exec of 'sleep' did not end within 0\.3 s"):
                await kube.exec("ns", "pod", "main", ["sleep", "2"], timeout=0.3)

    run(story())


def test_a_refused_upgrade_has_a_reason_and_renews_credentials(
    tmp_path: Path, ca: trustme.CA, run: Run
) -> None:
    async def story() -> None:
        async with talking(tmp_path / "config", Api(ca, tokens={"t"}), {"token": "t"}) as (api, kube):
            api.scripts.append(lambda _: status(400, "BadRequest", "container x is not valid for pod"))
            with pytest.raises(KubeError, match="container x is not valid for pod") as refused:
                await kube.exec("ns", "pod", "x", ["true"])
            assert refused.value.status == 400
            api.tokens = {"u"}
            with pytest.raises(KubeUnavailable, match="does not accept the credentials"):
                await kube.forward("ns", "pod", 1)
            kubeconfig(tmp_path / "config", api.url, ca, {"token": "u"})
            assert (await kube.exec("ns", "pod", "main", ["true"])).code == 0

    run(story())


class Echo:
    def __init__(self) -> None:
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        await closed(writer)
        self.open -= 1


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.mark.parametrize("tls", [False, True])
def test_bytes_go_both_ways_with_and_without_tls(tmp_path: Path, ca: trustme.CA, tls: bool, run: Run) -> None:
    async def story() -> None:
        theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        ca.issue_cert("courier.test").configure_cert(theirs)
        ours = ssl.create_default_context()
        ca.configure_trust(ours)
        echo = Echo()
        server = await asyncio.start_server(echo.serve, "127.0.0.1", 0, ssl=theirs if tls else None)
        port = server.sockets[0].getsockname()[1]
        async with talking(tmp_path / "config", Api(ca, tokens={"t"}), {"token": "t"}) as (_, kube):
            reader, writer = await kube.forward(
                "ns", "pod", port, ssl=ours if tls else None, server_hostname="courier.test"
            )
            body = bytes(range(256)) * 8192
            writer.write(body)
            assert await reader.readexactly(len(body)) == body
            await closed(writer)
            await wait_async(lambda: not kube._forwards)
            if tls:
                with pytest.raises(KubeUnavailable, match="port-forward"):
                    await kube.forward("ns", "pod", port, ssl=ours, server_hostname="other.test")
                await wait_async(lambda: not kube._forwards)
            reader, writer = await kube.forward("ns", "pod", port)
            await kube.close()
            assert await reader.read() == b""
            await closed(writer)
        await wait_async(lambda: echo.open == 0)
        server.close()
        await server.wait_closed()

    run(story())


def test_a_closed_port_ends_at_once(tmp_path: Path, ca: trustme.CA, run: Run) -> None:
    async def story() -> None:
        async with talking(tmp_path / "config", Api(ca, tokens={"t"}), {"token": "t"}) as (_, kube):
            reader, writer = await kube.forward("ns", "pod", 1)
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            await closed(writer)
            await wait_async(lambda: not kube._forwards)

    run(story())
