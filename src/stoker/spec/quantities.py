"""Sizes, durations, cores and counts as users write them, turned into plain numbers.

Every reader accepts whatever a YAML file, a JSON body or a flag may hold. It returns the normalised value or raises
`Bad` with the value, the reason and the fix. Readers also accept their own results, so a normalised job reads back
unchanged. Arithmetic is exact (fractions) until the last step.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {letter: 1000**power for power, letter in enumerate("KMGTPE", 1)}
SIZE_UNITS: dict[str, int] = (
    {"": 1, "B": 1, "k": 1000, "kB": 1000}
    | _DECIMAL
    | {f"{unit}B": factor for unit, factor in _DECIMAL.items()}
    | _BINARY
    | {f"{unit}B": factor for unit, factor in _BINARY.items()}
)
DURATION_UNITS: dict[str, Fraction] = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
    "w": Fraction(7 * 86400),
}
_DURATION_WORDS = {
    "s": ("sec", "secs", "second", "seconds"),
    "m": ("min", "mins", "minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
    "d": ("day", "days"),
    "w": ("week", "weeks"),
}
_SIZE_WORDS = {
    "gig": "gi",
    "gigs": "gi",
    "gigabytes": "gb",
    "gigabyte": "gb",
    "megabytes": "mb",
    "megabyte": "mb",
}
_NUMBER = r"\d{1,18}(?:\.\d{1,9})?"
SIZE_PATTERN = rf"^{_NUMBER}(?:B|[kKMGTPE]B?|[KMGTPE]i?B?)?$"
DURATION_PATTERN = rf"^(?:{_NUMBER}(?:ms|s|m|h|d|w) ?)+$"
CPU_PATTERN = rf"^{_NUMBER}m?$"
PERCENT_PATTERN = rf"^{_NUMBER} ?%$"
WORKERS_PATTERN = r"^\d{1,6}(?:\.\.\d{1,6})?$"

MAX_CPU = 100_000
MAX_GPU = 100_000
MAX_SIZE = 1 << 60
MAX_DURATION = 10 * 365 * 86400
MAX_WORKERS = 100_000
MAX_PROCESSES = 1024
"""Training processes of one task: more than machines have cores; with their threads about a task's limit."""
_LONGEST = 64
"""Characters of the longest quantity that is parsed."""


