"""Kubernetes' quantities, both ways. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)},
}
_PATTERN = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,3})|([numkMGTPE]i?|Ki)?)")

_LONGEST = 64


def number(text: object) -> Fraction:
    """`500m`, `8Gi`, `1e3`. Anything else is 0: the object may come from another program."""
    text = str(text)
    found = _PATTERN.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if found is None:
        return Fraction(0)
    digits, exponent, suffix = found.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SUFFIXES.get(suffix or "")
    return Fraction(digits) * scale if scale is not None else Fraction(0)


def cores(text: object) -> float:
    return float(number(text))


def size(text: object) -> int:
    """Bytes, rounded down."""
    return int(number(text))


def show_cores(value: float) -> str:
    return f"{value:.3g} CPU" if value < 999.5 else f"{value:.0f} CPU"
