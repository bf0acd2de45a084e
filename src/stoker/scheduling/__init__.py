"""The scheduler: which run starts next, and where. A pure, incremental state machine.

Events go in (nodes changed, a run asks, a run ended), decisions come out. Nothing here reads a clock, draws a
random number or touches a file, so property tests are possible, and a simulation of a year takes seconds.

scheduler      Scheduler: events in, decisions out
model          the values: nodes, requests, places, decisions
queue          requests in the order in which they would start
placement      which node each task goes to
ledger         what is held and what is free, by node
allocation     what one run holds, task by task
allocations    all allocations, changed together with the ledger
reservations   what is reserved for waiting requests
elastic        which elastic requests get more tasks
reclaim        takes back tasks on loan
feasibility    whether a request could ever start
explain        why a request waits, in words
gang_deadlock  Deadlock: which of several incomplete gangs are released
node_health    HealthTracker: nodes and GPUs that are avoided because too much failed on them

For gangs: `Request.extra` are tasks beyond the minimum. `Request.size` is the number of tasks wanted now. A request
uses the nodes and GPUs of `Request.avoid` only if it fits nowhere else. Tasks keep their numbers when
`Scheduler.release_part(id, indexes)` gives some back. `Scheduler.resize_gang(id, count)` changes the wanted number.
`Scheduler.may_grow(id)` is called once a run has settled. `Scheduler.adjust()`, called after each `decide()`, returns
which runs grow (`Grow`) and which give back tasks (`Shrink`). `Scheduler.adopt(request, places, indexes)` takes over
what is found after a restart.
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
