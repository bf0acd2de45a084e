"""Seconds per step of a task, from the steps it reports. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from stoker.store.rows import Point

_KEPT = 21
"""Steps that the median is taken of: enough that a checkpoint or a pause in between does not count."""


class StepRate:
    """The newest step and a moving median of the seconds per step. All times are from the task's own clock."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._t = 0.0
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def take(self, points: Iterable[Point]) -> None:
        """Values of the same step count once. A step that goes back resets the median."""
        for point in points:
            if self._step is not None and point.step > self._step and point.t >= self._t:
                self._seconds.append((point.t - self._t) / (point.step - self._step))
            elif self._step is not None and point.step < self._step:
                self._seconds.clear()
            if point.step != self._step:
                self._step, self._t = point.step, point.t

    def usage(self) -> dict[str, float]:
        if self._step is None:
            return {}
        found: dict[str, float] = {"step": self._step}
        if self._seconds:
            found["step_seconds"] = round(statistics.median(self._seconds), 6)
        return found
