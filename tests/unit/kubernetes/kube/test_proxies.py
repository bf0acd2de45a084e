from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from stoker.engine.kubernetes.api.client import Kube
from stoker.engine.kubernetes.api.errors import KubeUnavailable
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from stoker.engine.kubernetes.api.proxies import excluded, proxy_for, shown
from stoker.errors import SpecError
from support.kubernetes.kubeapi import Api, kubeconfig


@pytest.mark.parametrize(
    ("host", "port", "no_proxy", "expected"),
    [
        ("api.corp", 443, "", False),
        ("api.corp", 443, "*", True),
        ("api.corp", 443, "corp", True),
        ("api.corp", 443, ".corp", True),
        ("corp", 443, ".corp", False),
        ("api.corp", 443, "x, API.corp:443", True),
        ("api.corp", 6443, "api.corp:443", False),
        ("myapi.corp", 443, "api.corp", False),
        ("10.1.2.3", 443, "10.0.0.0/8", True),
        ("11.1.2.3", 443, "10.0.0.0/8,nonsense/x", False),
        ("10.1.2.3", 443, "10.1.2.3:443", True),
        ("fd00::1", 443, "[fd00::1]:443", True),
        ("fd00::1", 443, "fd00::/8", True),
        ("10.1.2.3", 443, "2.3", False),
        ("localhost", 443, "", True),
        ("127.0.0.5", 443, "", True),
        ("::1", 443, "", True),
    ],
)
def test_hosts_without_the_proxy(host: str, port: int, no_proxy: str, expected: bool) -> None:
    assert excluded(host, port, no_proxy) is expected


def test_which_proxy() -> None:
    env = {"HTTPS_PROXY": "proxy:3128", "http_proxy": "http://plain", "no_proxy": "inner"}
    assert proxy_for("https://api", "", env) == "http://proxy:3128"
    assert proxy_for("http://api", "", env) == "http://plain"
    assert proxy_for("https://inner", "", env) == ""
    assert proxy_for("https://inner", "https://own", env) == "https://own"
    assert proxy_for("https://api", "", {}) == ""
    with pytest.raises(SpecError, match="socks5://host:1080 is of an unsupported kind"):
        proxy_for("https://api", "socks5://me:secret@host:1080", {})
    assert shown("http://me:secret@host:1") == "http://host:1"


class Proxy:
    """A proxy for CONNECT with a password. Every name leads to this machine."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.password = base64.b64encode(b"me:pw").decode()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.splitlines()[0])
        with contextlib.closing(writer):
            if f"Basic {self.password}" not in head:
                writer.write(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
                return
            port = head.split()[1].rpartition(":")[2]
            there, back = await asyncio.open_connection("127.0.0.1", int(port))
            writer.write(b"HTTP/1.1 200 ok\r\n\r\n")
            with contextlib.closing(back):
                await asyncio.wait(
                    [asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def proxied(ca: trustme.CA, *, tls: bool = False) -> AsyncIterator[tuple[Api, Proxy]]:
    api, proxy = Api(ca), Proxy()
    context = None
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        ca.issue_cert("127.0.0.1").configure_cert(context)
    await api.start()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=context)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield api, proxy
    finally:
        server.close()
        await server.wait_closed()
        await api.stop()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_requests_and_server_names_go_through_the_proxy(tmp_path: Path, ca: trustme.CA, scheme: str) -> None:
    async def story() -> None:
        async with proxied(ca, tls=scheme == "https") as (api, proxy):
            path = kubeconfig(
                tmp_path / "config",
                api.url,
                ca,
                **{"proxy-url": f"{scheme}://me:pw@127.0.0.1:{proxy.port}", "tls-server-name": "localhost"},
            )
            kube = Kube.from_config(KubeConfig.load(path))
            await kube.version()
            await kube.version()
            assert proxy.asked == [f"CONNECT 127.0.0.1:{api.port} HTTP/1.1"]
            assert api.seen[0].sni == "localhost"
            await kube.close()

    asyncio.run(story())


def test_a_proxy_that_refuses_or_is_away_is_named_without_its_password(
    tmp_path: Path, ca: trustme.CA
) -> None:
    async def story() -> None:
        async with proxied(ca) as (api, proxy):
            for port, problem in ((proxy.port, "it answered 407"), (1, "does not connect to")):
                where = f"http://me:hunter2@127.0.0.1:{port}"
                path = kubeconfig(tmp_path / "config", api.url, ca, **{"proxy-url": where})
                kube = Kube.from_config(KubeConfig.load(path))
                with pytest.raises(KubeUnavailable, match=problem) as failed:
                    await kube.request("GET", "/version")
                assert f"127.0.0.1:{port}" in failed.value.message
                assert "hunter2" not in failed.value.message
                await kube.close()

    asyncio.run(story())


def test_the_environment_is_followed(tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with proxied(ca) as (api, proxy):
            monkeypatch.setenv("HTTPS_PROXY", f"me:pw@127.0.0.1:{proxy.port}")
            # This name goes through the proxy; loopback never does.
            where = f"https://cluster.test:{api.port}"
            path = kubeconfig(tmp_path / "config", where, ca, **{"tls-server-name": "localhost"})
            kube = Kube.from_config(KubeConfig.load(path))
            await kube.version()
            assert proxy.asked == [f"CONNECT cluster.test:{api.port} HTTP/1.1"]
            await kube.close()
            kube = Kube.from_config(KubeConfig.load(kubeconfig(tmp_path / "config", api.url, ca)))
            await kube.version()
            assert len(proxy.asked) == 1
            await kube.close()

    asyncio.run(story())
