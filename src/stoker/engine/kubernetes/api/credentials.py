"""The credentials of requests. They are current: tokens and certificates change while the server runs.

`Login.identity` is called before every request and `Login.renew` after a 401. Credentials are never logged or put
into an error.
"""

from __future__ import annotations

import base64
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stoker.engine.kubernetes.api.errors import KubeUnavailable
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig, User
from stoker.errors import SpecError

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Seconds between two checks of whether a file of credentials changed."""


@dataclass(frozen=True)
class Identity:
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)


class Login(Protocol):
    """Belongs to one event loop."""

    hint: str
    """What a user can do when the credentials are refused."""

    async def identity(self) -> Identity:
        """KubeUnavailable if there are none."""
        ...

    async def renew(self, refused: Identity) -> bool:
        """The server does not accept `refused`. True: there are other credentials now."""
        ...

    async def close(self) -> None: ...


class StoredLogin:
    """Credentials from the kubeconfig, or from files that it names, which are read again when they change. After a
    refusal the kubeconfig is read again too: `oc login` and similar commands write a new token there."""

    hint = "Log in to the cluster again, or ask its admin for valid credentials."

    def __init__(self, config: KubeConfig) -> None:
        self._config = config
        self._files: dict[Path, WatchedFile] = {}

    async def identity(self) -> Identity:
        return self._now(self._config.user)

    async def renew(self, refused: Identity) -> bool:
        for file in self._files.values():
            file.forget()
        if await self.identity() != refused:
            return True
        try:
            again = KubeConfig.load(self._config.kubeconfig, self._config.context)
        except SpecError as exc:
            log.warning("credentials were refused, and the kubeconfig cannot be read: %s", exc.message)
            return False
        if again.server != self._config.server or again.user.plugin is not None:
            return False
        self._config = again
        return await self.identity() != refused

    async def close(self) -> None:
        pass

    def _now(self, user: User) -> Identity:
        token = user.token
        if user.token_file is not None:
            token = self._read(user.token_file, token.encode()).decode("utf-8", "replace").strip()
        headers = list(user.headers)
        if token:
            headers.append(("Authorization", f"Bearer {token}"))
        elif user.username:
            pair = base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
            headers.append(("Authorization", f"Basic {pair}"))
        cert = self._read(user.cert_file) if user.cert_file is not None else user.cert
        key = self._read(user.key_file) if user.key_file is not None else user.key
        return Identity(tuple(headers), cert, key)

    def _read(self, path: Path, otherwise: bytes = b"") -> bytes:
        file = self._files.setdefault(path, WatchedFile(path))
        return file.read() or otherwise or _missing(file)


class WatchedFile:
    """A small file that other programs replace. While it is unreadable or empty, its last content is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._content = b""
        self._seen: tuple[int, ...] | None = None
        self._next = 0.0

    def read(self) -> bytes:
        now = time.monotonic()
        if now < self._next:
            return self._content
        self._next = now + CHECK_SECONDS
        try:
            state = os.stat(self.path)  # noqa: PTH116
            seen = (state.st_ino, state.st_mtime_ns, state.st_size)
            if seen != self._seen:
                self._content = self.path.read_bytes() or self._content
                self._seen = seen
            self.problem = ""
        except OSError as exc:
            self.problem = exc.strerror or str(exc)
        return self._content

    def forget(self) -> None:
        """Read the file again next time, even if its timestamps are unchanged."""
        self._seen, self._next = None, 0.0


def _missing(file: WatchedFile) -> bytes:
    raise KubeUnavailable(
        f"no credentials in {file.path}: {file.problem or 'it is empty'}",
        hint="The kubeconfig names this file: put it there, or log in to the cluster again.",
    )
