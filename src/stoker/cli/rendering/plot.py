"""A curve in a few terminal lines: braille dots (2 x 4 per character), or `*` where only ASCII works."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from stoker.cli.rendering import units

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def numeric(points: Sequence[Sequence[object]]) -> list[tuple[float, float]]:
    """(step, value) of the points that can be drawn. NaN and infinities come as strings and are left out."""
    found = []
    for point in points:
        step, value = point[0], point[1]
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value):
            found.append((float(step), float(value)))
    return found


def plot(
    points: Sequence[tuple[float, float]], *, columns: int, rows: int, unicode: bool = True
) -> list[str]:
    """Lines of at most `columns` characters: the curve, its range on the left, its steps below."""
    if not points:
        return ["(nothing to draw)"]
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = min(s for s, _ in points), max(s for s, _ in points)
    labels = (units.number(high), units.number(low))
    left = max(len(label) for label in labels)
    wide = max(8, columns - left - 2)
    across, down = (2, 4) if unicode else (1, 1)
    grid = [[0] * wide for _ in range(rows)]
    for x, y in _pixels(points, (first, last), (low, high), wide * across, rows * down):
        grid[y // down][x // across] |= DOTS[y % 4][x % 2] if unicode else 1
    lines = []
    for number, row in enumerate(grid):
        label = labels[0] if number == 0 else labels[1] if number == rows - 1 else ""
        if low == high:
            label = labels[0] if number == (rows - 1) // 2 else ""
        drawn = (
            "".join(chr(0x2800 + bits) if bits else " " for bits in row)
            if unicode
            else "".join(" *"[b] for b in row)
        )
        lines.append(f"{label:>{left}} {'│' if unicode else '|'}{drawn}".rstrip())
    steps = (units.number(first), units.number(last))
    gap = max(1, wide - len(steps[0]) - len(steps[1]))
    lines.append(" " * (left + 2) + steps[0] + (" " * gap + steps[1] if first != last else ""))
    return lines


def _pixels(
    points: Sequence[tuple[float, float]],
    steps: tuple[float, float],
    values: tuple[float, float],
    wide: int,
    high: int,
) -> set[tuple[int, int]]:
    """Dots of the line through the points, in order of their step."""
    span = (steps[1] - steps[0]) or 1.0
    rise = values[1] - values[0]
    placed = []
    for step, value in sorted(points):
        x = round((step - steps[0]) / span * (wide - 1))
        y = round((values[1] - value) / rise * (high - 1)) if rise else (high - 1) // 2
        placed.append((x, y))
    dots = set(placed)
    for (x0, y0), (x1, y1) in itertools.pairwise(placed):
        reach = max(abs(x1 - x0), abs(y1 - y0))
        dots |= {
            (x0 + round((x1 - x0) * i / reach), y0 + round((y1 - y0) * i / reach)) for i in range(1, reach)
        }
    return dots
