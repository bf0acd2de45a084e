"""Authenticated calls to one courier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.engine.kubernetes.far.transport import Transport


class CourierLost(OSError):
    """No authentic answer: the pod, its node or the way there is gone, for now or for good. Says nothing about
    the task. Its errno is EIO, so that whoever carries something tries again."""


class Courier:
    """The client of one courier. Used from one event loop, by several callers at once."""

    def __init__(self, key: bytes, transport: Transport) -> None:
        raise NotImplementedError

    async def call(
        self, verb: str, header: Mapping[str, Any], data: bytes = b"", *, timeout: float = 30.0
    ) -> tuple[dict[str, Any], bytes]:
        """What the courier answers. Raises CourierLost, or the OSError the courier met (FileNotFoundError, ...)."""
        raise NotImplementedError
