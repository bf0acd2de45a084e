"""Who starts next, and where: a pure, incremental state machine.

Events go in (nodes changed, a run asks, a run ended), decisions come out. Nothing here reads a clock, draws a
random number or touches a file, so it can be tested by property and simulated over a year in seconds.

For gangs: `Request.extra` are tasks beyond the minimum, `Request.size` how many it wants for now, `Request.avoid` the
nodes and GPUs it keeps away from where it can. Tasks keep their numbers: `Scheduler.release_part(id, indexes)` gives
some back, `Scheduler.replace(id, index, avoid)` finds a new place for one, `Scheduler.resize_gang(id, count)` changes
the wish; `Scheduler.may_grow(id)` says that it has settled, and `Scheduler.adjust()`, called after each `decide()`, who
grows (`Grow`) and who is to give back (`Shrink`); `Scheduler.adopt(request, places, indexes)` believes what a restart finds.

Beside the queue: `Deadlock` says which of several half-started gangs lets go, `HealthTracker` which nodes and GPUs are set
aside because too much failed on them, and `trusted(nodes, asides)` what is left to hand out.
"""

from stoker.scheduling.gang_deadlock import Deadlock, LetGo, PartialGang
from stoker.scheduling.model import (
    Ask,
    Explanation,
    Feasibility,
    Grow,
    Held,
    Holder,
    NodeShape,
    Place,
    Request,
    Shortage,
    Shrink,
    Snapshot,
    Start,
    gpu_name,
)
from stoker.scheduling.node_health import Aside, Failure, HealthTracker, trusted
from stoker.scheduling.scheduler import Scheduler

__all__ = [
    "Aside",
    "Ask",
    "Explanation",
    "Failure",
    "Grow",
    "PartialGang",
    "Held",
    "Holder",
    "LetGo",
    "NodeShape",
    "Place",
    "Request",
    "Scheduler",
    "Shortage",
    "Shrink",
    "Snapshot",
    "Deadlock",
    "Start",
    "HealthTracker",
    "Feasibility",
    "gpu_name",
    "trusted",
]
