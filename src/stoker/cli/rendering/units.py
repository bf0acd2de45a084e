"""Durations, times, sizes and counts in readable form."""

from __future__ import annotations

import math
import time
from typing import Any

from stoker.cli.rendering import terminal
from stoker.task.units import readable_size


def duration(seconds: float | None) -> str:
    """`0.4s`, `45s`, `3m20s`, `2h05m`, `3d4h`"""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def age(then: float | None, now: float | None = None) -> str:
    """`12s`, `3m`, `5h`, `2d`, `8w`: one unit, for lists."""
    if then is None:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - then)
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "m"), (86400, 3600, "h"), (14 * 86400, 86400, "d")):
        if seconds < limit:
            return f"{int(seconds // unit)}{name}"
    return f"{int(seconds // (7 * 86400))}w"


def clock(then: float | None, now: float | None = None) -> str:
    """`14:03:22` today, `2026-01-31 14:03` otherwise, local time."""
    if then is None:
        return "-"
    at = time.localtime(then)
    today = time.localtime(time.time() if now is None else now)
    if at[:3] == today[:3]:
        return time.strftime("%H:%M:%S", at)
    return time.strftime("%Y-%m-%d %H:%M", at)


def size(count: float | None) -> str:
    """`512 B`, `1.5 GiB`"""
    return "-" if count is None else readable_size(count)


def number(value: Any) -> str:
    """A metric or a count: `0.0123`, `1.5e-07`, `12000`; strings such as `NaN` stay as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else terminal.safe(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e7):
        return str(int(value))
    return f"{value:.4g}"


def ordinal(value: int) -> str:
    if 10 <= value % 100 <= 20:
        return f"{value}th"
    return f"{value}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(value % 10, 'th') }"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_duration(text: str) -> float | None:
    """`90`, `10m`, `1h30m`, `1.5d` as seconds; None for anything else."""
    total = 0.0
    figures = ""
    units = 0
    for char in text.strip().lower():
        if char.isdigit() or char == ".":
            figures += char
            continue
        if char not in UNITS:
            return None
        part = _float(figures)
        if part is None:
            return None
        total += part * UNITS[char]
        figures = ""
        units += 1
    if figures:
        rest = _float(figures)
        if rest is None or units:
            return None
        return rest
    return total if units else None


def _float(figures: str) -> float | None:
    try:
        return float(figures)
    except ValueError:
        return None
