"""A small API server over real HTTPS: versioned objects, pages, watches, compaction, faults.

It runs in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme
import yaml
from aiohttp import web

from stoker.engine.kubernetes.api.client import Kube
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig

Object = dict[str, Any]
Script = Callable[[web.Request], web.StreamResponse | None]


@dataclass
class Seen:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    certificate: str
    """Common name of the client's certificate; "" without one."""
    sni: str
    connection: int


@dataclass
class Api:
    ca: trustme.CA
    host: str = "127.0.0.1"
    name: str = "localhost"
    """The name in its certificate, beside the address."""
    tokens: set[str] | None = None
    """Accepted tokens; None: no token is required."""
    certificates: set[str] | None = None
    """Accepted common names; None: no certificate is requested."""
    page: int | None = None
    """The maximal size of a page, below the requested one."""

    seen: list[Seen] = field(default_factory=list)
    scripts: list[Script] = field(default_factory=list)
    """Each may answer one request instead of the server; the first that answers is used up."""
    deaf: bool = False
    """Watches are accepted, but no event is ever sent."""
    silent: bool = False
    """Requests are read and never answered."""
    port: int = 0

    def __post_init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.history: list[tuple[int, str, str, Object]] = []
        self.version = 100
        self.compacted = 0
        self.watching = 0
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._sni = ""

    # -- starting and stopping

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        if not self.port:
            with socket.socket() as probe:
                probe.bind((self.host, 0))
                self.port = probe.getsockname()[1]
        await web.TCPSite(
            self._runner, self.host, self.port, ssl_context=self._context(), reuse_address=True
        ).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ca.issue_cert(self.host, self.name).configure_cert(context)
        context.sni_callback = self._note_sni
        if self.certificates is not None:
            self.ca.configure_trust(context)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _note_sni(self, _socket: Any, name: str | None, _context: Any) -> None:
        self._sni = name or ""

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """The number of connections that sent requests."""
        return len({seen.connection for seen in self.seen})

    # -- objects

    def put(self, plural: str, name: str, namespace: str = "default", **content: Any) -> Object:
        """Create or change an object; watches receive the event."""
        key = (plural, namespace, name)
        old = self.objects.get(key)
        self.version += 1
        metadata = {
            "name": name,
            **({"namespace": namespace} if namespace else {}),
            "uid": old["metadata"]["uid"] if old else f"uid-{self.version}",
            "resourceVersion": str(self.version),
            "managedFields": [{"manager": "kubectl", "fieldsV1": {}}],
            **content.pop("metadata", {}),
        }
        obj = self.objects[key] = {"metadata": metadata, **content}
        self._record(plural, "MODIFIED" if old else "ADDED", obj)
        return obj

    def remove(self, plural: str, name: str, namespace: str = "default") -> None:
        obj = copy.deepcopy(self.objects.pop((plural, namespace, name)))
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self._record(plural, "DELETED", obj)

    def compact(self) -> None:
        """Forget the history, as etcd does."""
        self.version += 1
        self.compacted = self.version
        self.history.clear()

    def _record(self, plural: str, event: str, obj: Object) -> None:
        self.history.append((self.version, plural, event, copy.deepcopy(obj)))
        self._changed.set()
        self._changed = asyncio.Event()

    # -- requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        transport = request.transport
        assert transport is not None
        peer = transport.get_extra_info("peercert") or {}
        names = [value for part in peer.get("subject", ()) for key, value in part if key == "commonName"]
        self.seen.append(
            Seen(
                request.method,
                request.path,
                dict(request.query),
                request.headers.copy(),
                body,
                names[0] if names else "",
                self._sni,
                id(transport),
            )
        )
        if self.silent:
            await asyncio.sleep(3600)
        for script in self.scripts:
            answer = script(request)
            if answer is not None:
                self.scripts.remove(script)
                return answer
        if not self._allowed(request, names):
            return status(401, "Unauthorized", "Unauthorized")
        return await self._serve(request, body)

    def _allowed(self, request: web.Request, names: list[str]) -> bool:
        if self.tokens is None and self.certificates is None:
            return True
        scheme, _, value = request.headers.get("Authorization", "").partition(" ")
        if self.tokens is not None and scheme == "Bearer" and value in self.tokens:
            return True
        if self.tokens is not None and scheme == "Basic" and base64.b64decode(value).decode() in self.tokens:
            return True
        return self.certificates is not None and any(name in self.certificates for name in names)

    async def _serve(self, request: web.Request, body: bytes) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if parts == ["version"]:
            return web.json_response({"gitVersion": "v1.37.0"})
        if "proxy" in parts:
            return web.Response(body=body, headers={"Echo": request.method})
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        plural, name = parts[0], parts[1] if len(parts) > 1 else ""
        if parts[2:] == ["log"]:
            return await self._log(request)
        if parts[2:] == ["exec"]:
            return await run(request)
        if parts[2:] == ["portforward"]:
            return await forward(request)
        if request.method == "GET" and not name:
            if request.query.get("watch") == "true":
                return await self._watch(request, plural, namespace)
            return self._list(request, plural, namespace)
        return self._object(request, plural, namespace, name, json.loads(body) if body else {})

    def _object(
        self, request: web.Request, plural: str, namespace: str, name: str, sent: Any
    ) -> web.StreamResponse:
        if request.method == "POST":
            name = sent["metadata"]["name"]
            if (plural, namespace, name) in self.objects:
                return status(409, "AlreadyExists", f'{plural} "{name}" already exists')
            rest = {key: value for key, value in sent.items() if key != "metadata"}
            labels = {"labels": sent["metadata"]["labels"]} if "labels" in sent["metadata"] else {}
            return web.json_response(self.put(plural, name, namespace, metadata=labels, **rest), status=201)
        obj = self.objects.get((plural, namespace, name))
        if obj is None:
            return status(404, "NotFound", f'{plural} "{name}" not found')
        if request.method == "GET":
            return web.json_response(obj)
        if request.method == "DELETE":
            wanted = (sent.get("preconditions") or {}).get("uid")
            if wanted and wanted != obj["metadata"]["uid"]:
                return status(409, "Conflict", "the UID in the precondition does not match")
            self.remove(plural, name, namespace)
            return web.json_response(obj)
        if request.method == "PUT":
            if sent["metadata"].get("resourceVersion", "") not in ("", obj["metadata"]["resourceVersion"]):
                return status(409, "Conflict", "the object has been modified")
            rest = {key: value for key, value in sent.items() if key != "metadata"}
            return web.json_response(self.put(plural, name, namespace, **rest))
        rest = {key: value for key, value in obj.items() if key != "metadata"}
        return web.json_response(self.put(plural, name, namespace, **{**rest, **sent}))

    def _list(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        found = [
            obj
            for (kind, where, _), obj in sorted(self.objects.items())
            if kind == plural and (not namespace or where == namespace) and _matches(request, obj)
        ]
        start, version = 0, self.version
        if token := request.query.get("continue"):
            start, version = (int(part) for part in token.split("."))
            if version < self.compacted:
                return status(410, "Expired", "The provided continue parameter is too old")
        limit = int(request.query.get("limit", 0)) or len(found) or 1
        if self.page is not None and "limit" in request.query:
            limit = min(limit, self.page)
        more = f"{start + limit}.{version}" if start + limit < len(found) else ""
        return web.json_response(
            {
                "kind": "List",
                "metadata": {"resourceVersion": str(version), "continue": more},
                "items": found[start : start + limit],
            }
        )

    async def _watch(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        at = int(request.query.get("resourceVersion", self.version))
        if at < self.compacted:
            return status(410, "Expired", f"too old resource version: {at}")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.watching += 1
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(
                    None if self.deaf else float(request.query.get("timeoutSeconds", 60))
                ):
                    async for event, obj in self._events(at, plural, namespace, request):
                        await send(response, event, obj)
            return response
        finally:
            self.watching -= 1

    async def _events(
        self, at: int, plural: str, namespace: str, request: web.Request
    ) -> AsyncIterator[tuple[str, Object]]:
        while True:
            changed = self._changed
            for version, kind, event, obj in list(self.history):
                if (
                    version > at
                    and kind == plural
                    and (not namespace or obj["metadata"].get("namespace") == namespace)
                    and _matches(request, obj)
                    and not self.deaf
                ):
                    at = version
                    yield event, obj
            if self.compacted > at:
                yield "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                return
            await changed.wait()

    async def _log(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(3):
            await response.write(f"line {number}\n".encode())
        if request.query.get("follow") == "true":
            await asyncio.sleep(3600)
        return response


async def run(request: web.Request) -> web.StreamResponse:
    """Run a real process, as a kubelet would in a container."""
    ws = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"))
    await ws.prepare(request)
    stdin = b""
    if request.query.get("stdin") == "true":
        async for message in ws:
            if message.data[:1] == b"\xff":
                break
            stdin += message.data[1:]
    argv = request.query.getall("command")
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as exc:
        await _end(ws, {"status": "Failure", "code": 500, "message": f"cannot start: {exc}"})
        return ws
    try:
        out, err = await process.communicate(stdin or None)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    for channel, data in ((b"\x01", out), (b"\x02", err)):
        for start in range(0, len(data), 1 << 15):
            await ws.send_bytes(channel + data[start : start + (1 << 15)])
    if process.returncode:
        cause = {"reason": "ExitCode", "message": str(process.returncode)}
        failure = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
        await _end(ws, failure)
    else:
        await _end(ws, {"status": "Success"})
    return ws


async def _end(ws: web.WebSocketResponse, status: Object) -> None:
    await ws.send_bytes(b"\x03" + json.dumps({"kind": "Status", **status}).encode())
    await ws.close()


async def forward(request: web.Request) -> web.StreamResponse:
    """Forward to a port of this machine."""
    ws = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await ws.prepare(request)
    port = int(request.query["ports"])
    for channel in (b"\x00", b"\x01"):
        await ws.send_bytes(channel + port.to_bytes(2, "little"))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as exc:
        await ws.send_bytes(b"\x01" + f"cannot connect: {exc}".encode())
        await ws.close()
        return ws

    async def back() -> None:
        while data := await reader.read(1 << 15):
            await ws.send_bytes(b"\x00" + data)
        await ws.close()

    task = asyncio.create_task(back())
    try:
        async for message in ws:
            writer.write(message.data[1:])
            await writer.drain()
    finally:
        writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return ws


async def send(response: web.StreamResponse, event: str, obj: Object) -> None:
    await response.write(json.dumps({"type": event, "object": obj}).encode() + b"\n")


def status(code: int, reason: str, message: str, **headers: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message},
        status=code,
        headers=headers,
    )


def _matches(request: web.Request, obj: Object) -> bool:
    selector = request.query.get("labelSelector", "")
    labels = obj["metadata"].get("labels") or {}
    return all(
        labels.get(key) == value
        for key, _, value in (part.partition("=") for part in selector.split(",") if part)
    )


def kubeconfig(
    path: Path, server: str, ca: trustme.CA | None, user: Mapping[str, Any] | None = None, **cluster: Any
) -> Path:
    """A file with one cluster, user and context, all named `test`."""
    if ca is not None:
        cluster["certificate-authority-data"] = base64.b64encode(ca.cert_pem.bytes()).decode()
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "test", "user": dict(user or {})}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


@contextlib.asynccontextmanager
async def talking(
    path: Path, api: Api, user: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Api, Kube]]:
    """The API runs, and a client of it that has this user; `cluster` adds to the kubeconfig's cluster."""
    cluster = options.pop("cluster", {})
    await api.start()
    kube = Kube.from_config(KubeConfig.load(kubeconfig(path, api.url, api.ca, user, **cluster)), **options)
    try:
        yield api, kube
    finally:
        await kube.close()
        await api.stop()
