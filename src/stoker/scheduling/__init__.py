"""Who starts next, and where: a pure, incremental state machine.

Events go in (nodes changed, a run asks, a run ended), decisions come out. Nothing here reads a clock, draws a
random number or touches a file, so it can be tested by property and simulated over a year in seconds.
"""

from stoker.scheduling.model import (
    Ask,
    Explanation,
    Held,
    Holder,
    NodeShape,
    Place,
    Request,
    Shortage,
    Snapshot,
    Start,
    Verdict,
)
from stoker.scheduling.scheduler import Scheduler

__all__ = [
    "Ask",
    "Explanation",
    "Held",
    "Holder",
    "NodeShape",
    "Place",
    "Request",
    "Scheduler",
    "Shortage",
    "Snapshot",
    "Start",
    "Verdict",
]