class Bad(ValueError):
    """A value that its key cannot accept. Message and hint follow the style of errors."""

    def __init__(self, message: str, *, hint: str | None = None, choices: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.choices = tuple(choices)


@dataclass(frozen=True, order=True)
class Workers:
    """The number of workers: exactly `min`, or elastic between `min` and `max`."""

    min: int = 1
    max: int = 1

    @property
    def elastic(self) -> bool:
        return self.min != self.max

    def __str__(self) -> str:
        return f"{self.min}..{self.max}" if self.elastic else str(self.min)

    def to_json(self) -> int | str:
        return str(self) if self.elastic else self.min


def show(value: Any) -> str:
    """A value as error messages quote it: short, on one line, without control characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if value.bit_length() < 128 else "a huge number"
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, str):
        cut = value if len(value) <= 60 else value[:57] + "..."
        return '"' + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut) + '"'
    return "a list" if isinstance(value, (list, tuple)) else "a mapping"


def cpu(value: Any) -> float:
    """Cores: `2`, `0.5`, `500m`."""
    number = _plain(value)
    if number is None and isinstance(value, str) and _short(CPU_PATTERN, value):
        number = Fraction(value[:-1]) / 1000 if value.endswith("m") else Fraction(value)
    if number is None:
        raise Bad(f"{show(value)} is not a number of cores", hint="Write cores, as in `2`, `0.5` or `500m`.")
    if number < Fraction(1, 1000):
        raise Bad(f"{show(value)} is too small; the least is 0.001", hint="Leave the key out for no limit.")
    if number > MAX_CPU:
        raise Bad(f"{show(value)} is more than {MAX_CPU} cores")
    return float(number)


def size(value: Any, *, least: int = 1) -> int:
    """Bytes: `8Gi`, `500Mi`, `2GB`, or a number of bytes. Fractions of a byte are rounded up."""
    number = _plain(value)
    if number is None and isinstance(value, str) and _short(SIZE_PATTERN, value):
        digits = value.rstrip("BikKMGTPE")
        number = Fraction(digits) * SIZE_UNITS[value[len(digits) :]]
    if number is None:
        raise Bad(f"{show(value)} is not a size", hint=_size_hint(value))
    if number < 0:
        raise Bad(f"{show(value)} is negative", hint="Write a size, as in `8Gi` or `500Mi`.")
    if number > MAX_SIZE:
        raise Bad(f"{show(value)} is more than 1Ei", hint="Write a size, as in `8Gi` or `500Mi`.")
    if number < least:
        guess = f"Did you mean `{number}Gi`?" if number.denominator == 1 and 0 < number < 4096 else None
        raise Bad(
            f"{show(value)} is {math.ceil(number)} bytes, too small to be meant; the least is {show_size(least)}",
            hint=guess or "Write a size, as in `8Gi` or `500Mi`.",
        )
    return math.ceil(number)


def memory(value: Any) -> int:
    """A size. One so small that no program could run with it lacks its unit."""
    return size(value, least=1 << 20)


def duration(value: Any, *, zero: bool = False) -> float:
    """Seconds: `90s`, `1h30m`, `2d`, or a number of seconds."""
    number = _plain(value)
    if number is None and isinstance(value, str):
        number = _duration_text(value)
    if number is None:
        raise Bad(f"{show(value)} is not a duration", hint=_duration_hint(value))
    if number < 0 or (number == 0 and not zero):
        what = "negative" if number < 0 else "no time at all"
        raise Bad(f"{show(value)} is {what}", hint="Write a duration, as in `90s` or `1h30m`.")
    if number > MAX_DURATION:
        raise Bad(f"{show(value)} is more than ten years", hint="Leave the key out for no limit.")
    return float(number)


def percent(value: Any) -> float:
    """`5%` as 5.0. A bare number below 1 could be a share or a percentage, so it is refused with a question."""
    number = _plain(value)
    if number is not None and 0 < number < 1:
        percents = f"{float(number * 100):.6g}"
        raise Bad(f"{show(value)} could be a share or a percentage", hint=f"Did you mean `{percents}%`?")
    if number is None and isinstance(value, str) and _short(PERCENT_PATTERN, value):
        number = Fraction(value.rstrip("% "))
    if number is None:
        raise Bad(f"{show(value)} is not a percentage", hint="Write it as in `5%`.")
    if not 0 <= number <= 100:
        raise Bad(f"{show(value)} is not between 0% and 100%")
    return float(round(number, 9))


def count(value: Any, *, least: int = 0, most: int = 1_000_000_000, noun: str = "whole number") -> int:
    """An integer within bounds. `2.0` and `"2"` are 2; `true` is not 1."""
    number = _plain(value)
    if number is None and isinstance(value, str) and _short(r"^[-+]?\d{1,18}$", value):
        number = Fraction(int(value))
    if number is None or number.denominator != 1:
        hint = f"Write a {noun} from {least} to {most}."
        if isinstance(value, str) and ".." in value and _short(WORKERS_PATTERN, value):
            hint = "Only `workers` can be a range."
        raise Bad(f"{show(value)} is not a {noun}", hint=hint)
    if not least <= number <= most:
        raise Bad(f"{show(value)} is not between {least} and {most}")
    return int(number)


def check_processes(number: int) -> None:
    """Separate from reading: a stored job with more processes was accepted before. Raises Bad."""
    if number > MAX_PROCESSES:
        raise Bad(
            f"{number} is more than one task can have: {MAX_PROCESSES}",
            hint="Each of them has threads, and both count towards a task's limit. Spread them over more `workers`.",
        )


def workers(value: Any) -> Workers:
    """`4`, or `2..8` for an elastic number."""
    if isinstance(value, Workers):
        return value
    if isinstance(value, str) and ".." in value and _short(WORKERS_PATTERN, value):
        low, high = (count(part, least=1, most=MAX_WORKERS) for part in value.split(".."))
        if low > high:
            raise Bad(f"{show(value)} runs backwards", hint=f"Did you mean `{high}..{low}`?")
        return Workers(low, high)
    try:
        exact = count(value, least=0, most=MAX_WORKERS)
    except Bad as exc:
        if "between" in exc.message:
            raise
        found = (
            re.fullmatch(r"\s*(\d{1,6})\s*(?:-|to|\.{1,3}|:|,)\s*(\d{1,6})\s*", value)
            if isinstance(value, str)
            else None
        )
        limits = (found[1], found[2]) if found else _limits(value)
        guess = (
            f"Did you mean `{limits[0]}..{limits[1]}`?"
            if limits
            else "Write `4`, or `2..8` for an elastic number."
        )
        raise Bad(f"{show(value)} is not a number of workers", hint=guess) from None
    return Workers(exact, exact)


def _limits(value: Any) -> tuple[Any, Any] | None:
    """Limits from `{min: 2, max: 4}`."""
    if not isinstance(value, dict):
        return None
    low, high = value.get("min"), value.get("max")
    return (low, high) if type(low) is int and type(high) is int and 0 < low <= high else None


PRIORITIES = {"low": -10, "normal": 0, "high": 10}


def priority(value: Any) -> int:
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    try:
        return count(value, least=-1000, most=1000)
    except Bad as exc:
        if "between" in exc.message:
            raise
        raise unknown(value, tuple(PRIORITIES), also="or a number from -1000 to 1000") from None


def choice(value: Any, choices: Sequence[str], *, synonyms: dict[str, str] | None = None) -> str:
    if isinstance(value, str) and value in choices:
        return value
    raise unknown(value, choices, synonyms=synonyms)


def unknown(
    value: Any, choices: Sequence[str], *, synonyms: dict[str, str] | None = None, also: str = ""
) -> Bad:
    """The error for a value outside `choices`, with the nearest choice if there is one."""
    text = value if isinstance(value, str) else show(value)
    near = (synonyms or {}).get(text.lower()) or nearest(text, choices)
    listed = ", ".join(choices) + (f", {also}" if also else "")
    hint = f"Did you mean `{near}`? Choices: {listed}." if near else f"Choices: {listed}."
    return Bad(f"{show(value)} is not one of the choices", hint=hint, choices=choices)


def nearest(word: str, choices: Sequence[str]) -> str | None:
    found = difflib.get_close_matches(word[:_LONGEST].lower(), choices, n=1, cutoff=0.6)
    return found[0] if found else None


def show_size(value: int) -> str:
    """Bytes in the largest binary unit that is exact: 8Gi, 1536Mi, 1000."""
    for unit, factor in sorted(_BINARY.items(), key=lambda item: -item[1]):
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def show_duration(seconds: float) -> str:
    """1h30m, 90s as 1m30s, 0.5s."""
    if seconds != int(seconds) or seconds <= 0:
        return f"{seconds:g}s"
    left, parts = int(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        whole, left = divmod(left, length)
        if whole:
            parts.append(f"{whole}{unit}")
    return "".join(parts)


def show_percent(value: float) -> str:
    text = f"{value:.9f}".rstrip("0").rstrip(".")
    return f"{text}%"


def _plain(value: Any) -> Fraction | None:
    """A finite number, given as a number or as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float) and math.isfinite(value):
        return Fraction(repr(value))
    if isinstance(value, str) and _short(rf"^[-+]?{_NUMBER}$", value):
        return Fraction(value)
    return None


