"""Amounts in messages, for programs inside and outside containers."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def readable_size(count: float) -> str:
    """Bytes in the largest binary unit, with one decimal below 100: `512 B`, `1.5 GiB`, `8 GiB`, `500 MiB`."""
    value = float(count)
    for unit in _UNITS:
        # What would be rounded up to 1024 belongs to the next unit.
        if abs(value) < 1023.5 or unit == _UNITS[-1]:
            break
        value /= 1024
    number = f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
    return f"{number[:-2] if number.endswith('.0') else number} {unit}"
