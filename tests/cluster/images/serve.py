"""A real registry (Debian's docker-registry) on a free loopback port, for the duration of a test."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe import debian

from stoker.images.build import cache_home

HERE = Path(__file__).parent


class LocalRegistry:
    """Entering starts it, leaving ends and removes it. `host` is its HOST:PORT."""

    def __init__(
        self,
        folder: Path,
        *,
        auth: Mapping[str, Any] | None = None,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self._folder = folder
        self._auth = auth
        self._certificate = certificate
        self._process: subprocess.Popen[bytes] | None = None
        self.host = ""

    def __enter__(self) -> LocalRegistry:
        self._folder.mkdir(parents=True, exist_ok=True)
        for _ in range(5):  # another process may take a free port before the registry does
            if self._start():
                return self
        raise RuntimeError(f"docker-registry does not start: {(self._folder / 'log').read_text()[-2000:]}")

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> bool:
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        self.host = f"127.0.0.1:{port}"
        config = self._folder / "config.yml"
        config.write_text(json.dumps(self._config(port)))  # JSON is YAML
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen([binary(), "serve", config], stdout=log, stderr=log)
        end = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < end:
            if self._answers(port):
                return True
            time.sleep(0.05)
        self._process.kill()
        self._process.wait()
        return False

    def _config(self, port: int) -> dict[str, Any]:
        http_section: dict[str, Any] = {"addr": f"127.0.0.1:{port}", "secret": "for tests"}
        if self._certificate:
            http_section["tls"] = {"certificate": str(self._certificate[0]), "key": str(self._certificate[1])}
        config: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {
                "filesystem": {"rootdirectory": str(self._folder / "data")},
                "delete": {"enabled": True},
            },
            "http": http_section,
        }
        return {**config, "auth": dict(self._auth)} if self._auth else config

    def _answers(self, port: int) -> bool:
        connection: http.client.HTTPConnection
        if self._certificate:
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/v2/")
                return connection.getresponse().status in (200, 401)
            except OSError:
                return False


def binary() -> Path:
    """docker-registry from Debian's package, kept in the cache."""
    (package,) = debian.read_lock(HERE / "packages.amd64.lock")["registry"]
    path = cache_home() / "tools" / package.sha256[:16] / "docker-registry"
    if not path.exists():
        entry = debian.unpack([package]).get("usr/bin/docker-registry")
        assert entry is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"new.{hashlib.sha256(str(time.monotonic_ns()).encode()).hexdigest()[:8]}")
        temporary.write_bytes(entry.read())
        temporary.chmod(0o755)
        temporary.rename(path)
    return path