def _short(pattern: str, value: str) -> bool:
    return len(value) <= _LONGEST and value.isascii() and re.fullmatch(pattern, value) is not None


def _duration_text(value: str) -> Fraction | None:
    if not _short(DURATION_PATTERN, value.strip()):
        return None
    parts = re.findall(rf"({_NUMBER})(ms|s|m|h|d|w)", value)
    return sum((Fraction(number) * DURATION_UNITS[unit] for number, unit in parts), Fraction(0))


def _size_hint(value: Any) -> str:
    if isinstance(value, str) and len(value) <= _LONGEST:
        found = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]+)\s*", value)
        if found:
            word = found[2].lower()
            wanted = _SIZE_WORDS.get(word, f"{word}i" if len(word) == 1 else word)
            same = [unit for unit in SIZE_UNITS if unit.lower() == wanted and unit != "kB"]
            if same:
                return f"Did you mean `{found[1]}{same[0]}`?"
    return "Write a size, as in `8Gi`, `500Mi` or `2GB`."


def _duration_hint(value: Any) -> str:
    usual = "Write a duration, as in `90s`, `1h30m` or `2d`."
    if not isinstance(value, str) or len(value) > _LONGEST:
        return usual
    clock = re.fullmatch(r"(\d{1,3}):([0-5]?\d):([0-5]?\d)", value)
    if clock:
        parts = [f"{int(n)}{unit}" for n, unit in zip(clock.groups(), "hms", strict=True) if int(n)]
        return f"Did you mean `{''.join(parts) or '0s'}`?"
    words = re.findall(rf"({_NUMBER})\s*([A-Za-z]+)", value)
    units = {word: unit for unit, names in _DURATION_WORDS.items() for word in (*names, unit)}
    if words and all(word.lower() in units for _, word in words):
        return f"Did you mean `{''.join(number + units[word.lower()] for number, word in words)}`?"
    return usual
