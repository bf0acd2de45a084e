"""Requests to one API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Case-insensitive."""
    body: bytes

    def json(self) -> Any:
        """KubeUnavailable if it is not JSON: it was cut short, or something in between answered."""
        raise NotImplementedError
