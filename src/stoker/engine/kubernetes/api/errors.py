"""What can go wrong between us and an API server.

EngineError
├── KubeError            it understood and said no: 400, 403, 404, 409, 410, 422 ...
└── EngineUnavailable
    └── KubeUnavailable  no answer, or none that says anything about the cluster: no connection, timed out, 401,
                         429 and 5xx after a few tries. Of a write it is not known whether it was done
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.errors import EngineError, EngineUnavailable


class KubeError(EngineError):
    """`status` is HTTP's, `reason` Kubernetes' own word (`NotFound`, `AlreadyExists`, `Conflict`, `Forbidden`,
    `Invalid`, `Expired`), `message` what the API server wrote."""

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
        """Something of this name is there already."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def conflict(self) -> bool:
        """It changed since it was read (or a precondition failed)."""
        return self.status == 409 and self.reason != "AlreadyExists"

    @property
    def expired(self) -> bool:
        """The resource version is too old to go on from: list again."""
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


class Cut(KubeUnavailable):
    """No connection, or it was lost: asking again may well work."""


class Stalled(Cut):
    """The connection is there, and nothing comes."""
