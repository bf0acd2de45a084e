"""Measures the ways into a pod, interleaved: `python reach.py KUBECONFIG IMAGE`, with an image that has Python.

Prints throughput of 8 MiB bodies, latency of small requests, what happens to headers and paths, and how long a poll
may last, through the API server's pod proxy, through port-forward with our own TLS, and straight to the pod's address.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import ssl
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import trustme

from stoker.engine.kubernetes.api import Kube, KubeConfig, kinds
from stoker.errors import StokerError

SIZE = 8 << 20
ROUNDS = 12
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def pod(kube: Kube, image: str, ca: trustme.CA) -> AsyncIterator[tuple[str, str]]:
    """(namespace, address) of a pod named `server`."""
    namespace = f"reach-{secrets.token_hex(3)}"
    await kube.create(kinds.NAMESPACES, {"metadata": {"name": namespace}})
    files = {
        "server.py": (Path(__file__).parent / "pod_server.py").read_bytes(),
        "tls.pem": ca.issue_cert("courier").private_key_and_cert_chain_pem.bytes(),
    }
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    await kube.create(kinds.SECRETS, {"metadata": {"name": "probe"}, "data": data}, namespace)
    main = {
        "name": "main",
        "image": image,
        "command": ["python3", "/probe/server.py"],
        "volumeMounts": [{"name": "probe", "mountPath": "/probe"}],
        "readinessProbe": {"tcpSocket": {"port": 7448}, "periodSeconds": 1},
    }
    spec = {
        "containers": [main],
        "volumes": [{"name": "probe", "secret": {"secretName": "probe"}}],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(StokerError):
                await kube.create(kinds.PODS, {"metadata": {"name": "server"}, "spec": spec}, namespace)
                break
            await asyncio.sleep(0.5)
        while True:
            status = (await kube.get(kinds.PODS, "server", namespace))["status"]
            if any(each.get("ready") for each in status.get("containerStatuses") or ()):
                break
            await asyncio.sleep(0.2)
    try:
        yield namespace, status["podIP"]
    finally:
        await kube.delete(kinds.NAMESPACES, namespace)


async def exchange(streams: Streams, method: str, path: str, body: bytes = b"") -> bytes:
    reader, writer = streams
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(
        next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")).split(b":")[
            1
        ]
    )
    return await reader.readexactly(length)


async def timed(what: Awaitable[bytes]) -> float:
    began = time.perf_counter()
    await what
    return time.perf_counter() - began


async def main() -> None:
    ca = trustme.CA()
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    kube = Kube.from_config(KubeConfig.load(sys.argv[1]))
    async with pod(kube, sys.argv[2], ca) as (namespace, address):
        proxied = f"/api/v1/namespaces/{namespace}/pods/https:server:7447/proxy"

        async def proxy(method: str, path: str, body: bytes | None = None) -> bytes:
            answer = await kube.request(method, proxied + path, body=body, timeout=300)
            assert answer.status == 200, answer
            return answer.body

        async def forward() -> Streams:
            return await kube.forward(namespace, "server", 7447, ssl=trust, server_hostname="courier")

        async def direct() -> Streams:
            return await asyncio.open_connection(
                address, 7447, ssl=trust, server_hostname="courier", limit=1 << 20
            )

        through, straight = await forward(), await direct()
        ways: dict[str, Callable[[str, str, bytes], Awaitable[bytes]]] = {
            "proxy": lambda method, path, body: proxy(method, path, body or None),
            "forward": lambda method, path, body: exchange(through, method, path, body),
            "direct": lambda method, path, body: exchange(straight, method, path, body),
        }
        body = secrets.token_bytes(SIZE)
        for label, method, path, sent, unit in (
            ("down 8 MiB", "GET", f"/bytes?count={SIZE}", b"", SIZE),
            ("up 8 MiB", "POST", "/sink", body, SIZE),
            ("small", "GET", "/", b"", 0),
        ):
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS if unit else 5 * ROUNDS):
                for way, call in ways.items():
                    times[way].append(await timed(call(method, path, sent)))
            for way, found in times.items():
                middle, best = statistics.median(found), min(found)
                shown = (
                    f"{unit / middle / 1e6:.0f} MB/s (best {unit / best / 1e6:.0f})"
                    if unit
                    else f"{middle * 1e3:.1f} ms (best {best * 1e3:.1f})"
                )
                print(f"{label:12} {way:8} {shown}", flush=True)
        for way, connect in (("forward", forward), ("direct", direct)):
            found = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                _, writer = await connect()
                found.append(time.perf_counter() - began)
                writer.close()
            print(f"{'connecting':12} {way:8} {statistics.median(found) * 1e3:.1f} ms", flush=True)
        await many(proxy)
        await shapes(kube, proxied)
        for seconds in (90, 200):
            try:
                took = await timed(proxy("GET", f"/wait?seconds={seconds}"))
                print(f"long poll of {seconds} s through the proxy: answered after {took:.1f} s", flush=True)
            except (StokerError, AssertionError) as exc:
                print(f"long poll of {seconds} s through the proxy: {exc}", flush=True)
        for streams in (through, straight):
            streams[1].close()
    await kube.close()


async def many(proxy: Callable[[str, str], Awaitable[bytes]]) -> None:
    """Long polls at once, each on a connection of its own."""
    began = time.perf_counter()
    await asyncio.gather(*(proxy("GET", "/wait?seconds=10") for _ in range(200)))
    print(
        f"200 long polls of 10 s at once through the proxy: {time.perf_counter() - began:.1f} s", flush=True
    )


async def shapes(kube: Kube, proxied: str) -> None:
    sent = {
        "Authorization": "Bearer mine",
        "Stoker-Session": "s",
        "Cookie": "c=d",
        "X-Forwarded-For": "1.2.3.4",
        "Content-Encoding": "zstd",
        "TE": "trailers",
        "Range": "bytes=0-9",
    }
    answer = await kube.request("GET", f"{proxied}/a%2Fb/../c//d?e=%2Ff", headers=sent)
    if answer.status != 200:
        print(f"path with dots: {answer.status} to {answer.headers.get('location')}")
    answer = await kube.request("GET", f"{proxied}/a%2Fb//c?e=%2Ff", headers=sent)
    if answer.status == 200:
        seen: dict[str, Any] = answer.json()
        arrived = {name.lower(): value for name, value in seen["headers"].items()}
        print(f"path seen: {seen['path']}; from {seen['from']}")
        print(f"dropped: {[name for name in sent if name.lower() not in arrived]}")
        print(
            f"changed: {[name for name in sent if name.lower() in arrived and arrived[name.lower()] != sent[name]]}"
        )
        print(f"added: {[name for name in arrived if name not in {key.lower() for key in sent}]}")
    else:
        print(f"path: {answer.status} to {answer.headers.get('location')}")
    answer = await kube.request("GET", f"{proxied}/redirect?to=/elsewhere")
    print(f"redirect to /elsewhere: {answer.status}, Location {answer.headers.get('location')}")
    answer = await kube.request("GET", f"{proxied.replace('https:', '')}/x")
    print(f"plain http to the TLS port: {answer.status} {answer.body[:120]!r}")


if __name__ == "__main__":
    asyncio.run(main())
