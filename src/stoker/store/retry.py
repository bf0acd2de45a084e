"""Repeats work that failed for a transient reason: a lock held by another process, a lost connection."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRIES = 3
"""The smallest number of tries."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


def with_retries(work: Callable[[], T], transient: Callable[[Exception], bool], seconds: float) -> T:
    """Returns the result of `work`. Repeats it after `transient` errors, at least twice and until so many seconds have
    passed; then raises the last error."""
    until = time.monotonic() + seconds
    for number in itertools.count(1):
        try:
            return work()
        except Exception as exc:  # errors of any driver: all that are not `transient` are raised again
            if not transient(exc) or (number >= TRIES and time.monotonic() >= until):
                raise
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(number, 10))
        time.sleep(pause * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")
