"""The speed of a run, and its scaling against a run of one worker. Pure.

Samples per second are compared if the script reports them, else steps. What a step of several workers means depends on
the script, so the text then names its assumption and also gives the figure for the other one.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = Sequence[tuple[int, float, float]]
"""(step, value, t) of one attempt, in the order of the steps."""

_THINGS = "samples|images|tokens|examples|sequences|records"
_RATE = re.compile(rf"(?:.*[/_])?({_THINGS})(?:_per_s(?:ec(?:ond)?)?|_?/_?s(?:ec)?|_ps)", re.IGNORECASE)
_COUNT = re.compile(rf"(?:.*/)?(?:num_|n_|total_)?({_THINGS})(?:_seen|_total|_per_step)?", re.IGNORECASE)
_THROUGHPUT = re.compile(r"(?:.*/)?throughput", re.IGNORECASE)


@dataclass(frozen=True)
class Speed:
    step_seconds: float | None = None
    rate: float | None = None
    """Units per second, of the whole world."""
    unit: str = ""
    """What `rate` counts: `samples`, `tokens`, ..."""
    reporters: int = 1
    """Number of tasks whose rates were added up."""

    @property
    def known(self) -> bool:
        return self.step_seconds is not None or self.rate is not None

    def text(self) -> str:
        """`0.034 s per step, 3,012 samples per second`"""
        parts = []
        if self.step_seconds is not None:
            parts.append(f"{_short(self.step_seconds)} s per step")
        if self.rate is not None:
            summed = f" (of {self.reporters} tasks together)" if self.reporters > 1 else ""
            parts.append(f"{_short(self.rate)} {self.unit} per second{summed}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Scaling:
    """Several workers against one."""

    workers: int
    against: str
    """The run of one worker."""
    efficiency: float
    """1: every worker is as fast as the single one."""
    basis: str
    """samples | steps"""
    text: str


def useful(keys: Iterable[str]) -> list[str]:
    """The keys of a run's metrics that its speed is computed from: the throughputs of every task, and one that counts
    the steps."""
    every = list(keys)
    counted = [key for key in every if _kind(key)]
    plain = [key for key in every if "@" not in key]
    steps = [key for key in plain if key in ("loss", "train_loss", "train/loss")] or plain
    return list(dict.fromkeys([*counted, *steps[:1]]))


def speed(series: Mapping[str, Points]) -> Speed:
    """`series`: points by key. A key like `samples@worker-1` was reported by another task than the first."""
    paces = [pace for key, points in series.items() if "@" not in key and (pace := step_seconds(points))]
    seconds = statistics.median(paces) if paces else None
    for key in sorted((key for key in series if "@" not in key and _kind(key)), key=_order):
        mine = [other for other in series if other == key or other.startswith(f"{key}@")]
        rates = [rate for one in mine if (rate := _rate(one, series[one], seconds)) is not None]
        if rates:
            return Speed(seconds, sum(rates), _unit(key), len(rates))
    return Speed(seconds)


def step_seconds(points: Points) -> float | None:
    """Median, so that a checkpoint or a start in between does not count."""
    found = [
        (later[2] - earlier[2]) / (later[0] - earlier[0])
        for earlier, later in pairwise(points)
        if later[0] > earlier[0] and later[2] > earlier[2]
    ]
    return statistics.median(found) if found else None


def compare(many: Speed, workers: int, one: Speed, against: str) -> Scaling | None:
    """None: the two report nothing comparable."""
    if workers < 2:
        return None
    if many.rate and one.rate and many.unit == one.unit:
        times = many.rate / one.rate
        text = f"{times:.2f}x the {many.unit} per second of one worker ({against}): {_percent(times / workers)} of ideal for {workers}"
        return Scaling(workers, against, times / workers, "samples", text)
    if many.step_seconds and one.step_seconds:
        weak = one.step_seconds / many.step_seconds
        text = (
            f"{_percent(weak)} of ideal for {workers} workers, by steps: one worker alone took {_short(one.step_seconds)} s "
            f"({against}). This takes every worker's batch to be as big as the one's was; if they share one batch of that "
            f"size it is {_percent(weak / workers)}. Report `samples_per_second` to know"
        )
        return Scaling(workers, against, weak, "steps", text)
    return None


def _kind(key: str) -> str:
    """rate | count; empty: not a throughput."""
    plain = key.partition("@")[0]
    if _RATE.fullmatch(plain) or _THROUGHPUT.fullmatch(plain):
        return "rate"
    return "count" if _COUNT.fullmatch(plain) else ""


def _order(key: str) -> tuple[bool, str]:
    """Rates that the script computed itself come first."""
    return _kind(key) != "rate", key


def _unit(key: str) -> str:
    found = _RATE.fullmatch(key) or _COUNT.fullmatch(key)
    return found.group(1).lower() if found else "throughput"


def _rate(key: str, points: Points, seconds: float | None) -> float | None:
    points = [point for point in points if math.isfinite(point[1])]
    values = [value for _, value, _ in points]
    if not values:
        return None
    if _kind(key) == "rate":
        return statistics.median(values)
    if all(value == values[0] for value in values):
        return values[0] / seconds if seconds and values[0] > 0 else None  # a constant: the count per step
    passed = points[-1][2] - points[0][2]
    grown = values[-1] - values[0]
    return grown / passed if passed > 0 and grown > 0 else None


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
