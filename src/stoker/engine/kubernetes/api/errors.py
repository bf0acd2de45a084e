"""Errors of requests to an API server.

EngineError
├── KubeError            it refused the request: 400, 403, 404, 409, 410, 422 ...
└── EngineUnavailable
    └── KubeUnavailable  no answer, or none that says anything about the cluster: no connection, timed out, 401,
                         429 and 5xx after a few tries. It is not known whether a write was done
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.errors import EngineError, EngineUnavailable


class KubeError(EngineError):
    """`status` is HTTP's, `reason` the word of Kubernetes (`NotFound`, `AlreadyExists`, `Conflict`, `Forbidden`,
    `Invalid`, `Expired`), `message` the API server's text."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.status = status
        self.reason = reason

    @property
    def absent(self) -> bool:
        return self.status == 404

    @property
    def exists(self) -> bool:
        """An object of this name already exists."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def conflict(self) -> bool:
        """The object changed since it was read (or a precondition failed)."""
        return self.status == 409 and self.reason != "AlreadyExists"

    @property
    def expired(self) -> bool:
        """The resource version is too old to continue from: list again."""
        return self.status == 410


class KubeUnavailable(EngineUnavailable):
    """`status` is that of the last answer, 0 if there was none."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.status = status


class Disconnected(KubeUnavailable):
    """No connection, or it was lost: a retry may work."""


class Stalled(Disconnected):
    """The connection is open, but no data arrives."""
