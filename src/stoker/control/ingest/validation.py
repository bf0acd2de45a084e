"""What a task says, as the server may believe it: user code can write these files, so every value has its type and its bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from stoker.store.rows import Point

Clean = Callable[[str], str]
"""Takes out what must not be recorded."""
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
    """A number that is one: `true` is not, nor is an integer beyond every float."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)


def moment(value: object) -> float:
    """When something happened, as a task says; now where what it says is no time."""
    return float(value) if number(value) and 0 < value < 1e11 else time.time()


def text(value: object, limit: int, clean: Clean = same) -> str:
    """Text from a task as a database can hold it. Cleaned before it is cut: half a secret would not be known for one."""
    return clean(str(value))[:limit].encode("utf-8", "replace").decode()
