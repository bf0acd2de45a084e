"""Trying again what failed through no fault of its own: a lock that somebody holds, a connection that was lost."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRIES = 3
"""How often at least."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


def patiently(work: Callable[[], T], transient: Callable[[Exception], bool], seconds: float) -> T:
    """What `work` returns in the end. It is begun again after errors that are `transient`, at least twice and
    until so many seconds have passed; then the last error is raised."""
    until = time.monotonic() + seconds
    for number in itertools.count(1):
        try:
            return work()
        except Exception as exc:  # of any driver: `transient` knows its own, all others are raised again
            if not transient(exc) or (number >= TRIES and time.monotonic() >= until):
                raise
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(number, 10))
        time.sleep(pause * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")
