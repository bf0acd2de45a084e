"""Validates values from a task. User code can write these files, so every value is checked for its type and bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from stoker.store.rows import Point

Clean = Callable[[str], str]
"""Removes secrets."""
NAME = 200
"""Characters of a name."""


def same(text: str) -> str:
    return text


def hung(entry: Mapping[str, Any], clean: Clean = same) -> dict[str, Any]:
    if entry.get("k") == "alive":
        return {}
    return {
        "seconds": float(entry.get("seconds") or 0),
        "stacks": text(entry.get("stacks"), NAME, clean),
        "how": text(entry.get("how"), 20, clean),
    }


def points(entry: Mapping[str, Any], clean: Clean = same) -> list[Point]:
    values, step, t = entry.get("v"), entry.get("step"), entry.get("t")
    if not isinstance(values, dict) or type(step) is not int or abs(step) >= 1 << 62:
        return []
    if not number(t) or not math.isfinite(t):
        return []
    return [
        Point(text(key, NAME, clean), step, float(value), float(t))
        for key, value in values.items()
        if number(value)
    ]


def number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number: not `true`, and not an integer too large for a float."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)


def moment(value: object) -> float:
    """A time reported by a task; the present time if the value is not valid."""
    return float(value) if number(value) and 0 < value < 1e11 else time.time()


def text(value: object, limit: int, clean: Clean = same) -> str:
    """Text that a database can hold. Cleaned before it is cut: half a secret would not be recognized."""
    return clean(str(value))[:limit].encode("utf-8", "replace").decode()
