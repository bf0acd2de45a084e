"""Faulty registries: small HTTP servers whose every answer is set by the test."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stoker.images import Logins

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Reply:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Iterator[bytes] = b""


class Fake:
    """`routes` maps `METHOD /path` (without the query) to a Reply, or to a function of what was Seen."""

    def __init__(self, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.routes: dict[str, Reply | Callable[[Seen], Reply]] = {}
        self.seen: list[Seen] = []
        self.connections = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                fake.connections += 1
                super().setup()

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                fake.seen.append(seen)
                found = fake.routes.get(f"{self.command} {self.path.partition('?')[0]}", Reply(404))
                self._send(found(seen) if callable(found) else found)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _any

            def _send(self, reply: Reply) -> None:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    for one in value if isinstance(value, list) else [value]:
                        self.send_header(name, one)
                if isinstance(reply.body, bytes):
                    self.send_header("Content-Length", str(len(reply.body)))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(reply.body)
                    return
                self.send_header("Connection", "close")
                self.end_headers()
                try:
                    for piece in reply.body:
                        self.wfile.write(piece)
                except OSError:
                    pass  # the client closed the connection
                self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass  # the tests' clients close connections early

        self._server = Server((address, 0), Handler)
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.host = f"{address}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def paths(self) -> list[str]:
        return [f"{one.method} {one.path}" for one in self.seen]

    def serve_image(self, path: str = "team/app", tag: str = "1", **config: Any) -> dict[str, Any]:
        """Serve a small image: its manifest by tag and digest, and its config. Returns the manifest."""
        document = json.dumps(
            {"architecture": "amd64", "os": "linux", "config": config, "rootfs": {"type": "layers"}}
        ).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": "x", "digest": digest(document), "size": len(document)},
            "layers": [],
        }
        data = json.dumps(manifest).encode()
        for version in (tag, digest(data)):
            self.routes[f"GET /v2/{path}/manifests/{version}"] = Reply(200, {"Content-Type": MANIFEST}, data)
        self.routes[f"GET /v2/{path}/blobs/{digest(document)}"] = Reply(200, {}, document)
        return {**manifest, "digest": digest(data)}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def logins(*hosts: str, pair: str = "bob:hunter2") -> Logins:
    entry = {"auth": base64.b64encode(pair.encode()).decode()}
    return Logins.parse(json.dumps({"auths": dict.fromkeys(hosts, entry)}), source="config.json")
