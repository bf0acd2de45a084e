"""Credential plugins: programs that print a token or a client certificate (client.authentication.k8s.io)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from stoker.engine.kubernetes.api.credentials import Identity
from stoker.engine.kubernetes.api.errors import KubeUnavailable
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig, Plugin

log = logging.getLogger(__name__)

TIMEOUT: Final = 60.0
"""Seconds that a plugin may take: some call a slow identity provider."""
MARGIN: Final = 60.0
"""Seconds before their expiry that credentials are renewed; a fifth of their lifetime if that is shorter."""
PAUSE: Final = 5.0
"""Seconds after a failure during which the plugin is not run again."""
_MAX_OUTPUT: Final = 1 << 20


@dataclass(frozen=True)
class _Credential:
    identity: Identity
    renew_at: float | None
    """By the wall clock, as the plugin's own timestamp is; None: valid until refused."""
    expires: float | None


class PluginLogin:
    """Runs the plugin when there are no credentials, when they expire soon, and when they were refused.

    The plugin never runs twice at a time: callers that come while it runs wait for the same run. A caller that is
    cancelled does not end it for the others.
    """

    def __init__(self, config: KubeConfig, plugin: Plugin, *, timeout: float = TIMEOUT) -> None:
        self._config = config
        self._plugin = plugin
        self._timeout = timeout
        self._credential: _Credential | None = None
        self._running: asyncio.Task[_Credential] | None = None
        self._failure: KubeUnavailable | None = None
        self._failed_at = 0.0
        self.hint = f"Log in again so that `{plugin.command}` prints credentials that are accepted."

    async def identity(self) -> Identity:
        held = self._credential
        now = time.time()
        if held is not None and (held.renew_at is None or now < held.renew_at):
            return held.identity
        try:
            return (await self._run()).identity
        except KubeUnavailable as exc:
            if held is None or held.expires is None or now >= held.expires:
                raise
            log.warning("credentials could not be renewed before they expire: %s", exc.message)
            return held.identity

    async def renew(self, refused: Identity) -> bool:
        if self._credential is None or self._credential.identity == refused:
            self._credential = None
            return (await self._run()).identity != refused
        return True

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, KubeUnavailable):
                await self._running

    async def _run(self) -> _Credential:
        if self._failure is not None and time.monotonic() < self._failed_at + PAUSE:
            raise KubeUnavailable(self._failure.message, hint=self._failure.hint)
        if self._running is None:
            self._running = asyncio.create_task(self._ask())
            self._running.add_done_callback(self._ran)
        running = self._running
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if running.cancelled() and caller is not None and not caller.cancelling():
                raise KubeUnavailable(f"the client of {self._config.server} was closed") from None
            raise

    def _ran(self, task: asyncio.Task[_Credential]) -> None:
        self._running = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._credential, self._failure = task.result(), None
        elif isinstance(error, KubeUnavailable):
            self._failure, self._failed_at = error, time.monotonic()

    async def _ask(self) -> _Credential:
        plugin = self._plugin
        try:
            process = await asyncio.create_subprocess_exec(
                plugin.command,
                *plugin.args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as exc:
            raise self._failed(exc.strerror or str(exc)) from exc
        try:
            async with asyncio.timeout(self._timeout):
                out, err = await process.communicate()
        except TimeoutError:
            raise self._failed(f"did not end within {self._timeout:g} s") from None
        finally:
            await _end(process)
        if process.returncode != 0:
            raise self._failed(f"ended with {process.returncode}{_words(err)}")
        try:
            return self._credential_from(out)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            # Without the exception's own text: it may quote the credentials.
            raise self._failed(
                f"printed no valid ExecCredential ({type(exc).__name__}){_words(err)}"
            ) from None

    def _environment(self) -> dict[str, str]:
        spec: dict[str, Any] = {"interactive": False}
        if self._plugin.cluster_info:
            spec["cluster"] = _cluster(self._config)
        info = {"kind": "ExecCredential", "apiVersion": self._plugin.api, "spec": spec}
        return {**os.environ, **dict(self._plugin.env), "KUBERNETES_EXEC_INFO": json.dumps(info)}

    def _credential_from(self, out: bytes) -> _Credential:
        if len(out) > _MAX_OUTPUT:
            raise self._failed(f"printed {len(out)} bytes")
        answer = json.loads(out)
        if answer["kind"] != "ExecCredential" or answer["apiVersion"] != self._plugin.api:
            raise self._failed(f"printed no ExecCredential of {self._plugin.api}")
        return _credential(answer["status"], self._config)

    def _failed(self, problem: str) -> KubeUnavailable:
        return KubeUnavailable(
            f"credential plugin `{self._plugin.command}`: {problem}",
            hint=self._plugin.install_hint or "Run it by hand to see what it needs, or log in again.",
        )


def _credential(status: Mapping[str, Any], config: KubeConfig) -> _Credential:
    token = status.get("token") or ""
    cert, key = status.get("clientCertificateData") or "", status.get("clientKeyData") or ""
    if bool(cert) != bool(key) or not (token or cert):
        raise ValueError("incomplete")
    headers = list(config.user.headers)
    if token:
        headers.append(("Authorization", f"Bearer {token}"))
    identity = Identity(tuple(headers), cert.encode(), key.encode())
    stamp = status.get("expirationTimestamp")
    if not stamp:
        return _Credential(identity, None, None)
    now, expires = time.time(), datetime.fromisoformat(stamp).timestamp()
    return _Credential(identity, expires - min(MARGIN, max(0.0, expires - now) / 5), expires)


def _cluster(config: KubeConfig) -> dict[str, Any]:
    """The cluster information for a plugin with provideClusterInfo."""
    ca = config.ca or (config.ca_file.read_bytes() if config.ca_file is not None else b"")
    found = {
        "server": config.server,
        "tls-server-name": config.tls_server_name,
        "insecure-skip-tls-verify": config.insecure,
        "certificate-authority-data": base64.b64encode(ca).decode(),
        "proxy-url": config.proxy_url,
        "config": config.plugin_config,
    }
    return {key: value for key, value in found.items() if value}


def _words(stderr: bytes) -> str:
    """The end of its stderr, on one line."""
    text = " ".join(stderr.decode("utf-8", "replace").split())
    return f": {text[-500:]}" if text else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill it and everything it started, if it still runs."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
