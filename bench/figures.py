"""Numbers with their spread. A figure always includes the number of its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """The median of `n` measurements and their range from the 10th to the 90th percentile."""

    middle: float
    low: float
    high: float
    n: int
    unit: str

    def text(self) -> str:
        """`23.1 ms (22.0-25.4)`; without the spread for a single measurement."""
        tail = "x" if self.unit == "x" else f" {self.unit}"
        spread = f" ({number(self.low)}-{number(self.high)})" if self.n > 1 else ""
        return f"{number(self.middle)}{tail}{spread}"

    def to_json(self) -> dict[str, Any]:
        return {"middle": self.middle, "low": self.low, "high": self.high, "n": self.n, "unit": self.unit}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Figure:
        return cls(**{name: raw[name] for name in ("middle", "low", "high", "n", "unit")})


def figure(values: Sequence[float], unit: str) -> Figure:
    """Median and 10th to 90th percentile."""
    if not values:
        raise ValueError("a figure needs at least one measurement")
    return Figure(
        statistics.median(values), percentile(values, 10), percentile(values, 90), len(values), unit
    )


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Figure | None:
    """Ours over theirs, round by round, since a disturbance of the machine affects both in a round.
    Rounds in which one was not measured do not count; None when no round is left."""
    pairs = [
        (one, other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None
    ]
    return figure([one / other for one, other in pairs], "x") if pairs else None


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest ranks."""
    if not values:
        raise ValueError("a percentile needs at least one measurement")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile is between 0 and 100, not {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def number(value: float) -> str:
    """Three significant digits: 0.0123, 1.23, 12.3, 123, 12,345."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3g}"
