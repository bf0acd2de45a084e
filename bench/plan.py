"""The number of measurements: in full, or few for a quick try."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    quick: bool
    rounds: int
    """Rounds of commands timed in turns."""
    slow_every: int
    """Commands that take seconds take part in each n-th round."""
    jobs: int
    """Runs through the queue in one round of row 3."""
    queue_rounds: int
    sample: float
    """Seconds of a sample of peers that are too slow to finish."""
    spawn: float
    """Seconds of bare spawning per limit."""
    queued: int
    running: int
    load: float
    """Seconds of open-loop load."""
    files: int
    """Files of the run that row 8c pulls."""


FULL = Scale(False, 25, 5, 2000, 3, 60.0, 5.0, 10_000, 1_000, 45.0, 20_000)
QUICK = Scale(True, 4, 4, 200, 1, 10.0, 1.5, 1_000, 100, 8.0, 2_000)
