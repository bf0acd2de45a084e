"""The queue: who starts next, and where. A pure, incremental state machine.

Events go in (nodes changed, a run asks, a run ended), decisions come out. Nothing here reads a clock, draws a
random number or touches a file, so it can be tested by property and simulated over a year in seconds.

scheduler      Scheduler: events in, decisions out
model          the nouns: nodes, requests, places, decisions
queue          requests in the order in which they would start
placement      which node each task goes to
ledger         what is held, and what is free where
allocation     what one run holds, task by task
allocations    all of them, kept together with the ledger
reservations   what is kept for requests that wait
elastic        shares of what nothing else can use
reclaim        what is on loan comes back
feasibility    whether a request could ever start
explain        why a request waits, in words
gang_deadlock  Deadlock: which of several half-started gangs lets go
node_health    HealthTracker: nodes and GPUs that are set aside because too much failed on them

For gangs: `Request.extra` are tasks beyond the minimum, `Request.size` how many it wants for now, `Request.avoid` the
nodes and GPUs it keeps away from where it can. Tasks keep their numbers: `Scheduler.release_part(id, indexes)` gives
some back, `Scheduler.resize_gang(id, count)` changes the wish. `Scheduler.may_grow(id)` says that a run has settled;
`Scheduler.adjust()`, called after each `decide()`, returns which runs grow (`Grow`) and which are to give back
(`Shrink`). `Scheduler.adopt(request, places, indexes)` takes over what a restart finds.
"""

from stoker.scheduling.gang_deadlock import Deadlock, LetGo, PartialGang
from stoker.scheduling.model import (
    Ask,
    Explanation,
    Feasibility,
    Grow,
    NodeShape,
    Place,
    Request,
    Shrink,
    Start,
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
    "LetGo",
    "NodeShape",
    "Place",
    "Request",
    "Scheduler",
    "Shrink",
    "Deadlock",
    "Start",
    "HealthTracker",
    "Feasibility",
    "trusted",
]
